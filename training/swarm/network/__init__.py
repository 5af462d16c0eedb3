"""Nodes, addresses, reconnection, and processes that die with their parent."""
