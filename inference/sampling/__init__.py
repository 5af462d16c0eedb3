"""Draws codes one by one with a KV cache."""
