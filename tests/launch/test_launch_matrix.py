"""The table of docs/launching.md: it has every cell, and cells are as it says."""

from __future__ import annotations

import pytest

import launch_matrix
import launchers
from launch_matrix import ABSENT, LAUNCHER, REASONS, WORKS, Cell, judge

DOCUMENT = launchers.ROOT / "docs" / "launching.md"
FEW = (
    # An enclosing step's PMIx beside PMI; a container that changes its user's number, or shares
    # no memory with its neighbours; hosts without IPv4. No other test has them.
    Cell("mpich", "srun --mpi=pmi2", "IPv4", "step"),
    Cell("mpich", "srun --mpi=pmi2", "IPv4", "container"),
    Cell("openmpi", "srun --mpi=pmix", "IPv4", "container"),
    Cell("mpich", "--hosts", "IPv6", "bare"),
)


def test_the_document_has_all_cells_and_the_command_writes_it():
    found = launch_matrix.read_table(DOCUMENT.read_text())
    assert found.keys() == {*launch_matrix.list_cells()}
    assert {*found.values()} <= {WORKS, LAUNCHER, ABSENT, *REASONS}
    assert WORKS in found.values() and launch_matrix.make_table(found) in DOCUMENT.read_text()
    for word in (*REASONS, LAUNCHER):
        assert f"| `{word}` |" in DOCUMENT.read_text()


ROWS = "".join(f"cell {rank} 4 1111 node{1 + rank // 2}\n" for rank in range(4))
REFUSAL = "mpiddp: rank 0 of 4 on node1: srun started 4 processes, but MPICH cannot join them\n"


@pytest.mark.parametrize(
    ("code", "output", "errors", "seconds", "word"),
    [
        (0, ROWS, "mpiddp: started\n", 3, WORKS),
        (0, ROWS.replace("1111", "1101"), "", 3, "is wrong"),
        (0, "cell 0 1 1 node1\n" * 4, "", 3, "is wrong"),
        (0, ROWS.replace("node2", "node1"), "", 3, "is wrong"),
        (0, "", "", 3, "is wrong"),
        (3, "", f"srun: error: exit code 3\n{REFUSAL}", 3, "PMI"),
        (3, "", REFUSAL * 2, 3, "says 2 things"),
        (3, "", "srun: error: exit code 3\n", 3, "says 0 things"),
        (3, "", f"Traceback (most recent call last)\n{REFUSAL}", 3, "gives a traceback"),
        (3, "", REFUSAL, 21, "refuses after 21 s"),
        (1, "", "mpiddp: something else\n", 3, "is refused otherwise"),
    ],
)
def test_what_is_a_fault(monkeypatch, code, output, errors, seconds, word):
    monkeypatch.setattr(launch_matrix.os, "getloadavg", lambda: (0.0,))
    outcome = judge(launchers.Result((), code, output, errors, seconds))
    assert outcome.word == word and outcome.is_fault == (word not in (WORKS, "PMI"))


def expect_cells(laboratory: launch_matrix.Laboratory, cells: list[Cell]) -> None:
    expected = launch_matrix.read_table(DOCUMENT.read_text())
    for cell in cells:
        outcome = laboratory.run(cell)
        assert outcome.word == expected[cell], f"{cell}: {outcome.word}\n{outcome.said}"


@pytest.mark.slurm
def test_some_cells(slurm_cluster):
    with launch_matrix.furnish(slurm_cluster) as laboratory:
        expect_cells(laboratory, [cell for cell in FEW if cell.network == "IPv4"])


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([cell for cell in FEW if cell.network == "IPv6"], id="one over IPv6"),
        *(
            pytest.param(
                [
                    cell
                    for cell in launch_matrix.list_cells()
                    if (cell.network, cell.place) == (network, place) and cell not in FEW
                ],
                id=f"{network}, {place}",
                marks=pytest.mark.long,
            )
            for network in launch_matrix.NETWORKS
            for place in launch_matrix.PLACES
        ),
    ],
)
def test_cells_of_a_network(cells):
    here = [cell for cell in cells if launch_matrix.is_here(cell)]
    with launch_matrix.open_laboratory(cells[0].network) as laboratory:
        expect_cells(laboratory, here)
