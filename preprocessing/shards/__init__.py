"""Shards of codes: how to write, read, check and show them."""
