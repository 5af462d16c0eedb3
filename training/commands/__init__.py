"""The commands that train, host, join and watch."""
