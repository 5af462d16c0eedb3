"""Scoring pictures by a caption, and the CLIP architectures it can read."""
