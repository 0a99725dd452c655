"""What one node gives its ranks, and the launch on it."""
