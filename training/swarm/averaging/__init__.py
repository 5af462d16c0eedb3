"""Averaging of gradients and weights with peers, and the checks of what they send."""
