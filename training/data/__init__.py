"""Batches from shards: which, in which order, read, checked and prefetched."""
