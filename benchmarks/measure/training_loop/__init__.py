"""``python -m benchmarks training-loop``: the trainer's loop beside a bare one."""
