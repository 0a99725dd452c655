"""Collective algorithms as data: written once, proved, priced, drawn.

``schedule`` says what an algorithm is, ``algorithms`` has those that are here, ``registry`` finds
them by name; ``proof``, ``cost`` and ``drawing`` work on any of them.
"""

from mpiddp.collectives import algorithms

__all__ = ["algorithms"]
