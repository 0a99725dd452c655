"""How far bytes travel: by hand on small rings and tori, and what the command says and draws."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_runs import check_drawing
from benchmarks.models import distance
from mpiddp.schedules.algorithms import add
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import scatter


def carry(torus, *messages, group=2, packed=False):
    """What one step of messages (source, destination, chunks) of two chunks moves."""
    ranks = torus[0] * (torus[1] if len(torus) > 1 else 1)
    step = [add(src, dst, lo, hi) for src, dst, lo, hi in messages]
    schedule = scatter(ranks, [step], owners=[0, 0], packed=packed)
    return distance.measure(schedule, torus, group)


def test_messages_take_the_shorter_way_and_add_up_on_a_link():
    # 0 → 2 and 1 → 2 meet on the link from 1 to 2; 5 → 0 goes round the end.
    found = carry((6,), (0, 2, 0, 2), (1, 2, 0, 1), (5, 0, 0, 1))
    assert found.link == 1.5
    assert found.hops == (2 * 1 + 1 * 0.5 + 1 * 0.5) / 2
    assert found.crossing == 1 + 0.5 + 0.5 - 0


def test_where_both_ways_are_as_short_each_carries_half():
    found = carry((4,), (0, 2, 0, 2))
    assert (found.link, found.hops) == (0.5, 2)


def test_on_a_torus_they_go_along_one_dimension_after_the_other():
    # From (0, 0) to (2, 1) of 5 × 3: two links down, one to the right.
    assert carry((5, 3), (0, 7, 0, 2)).hops == 3
    # (0, 0) to (4, 2): one link up and one to the left.
    assert carry((5, 3), (0, 14, 0, 2)).hops == 2
    # Those that turn in one place share the link after it: (0, 0) and (1, 0) to (2, 1).
    assert carry((5, 3), (0, 7, 0, 2), (3, 7, 0, 2)).link == 2


def test_packed_pieces_are_one_message():
    pieces = ((0, 1, 0, 1), (0, 1, 1, 2))
    apart, together = carry((4,), *pieces), carry((4,), *pieces, packed=True)
    assert (apart.messages, apart.longest) == (2, 0.5)
    assert (together.messages, together.longest) == (1, 1)
    assert apart.volume == together.volume == 1


@settings(max_examples=60)
@given(
    torus=st.tuples(st.integers(1, 6), st.integers(1, 6)).filter(lambda sides: sides != (1, 1)),
    data=st.data(),
)
def test_a_message_passes_through_as_many_links_as_its_ends_are_apart(torus, data):
    rank = st.integers(0, torus[0] * torus[1] - 1)
    src, dst = data.draw(st.tuples(rank, rank).filter(lambda ends: ends[0] != ends[1]))
    gaps = [abs(a - b) for a, b in zip(divmod(src, torus[1]), divmod(dst, torus[1]), strict=True)]
    wanted = sum(min(gap, side - gap) for gap, side in zip(gaps, torus, strict=True))
    assert carry(torus, (src, dst, 0, 2)).hops == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("ranks", "dimensions", "torus"),
    [(64, 2, (8, 8)), (48, 2, (6, 8)), (64, 3, (4, 4, 4)), (7, 2, (1, 7)), (12, 1, (12,))],
)
def test_ranks_fill_a_torus_that_is_nearly_square(ranks, dimensions, torus):
    assert sorted(distance.fill_torus(ranks, dimensions)) == sorted(torus)


def test_each_newer_algorithm_wins_where_the_documentation_says_so():
    found = {}
    for name, ranks in itertools.product(distance.COMPARED, distance.RANKS):
        found[name, ranks] = distance.measure(parse(name).build(ranks), (ranks,), 10)
    for ranks in distance.RANKS:
        ring, halving = found["ring", ranks], found["halving-doubling", ranks]
        pat, swing = found["pat", ranks], found["swing", ranks]
        assert pat.messages == halving.messages < ring.messages / 7
        assert pat.volume == pytest.approx(ring.volume)
        assert found["pat:aggregation=4", ranks].longest <= 4 / ranks
        assert ring.link < swing.link < pat.link < halving.link / 4
        latency = found["swing:variant=latency", ranks]
        assert latency.link < 0.52 * found["recursive-doubling", ranks].link
        assert found["bine", ranks].hops < found["binomial-tree", ranks].hops
        assert found["bine", ranks].crossing <= found["binomial-tree", ranks].crossing
        assert found["bine:variant=butterfly", ranks].crossing < halving.crossing / 3
    aligned = [distance.measure(parse(n).build(64), (64,), 8) for n in ("bine", "binomial-tree")]
    assert aligned[0].crossing > aligned[1].crossing


def test_the_command_prints_a_table_for_each_number_of_ranks(capsys):
    distance.main(["ring", "bine", "--ranks", "6", "8", "--dimensions", "2", "--group", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert "6 ranks on a torus of 2 × 3, in groups of 4" in lines
    assert sum(line.startswith("bine ") for line in lines) == 2


def test_the_figure_names_each_line_at_its_end(tmp_path, capsys):
    path = tmp_path / "distance.svg"
    distance.main(["ring", "pat", "swing", "--ranks", "4", "6", "8", "--output", str(path)])
    check_drawing(path, *(each.title for each in distance.SHOWN), "ring", "pat", "swing")
