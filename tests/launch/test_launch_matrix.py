"""The table of docs/launching.md: it has every cell, and cells are as it says."""

import itertools

import pytest

import launch_matrix
import launchers
from launch_matrix import ABSENT, LAUNCHER, REASONS, WORKS, Cell

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


def expect_cells(laboratory: launch_matrix.Laboratory, cells: list[Cell]) -> None:
    expected = launch_matrix.read_table(DOCUMENT.read_text())
    for cell in filter(launch_matrix.is_here, cells):
        outcome = laboratory.run(cell)
        assert outcome.word == expected[cell], f"{cell}: {outcome.word}\n{outcome.said}"


def test_some_cells(slurm_cluster):
    with launch_matrix.furnish(slurm_cluster) as laboratory:
        expect_cells(laboratory, [cell for cell in FEW if cell.network == "IPv4"])


def list_groups():
    """One cell over IPv6, and all others by network and place."""
    yield pytest.param([cell for cell in FEW if cell.network == "IPv6"], id="one over IPv6")
    for group in itertools.product(launch_matrix.NETWORKS, launch_matrix.PLACES):
        cells = [each for each in launch_matrix.list_cells() if each not in FEW]
        own = [cell for cell in cells if (cell.network, cell.place) == group]
        yield pytest.param(own, id=", ".join(group), marks=pytest.mark.long)


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cells", [*list_groups()])
def test_cells_of_a_network(cells):
    with launch_matrix.open_laboratory(cells[0].network) as laboratory:
        expect_cells(laboratory, cells)
