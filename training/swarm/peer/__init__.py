"""A trainer: joining a run, computing gradients and taking steps with the others."""
