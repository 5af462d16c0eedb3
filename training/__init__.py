"""Shards -> batches -> loss -> gradients -> a trained model."""
