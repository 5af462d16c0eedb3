"""Pictures with captions -> filtered VQGAN codes."""
