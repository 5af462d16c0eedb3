"""The host's own peers and the checkpoints of its run."""
