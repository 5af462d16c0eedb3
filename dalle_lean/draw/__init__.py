"""Plots and lettering without a drawing library."""
