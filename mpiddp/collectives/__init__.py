"""Runs a schedule on buffers: compiled to instructions, sent over a transport."""

AUTO = "auto"
"""In place of an algorithm's or a transport's name."""
MPI, TORCH, SHARED, BOTH = "mpi", "torch", "shared-memory", "shared-memory+mpi"
TRANSPORTS = (SHARED, BOTH, MPI, TORCH)
