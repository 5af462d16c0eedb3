"""One optimizer step: losses, gradients, precision."""
