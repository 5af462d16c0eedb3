"""CLIP: scores of pictures for a caption, and the architectures that can be loaded."""
