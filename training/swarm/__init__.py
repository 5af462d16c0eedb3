"""Collaborative training: hivemind's peers, made robust so that no fault loses the run."""
