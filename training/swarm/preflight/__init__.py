"""Checks of a volunteer's machine, and the batch that fits it."""
