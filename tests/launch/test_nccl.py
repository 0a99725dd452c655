"""Which NCCL is loaded, what it takes, and what becomes of a failure that it finds."""

import ctypes
import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import launchers
from facts import messages
from mpiddp.errors import PeerLostError
from mpiddp.launch.device import nccl
from mpiddp.launch.rendezvous.store import find_group_timeout
from mpiddp.launch.summary import describe_backend


@pytest.fixture
def load(monkeypatch):
    """Pretend that torch was built with NCCL 2.28.9, and that this library is loaded."""

    def pretend(name, code):
        def get(found):
            found._obj.value = code
            return 0

        def find(wanted, mode):
            assert mode & nccl.os.RTLD_NOLOAD
            if wanted != name:
                raise OSError(wanted)
            return SimpleNamespace(ncclGetVersion=get)

        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
        monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
        monkeypatch.setattr(ctypes, "CDLL", find)

    return pretend


# Else it is linked into torch.
@pytest.mark.parametrize(
    ("name", "version"), [("librccl.so.1", (2, 30, 7)), ("another", (2, 28, 9))]
)
def test_the_library_that_is_loaded_is_asked(load, name, version):
    load(name, 23_007)
    assert nccl.find_version() == version
    assert describe_backend("nccl", "mpiddp") == f"nccl {'.'.join(map(str, version))}"
    assert describe_backend("gloo", "framework") == "gloo"
    assert describe_backend("gloo", "mpiddp") == "gloo, with mpiddp's collectives"


def test_a_torch_without_nccl_has_no_version(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert nccl.find_version() == ()


@pytest.mark.parametrize(
    ("wanted", "code", "takes"),
    [("1", 23_003, True), ("1", 22_907, False), ("0", 23_003, False), (None, 23_003, False)],
)
def test_who_may_share_a_gpu(load, monkeypatch, wanted, code, takes):
    load("libnccl.so.2", code)
    launchers.set_variables(monkeypatch, {"NCCL_MULTI_RANK_GPU_ENABLE": wanted})
    assert nccl.takes_shared_gpus() is takes


def test_nccl_waits_longer_than_the_session():
    assert find_group_timeout("gloo", 300) == timedelta(seconds=300)
    assert find_group_timeout("nccl", 300) >= timedelta(seconds=300 + 5)


class Backend:
    """One of torch's, by what its releases know; ``error`` is what it has found."""

    def __init__(self, hooks=True, errors=True):
        self.error, self.hooks = "SUCCESS", {}
        self._has_hooks, self._has_errors = hooks, errors

    def register_abort_hook(self, number, hook):
        if not self._has_hooks:
            # As pybind says it of a class that lacks the method.
            raise AttributeError("register_abort_hook")
        assert number not in self.hooks
        self.hooks[number] = hook

    def get_error(self):
        if not self._has_errors:
            raise AttributeError("get_error")
        return SimpleNamespace(name=self.error)


class Group:
    """A process group of torch's, with the backend for GPUs that it has."""

    def __init__(self, name, backend):
        self.group_name = name
        self._backend = backend

    def _get_backend(self, device):
        if self._backend is None:
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self._backend


@pytest.fixture
def watch_groups(monkeypatch):
    """Watch these groups: the list, which may grow, and what has been reported."""
    monkeypatch.setattr(nccl, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(nccl, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    watches = []

    def start(*groups):
        held = list(groups)
        world = SimpleNamespace(pg_map=held)
        monkeypatch.setattr("torch.distributed.distributed_c10d._world", world)
        told, came = [], threading.Event()

        def fail(error):
            told.append(error)
            came.set()

        watches.append(nccl.GroupWatch(fail))
        return held, told, came

    start.watches = watches
    yield start
    for watch in watches:
        watch.close()


@pytest.mark.parametrize("error", ["TIMEOUT", "REMOTE_ERROR"])
def test_a_group_without_hooks_is_asked(watch_groups, error):
    backend, gloo = Backend(hooks=False), Backend(hooks=False, errors=False)
    gloo.error = error
    _, told, came = watch_groups(Group("0", None), Group("1", backend), Group("2", gloo))
    assert not came.wait(0.1)
    backend.error = error
    assert came.wait(10)
    assert isinstance(told[0], PeerLostError)
    assert "NCCL gave up on a collective" in str(told[0])


def test_what_fails_while_groups_are_closed_is_no_failure(watch_groups, monkeypatch):
    monkeypatch.setattr(nccl, "GRACE_SECONDS", 60.0)
    backend = Backend(hooks=False)
    _, told, _ = watch_groups(Group("0", backend))
    backend.error = "COMM_ERROR"
    time.sleep(0.1)
    (watch,) = watch_groups.watches
    watch.close()
    assert not told
    assert watch._thread.daemon, "a program that closes its session at exit would never get there"


def test_a_group_that_is_made_again_is_watched_again(watch_groups):
    held, told, came = watch_groups(Group("0", Backend()))
    held.clear()
    again = Backend()
    held.append(Group("0", again))
    launchers.until(lambda: again.hooks, "the hook")
    assert not came.is_set()
    (hook,) = again.hooks.values()
    hook()
    assert isinstance(told[0], PeerLostError)


def test_groups_that_a_program_makes_are_watched(watch_groups):
    held, _, came = watch_groups(Group("0", Backend()))
    late = Backend()
    held.append(Group("1", late))
    late.error = "TIMEOUT"
    assert came.wait(10)
    assert late.hooks


# A group over Gloo whose "NCCL" finds that a collective is late, and ends the process as torch
# does: before 2.14 after a pause, in which the group can be asked, and from 2.14 on at once, but
# after the hooks.
STAND_IN = """
import os, sys, threading, time
from pathlib import Path
import torch, mpiddp
from mpiddp.launch.device import device
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.rendezvous import store
from test_nccl import Backend
device.choose_backend = lambda *_: "nccl"
real, is_late = store.make_group, threading.Event()
def make_group(store, world, backend, taken, timeout):
    real(store, world, "gloo", torch.device("cpu"), timeout)
    backend = Backend(hooks=sys.argv[1] == "2.15")
    torch.distributed.ProcessGroup._get_backend = lambda group, device: backend
    threading.Thread(target=find_timeout, args=(backend,), daemon=True).start()
def find_timeout(backend):
    is_late.wait()
    if sys.argv[1] != "2.15":
        backend.error = "TIMEOUT"
        time.sleep(60)
    for hook in backend.hooks.values():
        hook()
    os.abort()
store.make_group = make_group
store.first_all_reduce = lambda *_: None
with mpiddp.init(timeout=90) as session:
    session._resources.failure_handler.run_directory = Path(sys.argv[2])
    session._resources.failure_handler.run = FixedProgress(step=7)
    session._resources.failure_handler.note_step(7)
    session.any(False)
    is_late.set()
    time.sleep(60)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("release", ["2.13", pytest.param("2.15", marks=pytest.mark.long)])
def test_a_late_collective_ends_the_job_with_a_report(release, tmp_path):
    paths = {"PYTHONPATH": f"{launchers.ROOT}:{Path(__file__).parent}:{launchers.SUPPORT}"}
    arguments = ["-c", STAND_IN, release, tmp_path]
    result = launchers.run("mpich", 2, arguments, env=paths).expect(6)
    line = messages(result)[-1]
    assert "at step 7: NCCL gave up on a collective" in line
    assert json.loads((tmp_path / "outcome.json").read_text())["code"] == 6
    assert result.stderr.count("NCCL gave up") == 1
