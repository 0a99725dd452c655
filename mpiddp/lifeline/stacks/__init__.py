"""Stacks of Python and flight records of a rank, read from beside it."""
