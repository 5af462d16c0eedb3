"""Measures how well a model draws what prompts ask for, by questions with exact answers and by independent judges."""
