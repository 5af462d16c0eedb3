"""Prompt -> codes -> pixels -> CLIP scores -> the best few."""

from inference.generator import Generator, Picture

__all__ = ["Generator", "Picture"]
