"""LAMB with 8-bit statistics, plain and compiled."""
