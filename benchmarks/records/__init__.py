"""What was measured: cells and their statistics, options, names."""
