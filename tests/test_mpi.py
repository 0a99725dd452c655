"""Waiting for MPI, and life without it."""

from __future__ import annotations

import textwrap

import pytest

import launchers
from facts import messages
from mpiddp.launch import mpi


def test_waiting_sleeps_in_between(monkeypatch):
    class Request:
        left = 20

        def Test(self):  # noqa: N802
            self.left -= 1
            return self.left < 0

    pauses: list[float] = []
    monkeypatch.setattr(mpi.time, "sleep", pauses.append)
    mpi.wait(Request())
    assert len(pauses) == 20
    assert all(0 < pause <= mpi.LONGEST_PAUSE for pause in pauses)
    assert pauses == sorted(pauses)


# Whole jobs

HELLO = textwrap.dedent("""
    import mpiddp
    with mpiddp.init(timeout=30) as session:
        print("size", session.world.size, session.comm, session.agree((1, 2)), session.any(True))
""")


def one_message(result: launchers.Result, *words: str) -> str:
    """The only message of a job that was refused, which holds ``words``."""
    lines = messages(result)
    assert len(lines) == 1, str(result)
    assert "Traceback" not in result.output
    for word in words:
        assert word in lines[0]
    return lines[0]


@pytest.fixture
def without_mpi4py(tmp_path):
    """An environment in which mpi4py isn't installed."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('No module named mpi4py')\n")
    return {"PYTHONPATH": f"{tmp_path}:{launchers.ROOT}", "MPI4PY_LIBMPI": None}


def test_one_process_works_without_mpi(without_mpi4py):
    alone = launchers.table()["alone"]
    result = launchers.run(alone, 1, ["-c", HELLO], timeout=60, env=without_mpi4py).expect(0)
    assert "size 1 None (1, 2) True" in result.stdout
    assert "MPI             none (one process; " in result.stderr


@pytest.mark.mpi
def test_one_rank_under_mpirun_works_without_mpi(without_mpi4py):
    row = launchers.table()["mpich"]
    result = launchers.run(row, 1, ["-c", HELLO], timeout=60, env=without_mpi4py).expect(0)
    assert "size 1 None (1, 2) True" in result.stdout


def test_two_ranks_need_mpi4py(launcher, without_mpi4py):
    result = launchers.run(launcher, 2, ["-c", HELLO], timeout=60, env=without_mpi4py).expect(3)
    one_message(result, "mpi4py is not installed", "pip install mpi4py")


@pytest.mark.mpi
def test_two_ranks_need_a_library(tmp_path):
    row = launchers.table()["openmpi"]
    env = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    result = launchers.run(row, 2, ["-c", HELLO], timeout=60, env=env).expect(3)
    one_message(result, "no MPI library that it can load", "MPI4PY_LIBMPI")
