"""Collective algorithms as data: what is sent, step by step. No torch, no MPI.

``schedule`` says what an algorithm is; ``algorithms`` and ``nearby_algorithms`` hold those that
come with mpiddp; ``registry`` finds them by name; ``proof`` and ``cost`` work on any of them.
"""

# They register themselves, whichever module of the package is wanted.
from mpiddp.schedules import algorithms, nearby_algorithms

__all__ = ["algorithms", "nearby_algorithms"]
