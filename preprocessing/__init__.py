"""Pictures with captions -> shards of VQGAN codes."""
