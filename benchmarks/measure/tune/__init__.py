"""``python -m benchmarks tune``: a table of what ``auto`` chooses on this cluster."""
