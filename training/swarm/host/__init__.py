"""The host's own peers, and its checkpoints."""
