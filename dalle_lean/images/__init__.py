"""Pictures, their VQGAN codes, and what stands on a plain ground."""
