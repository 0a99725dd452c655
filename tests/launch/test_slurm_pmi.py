"""What MPICH hears from Slurm while it starts. That it helps, test_slurm.py shows."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launchers
from mpiddp import environment
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi.slurm_pmi import (
    LONGEST_COMMAND,
    LONGEST_VALUE,
    NOT_FOUND,
    find_descriptor,
    shorten_answer,
    shortened_values,
)

MPICH = "MPICH Version:      5.0.2\n"
MAXES = b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=%d\n"


def launched(key: str) -> Launcher:
    return Launcher(key, key, 0, (2,), frozenset({"pmi"}))


@pytest.fixture
def connection(monkeypatch):
    """Slurm's end, and MPICH's, whose descriptor the environment tells."""
    with contextlib.ExitStack() as stack:
        server, client = (stack.enter_context(end) for end in socket.socketpair())
        os.set_inheritable(client.fileno(), True)
        monkeypatch.setenv(environment.PMI_DESCRIPTOR, str(client.fileno()))
        yield server, client


def ask(client: socket.socket, server: socket.socket, question: bytes, answer: bytes):
    """What the server hears, and what the client hears."""
    client.sendall(question)
    heard = server.recv(4096)
    server.sendall(answer)
    return heard, client.recv(4096)


def test_the_limit_is_lowered_while_mpi_starts_and_nothing_else_is_touched(connection):
    server, client = connection
    threads = threading.active_count()
    with shortened_values(MPICH, launched("slurm")):
        assert ask(client, server, b"cmd=get_maxes\n", MAXES % 1024) == (
            b"cmd=get_maxes\n",
            MAXES % LONGEST_VALUE,
        )
        told = b"cmd=get_result rc=0 value=%s\n"
        fits, does_not = (b"(" * (LONGEST_VALUE - each) for each in (1, 0))
        assert ask(client, server, b"cmd=get\n", told % fits)[1] == told % fits
        assert ask(client, server, b"cmd=get\n", told % does_not)[1] == NOT_FOUND
        for length in (1, 1023, 1024):
            command, answer = b"x" * length, b"y" * length
            assert ask(client, server, command, answer) == (command, answer)
    assert ask(client, server, b"cmd=get_maxes\n", MAXES % 1024)[1] == MAXES % 1024
    assert os.get_inheritable(client.fileno()) and threading.active_count() == threads


def test_a_server_that_goes_without_having_listened_is_heard_of(connection):
    server, client = connection
    with shortened_values(MPICH, launched("slurm")):
        client.sendall(b"cmd=get_maxes\n")
        # Both are on their way, so that the relay's next read or write is an error.
        client.sendall(b"cmd=barrier_in\n")
        server.close()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_an_error_in_between_leaves_the_connection_as_it_was(connection):
    server, client = connection
    with pytest.raises(RuntimeError), shortened_values(MPICH, launched("slurm")):
        raise RuntimeError
    assert ask(client, server, b"a\n", b"b\n") == (b"a\n", b"b\n")


@pytest.mark.parametrize(
    ("version", "launcher", "descriptor"),
    [
        ("Open MPI v5.0.11", launched("slurm"), "0"),
        # Hydra's server reads to the end of a line.
        (MPICH, launched("hydra"), "0"),
        (MPICH, None, "0"),
        (MPICH, launched("slurm"), "none"),
        # Closed by whoever stood between srun and this process; MPICH says so itself.
        (MPICH, launched("slurm"), "987654"),
    ],
)
def test_others_are_left_alone(version, launcher, descriptor, monkeypatch):
    launchers.set_variables(monkeypatch, {environment.PMI_DESCRIPTOR: descriptor})
    assert find_descriptor(version, launcher) is None
    with shortened_values(version, launcher):
        assert os.environ.get(environment.PMI_DESCRIPTOR) == descriptor


@given(
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.text("abc-0123456789/", min_size=1, max_size=64),
    st.integers(1, 1 << 20),
)
def test_every_command_fits_what_slurm_reads(job, step, key, limit):
    told = int(shorten_answer(MAXES % limit).rpartition(b"=")[2])
    value = "F" * (told - 1)
    command = f"cmd=put kvsname={job}.{step} key={key} value={value}\n"
    assert len(command) <= LONGEST_COMMAND and told <= limit
    # Segments of a long value are cut by one rule and joined by another.
    assert told < LONGEST_VALUE or (told - 2) // 2 == (told - 1) // 2
