"""Metrics that peers publish, and the monitor, leaderboard and page made of them."""
