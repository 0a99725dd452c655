"""``python -m benchmarks fit``: α, β and γ of this machine, from messages and additions alone."""
