"""MPI's start and end, and whether the library fits the launcher."""
