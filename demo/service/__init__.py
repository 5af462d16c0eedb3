"""Who draws when, and how long it takes."""
