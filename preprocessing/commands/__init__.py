"""The commands `preprocess` and `shards`."""
