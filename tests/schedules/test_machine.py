"""Messages whose cost changes with their size: by hand, in closed forms, against the bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import simulate
from mpiddp.schedules.machine import Machine, MessageCost, Piece
from prices import build, pieced_machines

EAGER = MessageCost(1, 2, (Piece(10, 100, 0.5), Piece(100, -50, 4)))
"""1 + 2s below 10 bytes, 100 + s/2 below 100, 4s - 50 from there on."""


def test_each_size_has_the_line_of_its_piece():
    sizes = np.array([0, 9, 10, 99, 100, 1000])
    assert list(EAGER.seconds(sizes)) == [1, 19, 105, 149.5, 350, 3950]
    assert [EAGER.seconds(size) for size in (0, 9, 10)] == [1, 19, 105]
    assert list(EAGER.occupation(sizes)) == [0, 18, 104, 148.5, 349, 3949]
    assert EAGER.least_latency == 1
    assert EAGER.least_per_byte() == 0.5


def test_less_for_a_byte_at_a_pieces_start_than_anywhere_on_its_line():
    cost = MessageCost(100, 3, (Piece(100, -100, 2.5),))
    assert cost.least_per_byte() == (2.5 * 100 - 100) / 100
    assert cost.least_per_byte(apart=100) == 0.5


def test_what_is_added_has_a_cost_by_its_size():
    machine = Machine(MessageCost(0, 0), MessageCost(0, 0), adding=EAGER)
    # One-shot: each of 3 ranks adds two buffers of 20 bytes, each by itself.
    assert simulate(build("one-shot", 3), 20, machine).seconds == 2 * 110
    form = registry.parse("one-shot").closed_form((1, 1, 1))
    assert form.seconds(20, machine) == 2 * 110


def test_ranks_of_a_node_wait_for_its_link_for_what_lies_beyond_latency():
    # Two ranks of each node send 8 bytes to the other node: 1 + 2·16 s, not 1 + 16.
    machine = Machine(MessageCost(0, 0), EAGER)
    run = simulate(build("two-level:inner=direct", 4, (2, 2)), 32, machine, (2, 2))
    assert [step.seconds for step in run.steps] == [0, 33, 33, 0]


@settings(max_examples=30)
@given(
    hosts=st.integers(1, 5),
    size=st.integers(1, 5),
    machine=pieced_machines(),
    multiple=st.integers(1, 900),
)
def test_the_closed_form_of_a_ring_holds_where_the_network_is_quicker(
    hosts, size, machine, multiple
):
    nodes, schedule = (size,) * hosts, build("ring", hosts * size)
    form = registry.parse("ring").closed_form(nodes)
    run = simulate(schedule, multiple * schedule.chunks, machine, nodes)
    found = form.seconds(multiple * schedule.chunks, machine)
    assert math.isclose(found, run.seconds, rel_tol=1e-9)


@pytest.mark.parametrize(
    "piece",
    [Piece(0, 1, 1), Piece(-1, 1, 1), Piece(10, -100, 1), Piece(10, 1, -1), Piece(math.nan, 1, 1)],
)
def test_pieces_that_no_machine_has_are_refused(piece):
    with pytest.raises(ConfigurationError, match="must be >= 0"):
        Machine(MessageCost(1, 1), MessageCost(1, 1, (piece,)))
