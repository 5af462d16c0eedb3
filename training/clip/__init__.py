"""Training of a small CLIP: what ranks the pictures of a model."""
