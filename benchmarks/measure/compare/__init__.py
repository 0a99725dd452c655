"""``python -m benchmarks compare``: two records of one command, cell by cell."""
