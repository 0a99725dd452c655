"""Machines and schedules for the tests of prices."""

import functools
import math
from operator import add

from hypothesis import strategies as st

import promises
from mpiddp.schedules import registry
from mpiddp.schedules.machine import Machine, MessageCost, Piece

WITH_HALVES = tuple(name for name in registry.names() if registry.parse(name).build(4).owners)
FULL = tuple(
    name
    for name in registry.names()
    if name != "two-level" and len(registry.parse(name).build(5).members) == 5
)
"""They leave nobody out, so that they may connect nodes, and lower bounds hold for them."""
ODD = Machine(MessageCost(3e-6, 7e-11), MessageCost(11e-6, 13e-10), 17e-12, 5e-10)


def close(found, wanted):
    return math.isclose(found, wanted, rel_tol=1e-12)


@st.composite
def machines(draw):
    """All that a Machine may be, within what floating point multiplies without loss."""
    figures = st.one_of(st.just(0.0), st.floats(1e-30, 1e3))
    latency, per_byte, more, further, gamma = (draw(figures) for _ in range(5))
    far = MessageCost(latency + more, per_byte + further)
    shared = draw(
        st.one_of(st.none(), st.floats(0, 1).map(lambda part: part * far.seconds_per_byte))
    )
    return Machine(MessageCost(latency, per_byte), far, gamma, shared)


@st.composite
def pieced_machines(draw, *, is_ordered=False):
    """Messages and additions whose cost changes with their size, by jumps and by kinks.

    ``is_ordered``: between nodes they are no quicker than inside, whatever their size.
    """
    # No size is at a break, where rounding would decide.
    starts = sorted(
        each + 0.5 for each in draw(st.sets(st.integers(0, 4000), min_size=1, max_size=3))
    )
    figures = st.floats(0, 1e3)

    def draw_cost(least=None):
        rates = [draw(figures) for _ in (0, *starts)]
        levels = [draw(figures) for _ in (0, *starts)]
        if least is not None:
            rates = list(map(add, rates, (line.seconds_per_byte for line in least.lines)))
            levels = list(map(add, levels, (line.latency for line in least.lines)))
        return MessageCost(levels[0], rates[0], tuple(map(Piece, starts, levels[1:], rates[1:])))

    inside = draw_cost()
    between = draw_cost(inside if is_ordered else None)
    shared = draw(st.one_of(st.none(), st.floats(0, 1e3)))
    return Machine(inside, between, 0.0, shared, draw_cost())


build = functools.cache(promises.build)
