"""A plain text decoder on the same layers."""

from dalle_lean.language.gpt2 import load_gpt2
from dalle_lean.language.model import LanguageConfig, LanguageModel

__all__ = ["LanguageConfig", "LanguageModel", "load_gpt2"]
