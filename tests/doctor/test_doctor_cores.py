"""Cores and threads of the ranks of a node."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.doctor.node import cores
from mpiddp.doctor.node.cores import RankCores

MASKS = st.lists(st.frozensets(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)


def bind(*masks, threads=None):
    return [RankCores(rank, frozenset(mask), threads) for rank, mask in enumerate(masks)]


def can_all_have_one(masks):
    """By trying every choice."""
    return any(len(set(choice)) == len(masks) for choice in product(*masks))


@given(MASKS)
def test_a_crowd_is_found_exactly_where_there_is_one(masks):
    crowd = cores.find_crowd(dict(enumerate(masks)))
    assert (crowd is None) == can_all_have_one(masks)
    if crowd is not None:
        ranks, theirs = crowd
        # The proof: these ranks have these cores only, and are more than they.
        assert frozenset().union(*(masks[rank] for rank in ranks)) == frozenset(theirs)
        assert len(theirs) < len(ranks)


@pytest.mark.parametrize(
    ("masks", "status", "found"),
    [
        (({0}, {0}), "warn", "ranks 0-1 have only core 0 between them"),
        # Rank 2 is free to go elsewhere, and is not named.
        (({3}, {3}, {0, 1, 2, 3}), "warn", "ranks 0-1 have only core 3 between them"),
        (({0, 1}, {0, 1}, {0, 1}), "warn", "ranks 0-2 have only cores 0-1 between them"),
        (({0},), "pass", "1 core for 1 rank"),
        (({0, 1, 2, 3}, {0, 1, 2, 3}), "pass", "4 cores for 2 ranks, shared by all"),
        (({0, 1}, {2, 3}), "pass", "4 cores for 2 ranks, bound to 2 each"),
        (({0}, {1, 2}), "pass", "3 cores for 2 ranks, bound to 1 to 2 each"),
    ],
)
def test_cores(masks, status, found):
    finding = cores.judge_cores(bind(*masks))
    assert (finding.status, finding.found) == (status, found)
    assert ("--cpus-per-task" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("masks", "threads", "status", "words"),
    [
        (({0, 1, 2, 3},) * 2, None, "pass", "2 per rank (mpiddp's choice)"),
        (({0, 1, 2, 3},) * 2, "2", "pass", "2 per rank (OMP_NUM_THREADS)"),
        (({0, 1, 2, 3},) * 2, "4", "warn", "8 threads of 2 ranks on 4 cores"),
        # More ranks than cores is said once, by the check of cores.
        (({0},) * 2, None, "pass", "1 per rank"),
        (({0},) * 2, "1", "pass", "1 per rank"),
        (({0, 1, 2, 3},) * 2, "2,4", "pass", "2 per rank (OMP_NUM_THREADS)"),
        (({0, 1, 2, 3},) * 2, "many", "pass", "mpiddp's choice"),
        (({0, 1, 2, 3},) * 2, "", "pass", "mpiddp's choice"),
    ],
)
def test_threads(masks, threads, status, words):
    finding = cores.judge_threads(bind(*masks, threads=threads))
    assert finding.status == status and words in finding.found
    if status == "warn":
        assert "gives each rank 2" in finding.advice


def test_a_quota_counts_as_cores():
    masks = ({0, 1, 2, 3},) * 4
    bindings = [RankCores(rank, frozenset(mask), None, 2.0) for rank, mask in enumerate(masks)]
    finding = cores.judge_cores(bindings)
    assert finding.status == "warn" and "4 ranks have the time of 2 cores" in finding.found
    assert cores.judge_threads(bindings[:2]).found == "1 per rank (mpiddp's choice)"
    finding = cores.judge_threads([replace(each, threads="2") for each in bindings[:2]])
    assert finding.status == "warn" and "4 threads of 2 ranks on 2 cores" in finding.found
