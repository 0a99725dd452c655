"""Which launcher started this process, and what its nodes are called."""
