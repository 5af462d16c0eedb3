"""Benchmarks: a script for each question, which prints tables, then one JSON line. Results are in BENCHMARKS.md."""
