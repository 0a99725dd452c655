"""Waiting for MPI, and life without it."""

import array
import pickle
import signal
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launchers
from facts import messages
from mpiddp import environment
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi import pauses as waiting


class Clock:
    """Time that passes only in sleep."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@given(st.floats(min_value=0, max_value=60), st.booleans())
def test_what_is_ready_is_seen_soon_and_so_is_the_deadline(ready, comes):
    clock = Clock()
    request = SimpleNamespace(Test=lambda: comes and clock.now >= ready)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "time", clock)
        assert mpi.wait(request, *([] if comes else [ready])) is comes
    # An eighth of the time waited, but 20 microseconds at least, and never over 2 milliseconds.
    assert clock.now >= ready
    assert clock.now - ready <= min(max(2e-5, ready / 8), 2e-3) + 1e-9


@pytest.mark.parametrize(
    ("version", "size", "pauses"),
    [
        ("Open MPI v10.0.0", 2, 1),
        ("Open MPI v5.0.11", 1, 0),
        ("Open MPI v4.1.4, package: Debian OpenMPI", 16, 0),
        ("MPICH Version:      5.0.2", 16, 0),
    ],
)
def test_where_open_mpi_5_may_crash_the_first_message_waits(monkeypatch, version, size, pauses):
    slept: list[float] = []
    monkeypatch.setattr(mpi.time, "sleep", slept.append)
    mpi._let_others_leave(version, size)
    assert slept == [mpi.LEAVING_SECONDS] * pauses


@pytest.mark.parametrize("own", ["pmi", "pmix"])
def test_a_rank_forgets_the_step_around_it(monkeypatch, own):
    for name in (name for names in environment.MANAGER_SIGNS.values() for name in names):
        monkeypatch.setenv(name, "0")
    mpi._hide_enclosing_step(Launcher("slurm", "srun", 0, (2,), frozenset({own})))
    kept = [key for key, names in environment.MANAGER_SIGNS.items() if environment.is_set(names)]
    assert kept == [own]


# Whole jobs


def make_calls(session):
    """Calls of a SleepingCommunicator, by every rank of a pool."""
    from mpi4py import MPI

    rank, size = session.world.rank, session.world.size
    group = mpi.SleepingCommunicator(session.comm)
    envelope = mpi.ENVELOPE_BYTES
    for length in (0, 1, *range(envelope - 64, envelope + 64), 10**6):
        value = (bytes([rank]) * length, rank)
        assert group.bcast(value) == (bytes(length), 0), length
    for scale in (0, 1, 5000):
        values = [["x" * scale * each, each] for each in range(size)]
        assert group.allgather(values[rank]) == values
        assert group.gather(values[rank]) == (values if rank == 0 else None)
    lowest = array.array("q", [0])
    group.Allreduce([array.array("q", [rank + 3]), MPI.INT64_T], [lowest, MPI.INT64_T], MPI.MIN)
    assert lowest[0] == 3
    if rank == size - 1:
        time.sleep(1)
    begin = time.thread_time()
    group.bcast(None)
    group.allgather(rank)
    group.gather(rank)
    assert time.thread_time() - begin < 0.5, "waiting took a core"

    # UCX takes it by default, and the job goes on when its terminal has gone.
    status = Path("/proc/self/status").read_text()
    assert not int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGHUP - 1) & 1

    for longest in (1, 7, 64, mpi.LONGEST_MESSAGE):
        for scale in (0, 1, 100):
            check_parts(
                session.comm, ["x" * scale * (each % 2 + 1) for each in range(size)], longest
            )


def check_parts(comm, values, longest):
    """Calls whose messages have at most ``longest`` bytes: as many of them as are needed."""
    rank, messages = comm.Get_rank(), []

    def count(request):
        messages.append(request)
        mpi.wait(request)

    group = mpi.SleepingCommunicator(comm, count, longest)
    assert group.allgather(values[rank]) == values
    total = sum(len(pickle.dumps(value)) for value in values)
    # What tells the lengths is one more.
    assert len(messages) == 1 + -(-total // longest)
    messages.clear()
    assert group.gather(values[rank]) == (values if rank == 0 else None)
    assert len(messages) == 1 + -(-total // longest)
    messages.clear()
    long = bytes(range(256)) * 17
    assert group.bcast(long if rank == 0 else None) == long
    rest = len(pickle.dumps(long)) + mpi.LENGTH_BYTES - mpi.ENVELOPE_BYTES
    assert len(messages) == 1 + -(-rest // longest)


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 2, 5))]
)
def test_collectives_that_sleep_give_what_mpi4pys_give(recent_launcher, ranks, pool):
    pool(recent_launcher, ranks).call(make_calls)


HELLO = textwrap.dedent("""
    import mpiddp
    with mpiddp.init(timeout=90) as session:
        print("size", session.world.size, session.comm, session.agree((1, 2)), session.any(True))
""")


@pytest.fixture
def without_mpi4py(tmp_path):
    """An environment in which mpi4py isn't installed."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('No module named mpi4py')\n")
    return {"PYTHONPATH": f"{tmp_path}:{launchers.ROOT}", "MPI4PY_LIBMPI": None}


@pytest.mark.long
def test_one_process_works_without_mpi(without_mpi4py):
    result = launchers.run("alone", 1, ["-c", HELLO], env=without_mpi4py).expect(0)
    assert "size 1 None (1, 2) True" in result.stdout
    assert "MPI             none (one process; " in result.stderr


LATE = """
import os, pathlib, time
if os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK")) == "0":
    claim = f"@mpiddp-{os.geteuid()}-{os.getppid()}-"
    while claim not in pathlib.Path("/proc/net/unix").read_text():
        time.sleep(0.01)
"""
"""Rank 0 fails when rank 1 reports already, and has not left."""


@pytest.mark.by_default("openmpi")
def test_two_ranks_need_mpi4py(either_launcher, without_mpi4py, tmp_path):
    missing = tmp_path / "mpi4py.py"
    missing.write_text(LATE + missing.read_text())
    result = launchers.run(either_launcher, 2, ["-c", HELLO], env=without_mpi4py).expect(3)
    (line,) = messages(result)
    assert "mpi4py is not installed" in line and "pip install mpi4py" in line


ADDED = """
import ctypes
from unittest.mock import Mock
from mpiddp.launch import phases
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.mpi import mpi
from mpiddp.launch.options import Options

def list_names():
    table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    names = set()
    while table[len(names)] is not None:
        names.add(table[len(names)].partition(b"=")[0].decode())
    return names

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        def call(*arguments):
            before = list_names()
            code = found(*arguments)
            print("added:", *sorted(list_names() - before), flush=True)
            return code
        return call if name == "MPI_Init_thread" else found

mpi.ctypes.CDLL = Library
phases.TorchImport = Mock  # Beside which MPI starts: that takes no part in it.
start_up = phases.StartUp(Options(), FailureHandler(), makes_group=False)
phases.begin_import(start_up)
mpi.finalize(phases.start_mpi(start_up).module)
"""


def test_mpi_adds_no_variable_while_torch_is_imported(recent_launcher, tmp_path):
    program = tmp_path / "added.py"
    program.write_text(ADDED)
    result = launchers.run(recent_launcher, 1, [str(program)]).expect(0)
    assert [line for line in result.stdout.splitlines() if line.startswith("added:")] == ["added:"]
