"""Training together: hivemind's peers, and what the house adds so that nothing on the way loses the run."""
