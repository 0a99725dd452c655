"""Which hosts do not answer, found out without MPI."""

from __future__ import annotations

import errno
import socket
import threading

import pytest

from mpiddp.launch.failure import unreachable_hosts
from mpiddp.launch.failure.missing_ranks import describe_silent_init
from mpiddp.launch.failure.unreachable_hosts import find_silent_hosts
from mpiddp.launch.launcher.launcher import Launcher, hosts_of_step


def test_a_refusal_and_a_name_that_nobody_knows_are_no_silence():
    assert find_silent_hosts(["localhost", "127.0.0.1", "no-such-host.invalid"], 2.0) == {}


@pytest.fixture
def network(monkeypatch):
    """Hosts that behave as their names say."""
    ended = threading.Event()

    def resolve(name, port, *_):
        if name == "slow-to-look-up":
            ended.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, port))]

    def connect(address, timeout):
        name, _ = address
        if name.startswith("cut"):
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        if name == "filtered":
            raise TimeoutError("timed out")
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    yield
    ended.set()


def test_what_is_cut_off_is_named(network):
    # It returns, though one is not looked up.
    found = find_silent_hosts(["up", "filtered", "cut", "slow-to-look-up", "up", "cut"], 1.0)
    assert found == {"filtered": "no answer", "cut": "No route to host"}


def describe(hosts):
    launcher = Launcher("slurm", "srun", 0, (8,), frozenset({"pmix"}))
    return describe_silent_init(launcher, 9, len(hosts), find_silent_hosts(hosts, 1.0))


def test_the_message_leaves_out_only_what_is_alone_in_its_silence(network):
    assert "srun --exclude=cut[2-3] does without" in describe(["n1", "cut2", "cut3", "n4"])
    # If nobody answers, it may be this host that is cut off.
    everyone = describe(["n1", "cut2", "cut3"])
    assert "cut[2-3] (No route to host), which is every other host" in everyone
    assert "--exclude" not in everyone
    assert "Not reached" not in describe(["n1", "n2"])
    assert "8 ranks" in describe([])


def test_only_so_many_hosts_are_asked(monkeypatch):
    monkeypatch.setattr(unreachable_hosts, "_ask", lambda name, end: "no answer")
    names = [f"n{number}" for number in range(1000)]
    assert list(find_silent_hosts(names)) == names[: unreachable_hosts.MOST_HOSTS]


def test_slurm_names_the_hosts_of_a_step():
    assert hosts_of_step({"SLURM_STEP_NODELIST": "n[1-2]"}) == ("n1", "n2")
    assert hosts_of_step({"SLURM_JOB_NODELIST": "n[1-2]"}) == ()
    assert hosts_of_step({"SLURM_STEP_NODELIST": "n[what]"}) == ()
