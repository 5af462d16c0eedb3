"""Training of a VQGAN on a folder of pictures."""
