"""``python -m benchmarks report``: one page of what was measured."""
