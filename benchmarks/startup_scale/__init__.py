"""``python -m benchmarks startup-scale``: what start-up asks of rank 0, as the ranks grow."""
