"""Training of a classifier that names the thing in a picture."""
