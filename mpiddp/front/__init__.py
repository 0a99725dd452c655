"""Starts the ranks, and ends with the job's exit code. Standard library only."""
