"""Training of the VQGAN, the CLIP and the classifier of things, by one loop."""
