"""One script per question; each prints a table, then one JSON line. Results are in BENCHMARKS.md."""
