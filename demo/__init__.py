"""The prompt page."""
