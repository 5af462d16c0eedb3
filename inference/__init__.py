"""Prompt -> codes -> pixels -> CLIP scores -> the best few."""

from inference.generator import Generator
from inference.request import Picture

__all__ = ["Generator", "Picture"]
