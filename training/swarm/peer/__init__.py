"""A trainer's walk from its address to its batches."""
