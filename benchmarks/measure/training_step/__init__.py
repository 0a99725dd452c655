"""``python -m benchmarks training-step``: a step and its parts, by synchronisation."""
