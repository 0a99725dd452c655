"""``python -m benchmarks allreduce``, and the other commands that measure calls by size."""
