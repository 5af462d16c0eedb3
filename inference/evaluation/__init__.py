"""How well a model draws what it is asked for: questions with exact answers, and judges that the model never met."""
