"""The commands `generate` and `evaluate`."""
