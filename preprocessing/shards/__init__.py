"""Shards of codes: written, read, checked, shown."""
