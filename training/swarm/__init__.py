"""Training together: hivemind's peers, and what is added to them so that no fault on the way loses the run."""
