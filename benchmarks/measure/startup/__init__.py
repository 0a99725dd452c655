"""``python -m benchmarks startup``: from the launch to the first all-reduce."""
