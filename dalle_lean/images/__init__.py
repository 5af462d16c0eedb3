"""Pictures, their VQGAN codes, and things on a plain ground."""
