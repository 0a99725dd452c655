"""``python -m benchmarks stragglers``: training while a worker is slow."""
