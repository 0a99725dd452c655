"""The table of launchers: which program, which flags, which variables, which libmpi."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copies import make_mpirun
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher import programs
from mpiddp.process import cpus

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)"
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Four cores, and no root."""
    monkeypatch.setattr(cpus, "count_cores", lambda: 4)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize(
    ("version", "user", "ranks", "flags"),
    [
        (OPEN_MPI_5, 0, 5, "--allow-run-as-root --map-by :OVERSUBSCRIBE "),
        ("prterun (PRRTE) 3.0.8", 1000, 4, ""),
        ("mpirun.openmpi (OpenRTE) 4.1.4", 0, 5, "--allow-run-as-root --oversubscribe "),
        (INTEL, 0, 5, ""),
        ("slurm 24.11.5", 0, 4, ""),
        ("slurm 24.11.5", 0, 5, "--overcommit "),
        ("something else", 0, 5, ""),
    ],
)
def test_flags(tmp_path, monkeypatch, version, user, ranks, flags):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    program = make_mpirun(tmp_path, version)
    words = programs.find_mpirun(str(program), {}).command(ranks, ["python", "x.py"])
    assert " ".join(words) == f"{program} {flags}-n {ranks} python x.py"


OURS = "OMPI_MCA_pml=ob1 UCX_MEM_EVENTS=n"
YIELDING = " OMPI_MCA_mpi_yield_when_idle=1"


@pytest.mark.parametrize(
    ("version", "few", "many"),
    [
        (OPEN_MPI_5, f"{OURS} PRTE_MCA_hwloc_default_binding_policy=none", YIELDING),
        (OPEN_MPI_4, f"{OURS} OMPI_MCA_hwloc_base_binding_policy=none", YIELDING),
        (HYDRA, "HYDRA_IFACE=lo", ""),
        (INTEL, "I_MPI_PIN=off", ""),
        ("something else", "", ""),
    ],
)
def test_variables_for_ranks_of_one_machine(tmp_path, version, few, many):
    mpirun = programs.find_mpirun(str(make_mpirun(tmp_path, version)), {})
    for ranks, expected in ((4, few), (5, few + many)):
        found = mpirun.variables(ranks)
        assert " ".join(f"{name}={value}" for name, value in found.items()) == expected


def test_which_program(tmp_path, monkeypatch):
    own = make_mpirun(tmp_path / "own" / "bin", OPEN_MPI_5)
    in_path = make_mpirun(tmp_path / "path", OPEN_MPI_4, "mpiexec")
    named = make_mpirun(tmp_path / "named", OPEN_MPI_4)
    option = make_mpirun(tmp_path / "option", HYDRA)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    # /bin has the cat of the programs above.
    monkeypatch.setenv("PATH", f"{in_path.parent}:/bin")
    variables = {"MPIDDP_MPIRUN": str(named)}
    assert programs.find_mpirun(str(option), variables).program == option
    assert programs.find_mpirun(None, variables).program == named
    assert programs.find_mpirun("mpiexec", {}).program == in_path
    assert programs.find_mpirun(None, {}).program == own
    own.unlink()
    script = make_mpirun(tmp_path / "intel", "looks for mpiexec.hydra in PATH")
    hydra = make_mpirun(tmp_path / "intel", INTEL, "mpiexec.hydra")
    found = programs.find_mpirun(str(script), {})
    assert (found.program, found.kind, found.version) == (hydra, programs.INTEL_MPI, "2021.19.0")
    monkeypatch.setenv("PATH", str(in_path.parent))
    assert programs.find_mpirun(None, {}).program == in_path
    in_path.unlink()
    with pytest.raises(ConfigurationError, match=f"no mpirun in {sys.prefix} or PATH; load your"):
        programs.find_mpirun(None, {})
    with pytest.raises(ConfigurationError, match=r"^MPIDDP_MPIRUN=/no/mpirun is not a program$"):
        programs.find_mpirun(None, {"MPIDDP_MPIRUN": "/no/mpirun"})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_intel_mpi_fills_hosts_as_they_were_divided(counts):
    mpirun = programs.Mpirun(Path("mpiexec.hydra"), programs.INTEL_MPI)
    _, _, most, _, hosts, *rest = mpirun.command_on({f"n{i}": n for i, n in enumerate(counts)})
    assert rest == ["-n", str(sum(counts))]
    placed = [host for host in hosts.split(",") for _ in range(int(most))][: sum(counts)]
    assert [placed.count(f"n{i}") for i in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("version", "there", "found"),
    [
        (INTEL, "lib/libmpi.so.12", True),
        (HYDRA, "lib/x86_64-linux-gnu/libmpich.so.12", True),
        (OPEN_MPI_5, "lib64/libmpi.so.40", True),
        (OPEN_MPI_5, "lib/libmpi.so.12", False),
    ],
)
def test_the_library_that_belongs_to_a_program(tmp_path, version, there, found):
    program = make_mpirun(tmp_path / "bin", version)
    library = tmp_path / there
    library.parent.mkdir(parents=True)
    library.touch()
    mpirun = programs.find_mpirun(str(program), {})
    assert mpirun.library == (library if found else None)
    assert mpirun.variables(2).get("MPI4PY_LIBMPI") == (str(library) if found else None)
    named = programs.find_mpirun(str(program), {"MPI4PY_LIBMPI": "/named/libmpi.so"})
    assert named.variables(2)["MPI4PY_LIBMPI"] == "/named/libmpi.so"
