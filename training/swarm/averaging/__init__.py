"""Averaging with peers: gradients, states, and what is accepted of them."""
