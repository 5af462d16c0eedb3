"""One optimizer step: losses, gradients, one process or several."""
