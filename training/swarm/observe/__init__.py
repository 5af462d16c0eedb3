"""What peers say of themselves, and what is made of it."""
