"""Files: atomic writes, weights, model folders, errors of remote file systems."""
