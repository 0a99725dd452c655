"""What all benchmarks share: statistics, options, results, pictures."""
