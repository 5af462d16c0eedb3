"""What went wrong because of what the user gave, told from what is a bug."""


class UserError(ValueError):
    """The user can mend it: the message says what is wrong, with which value, and what to do."""
