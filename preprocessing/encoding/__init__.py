"""Pictures with captions to filtered VQGAN codes."""
