"""Who may take part in a run: keys, passes, invitations, bans, and the gate through which every call goes."""
