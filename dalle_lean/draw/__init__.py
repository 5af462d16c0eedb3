"""Plots and text layout without a plotting library."""
