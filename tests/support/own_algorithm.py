"""An algorithm of a user's own, as a file that ``--load`` takes."""

STAR = '''
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.registry import register
from mpiddp.schedules.schedule import all_reduce


@register("star")
def star(n):
    """All send to rank 0 in turns."""
    there = [[add(rank, 0)] for rank in range(1, n)]
    return all_reduce(n, 1, there + [[copy(0, rank)] for rank in range(1, n)], owners=[0])
'''
