"""``python -m benchmarks allreduce``: one all-reduce beside the others, by size."""
