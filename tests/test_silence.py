"""Which hosts do not answer, found out without MPI."""

from __future__ import annotations

import errno
import socket
import time

from mpiddp.launch import silence
from mpiddp.launch.launcher import hosts_of_step
from mpiddp.launch.silence import find_silent_hosts


def test_a_host_that_refuses_is_there():
    assert find_silent_hosts(["localhost", "127.0.0.1"]) == {}


def test_a_name_that_nobody_knows_is_no_proof():
    assert find_silent_hosts(["no-such-host.invalid"], 2.0).get("no-such-host.invalid") in (
        None,
        "no answer",  # A name server that is slow to say so.
    )


def test_what_is_cut_off_is_named(monkeypatch):
    def connect(address, timeout):
        name, _ = address
        if name == "cut":
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        if name == "filtered":
            raise TimeoutError("timed out")
        if name == "stuck":
            time.sleep(10)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    began = time.monotonic()
    found = find_silent_hosts(["up", "cut", "filtered", "stuck", "up", "cut"], 0.5)
    assert found == {"cut": "No route to host", "filtered": "no answer", "stuck": "no answer"}
    assert time.monotonic() - began < 5


def test_only_so_many_hosts_are_asked(monkeypatch):
    monkeypatch.setattr(silence, "_ask", lambda name, seconds: "no answer")
    names = [f"n{number}" for number in range(1000)]
    assert list(find_silent_hosts(names)) == names[: silence.MOST_HOSTS]


def test_slurm_names_the_hosts_of_a_step():
    assert hosts_of_step({"SLURM_STEP_NODELIST": "n[1-2]"}) == ("n1", "n2")
    assert hosts_of_step({"SLURM_JOB_NODELIST": "n[1-2]"}) == ()
    assert hosts_of_step({"SLURM_STEP_NODELIST": "n[what]"}) == ()
