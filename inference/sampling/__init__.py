"""Codes drawn one after another with a cache of keys and values."""
