"""A plain text decoder on the same layers."""

from dalle_lean.language.config import LanguageConfig
from dalle_lean.language.gpt2 import load_gpt2
from dalle_lean.language.model import LanguageModel

__all__ = ["LanguageConfig", "LanguageModel", "load_gpt2"]
