"""hivemind's optimizer with limits, for each role."""
