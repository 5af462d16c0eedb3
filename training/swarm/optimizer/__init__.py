"""hivemind's optimizer for each role, with bounded retries and checked inputs."""
