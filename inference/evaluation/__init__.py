"""How well a model draws what a prompt asks for: questions with exact answers, and judges it was not trained with."""
