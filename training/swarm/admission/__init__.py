"""Who may take part in a run: keys, passes, invitations, bans, and the gate that every call passes."""
