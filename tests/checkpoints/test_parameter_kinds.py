"""Checkpoints of models with parameters of every kind: the bits of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

import kinds
from pool import Pools

KINDS = ("dense", "integer", "frozen", "tied")
ODD = ("complex", "sparse", "empty", "mixed")
"""FSDP takes none of these, and schedules add no sparse gradients."""


@pytest.mark.mpi
@pytest.mark.parametrize(
    "wrap", ["ddp", "fsdp", pytest.param("synchronized", marks=pytest.mark.long)]
)
def test_a_run_goes_on_as_it_would_have(wrap: str, pool: Pools, tmp_path: Path) -> None:
    taken = {"ddp": ODD, "fsdp": (), "synchronized": ODD[:1] + ODD[2:]}
    given = (*KINDS, *taken[wrap])
    # Three numbers are added in more than one order: so DDP's buckets must be as they were.
    called = pool("openmpi", 3).call(kinds.find_differences, tmp_path, given, wrap)
    assert called.values == [[]] * 3


def test_a_process_alone_goes_on_as_it_would_have(tmp_path: Path) -> None:
    assert kinds.find_differences(None, tmp_path, (*KINDS, *ODD, "unused"), "alone") == []
