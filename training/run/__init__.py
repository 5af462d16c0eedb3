"""A run: its recipe, folder, checkpoints, metrics and end."""
