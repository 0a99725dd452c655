"""Which ranks live: a small process beside each rank, and the connections between these."""
