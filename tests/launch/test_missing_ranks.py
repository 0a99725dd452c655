"""Who keeps the others waiting when a deadline expires: ranks, and hosts that do not answer."""

from __future__ import annotations

import errno
import socket
import threading

import pytest

from mpiddp.launch.failure import missing_ranks, unreachable_hosts
from mpiddp.launch.failure.missing_ranks import PhasePosition, describe_silent_init
from mpiddp.launch.failure.unreachable_hosts import find_silent_hosts
from mpiddp.launch.launcher.launcher import Launcher, hosts_of_step
from mpiddp.launch.mpi.pauses import wait_until

IMPORT, GROUP = "import torch", "group"


def at(phase: str, position: str, *, waits: bool = False) -> PhasePosition:
    return PhasePosition(phase, waits, position)


@pytest.mark.parametrize(
    ("answers", "size", "missing"),
    [
        # Rank 1 has not answered.
        ({0: at(GROUP, "a")}, 2, {1: "no answer"}),
        # Rank 1 is phases behind; 2 is done with its own part.
        (
            {0: at(GROUP, "a"), 1: at(IMPORT, "b"), 2: at(GROUP, "a")},
            3,
            {1: "still in 'import torch', b"},
        ),
        ({0: at(GROUP, "a"), 1: at(GROUP, "c", waits=True)}, 2, {0: "still in 'group', a"}),
        # All in one phase: the odd one out, or all where nobody is.
        ({i: at(GROUP, "ab"[i == 1]) for i in range(3)}, 3, {1: "in b"}),
        ({i: at(GROUP, "ab"[i]) for i in range(2)}, 2, {0: "in a", 1: "in b"}),
        ({i: at(GROUP, "a") for i in range(2)}, 2, {0: "in a", 1: "in a"}),
    ],
)
def test_who_is_missing(answers, size, missing):
    assert missing_ranks.find_missing(answers, size) == missing


def test_a_message_names_eight_ranks_and_counts_the_others():
    missing = dict.fromkeys(range(10), "no answer")
    text = missing_ranks.describe_missing(
        "store", 2.5, missing, lambda rank: f"rank {rank} on n{rank}"
    )
    assert "did not get past 'store' within 2.5 s" in text and "--timeout SECONDS" in text
    assert "rank 7 on n7 (no answer), and 2 more." in text and "rank 8" not in text
    text = missing_ranks.describe_missing("store", 2, {3: "no answer"}, str)
    assert "waited for 3 (no answer)." in text
    assert "waited for" not in missing_ranks.describe_missing("group", 3, {}, str)


def test_where_the_main_thread_is():
    assert missing_ranks.find_line().startswith("find_line (missing_ranks.py:")
    # Not the line of the wait, which differs between two looks.
    found = []
    wait_until(lambda: found.append(missing_ranks.find_line()) or True)
    assert found[0].startswith("test_where_the_main_thread_is (test_missing_ranks.py:")


# Hosts, without MPI


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
