"""What a volunteer's machine must have, and the batch that fits it."""
