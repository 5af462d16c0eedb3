"""The transformer: masks, attention, layers, and the ways to run them in little memory."""
