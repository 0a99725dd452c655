"""What MPI hears of interfaces, and MPICH from Slurm, while it starts; test_slurm.py has it run."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launchers
from mpiddp import environment
from mpiddp.launch.launcher import containers
from mpiddp.launch.launcher.launcher import Launcher, find_launcher
from mpiddp.launch.mpi.slurm_pmi import (
    LONGEST_COMMAND,
    LONGEST_VALUE,
    NOT_FOUND,
    find_descriptor,
    shorten_answer,
    shortened_values,
)
from mpiddp.launch.network import interfaces, mpi_interfaces
from mpiddp.launch.network.interfaces import Interface
from mpiddp.launch.network.mpi_interfaces import (
    choose_interfaces,
    choose_peers,
    find_source,
    find_variables,
    is_configured,
    share_memory,
    stay_on_host,
    told_interfaces,
)

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
MPICH = "MPICH Version: 5.0.2"
LOCAL = find_launcher(
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
)
INTERFACES = (
    Interface("lo", ("127.0.0.1",)), Interface("aa0", ("10.66.0.1",)),
    Interface("ens1", ("10.77.0.1",)), Interface("ens2", ("10.78.0.1",)),
)  # fmt: skip
WAYS = {"n2": "10.77.0.1", "n3": "10.78.0.1", "self": "127.0.0.1", "unknown": None}


@pytest.fixture(autouse=True)
def several_interfaces(monkeypatch):
    for name in (
        environment.OPEN_MPI_TRANSPORTS,
        *environment.OPEN_MPI_INTERFACE_SETTINGS,
        environment.UCX_INTERFACES,
        *environment.OFI_INTERFACES,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "aa0"), (3, "ens1")])
    monkeypatch.setattr(interfaces, "list_interfaces", lambda: INTERFACES)
    monkeypatch.setattr(mpi_interfaces, "find_source", WAYS.__getitem__)


@pytest.mark.parametrize(
    ("hostnames", "chosen"),
    [
        (("n1", "n2"), ("ens1",)),
        # Two ways lead to the job's hosts: both are kept.
        (("n2", "n1", "n3"), ("ens1", "ens2")),
        (("n1", "unknown"), ()),
        # A wrong /etc/hosts must not leave nothing but loopback.
        (("n1", "self"), ()),
        (("n1",), ()),
    ],
)
def test_the_interfaces_that_lead_to_the_others(hostnames, chosen):
    assert choose_interfaces(hostnames, "n1") == chosen


def test_one_interface_leaves_nothing_to_choose(monkeypatch):
    monkeypatch.setattr(interfaces, "list_interfaces", lambda: INTERFACES[::2])
    assert choose_interfaces(("n1", "n2"), "n1") == ()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ens1")])
    monkeypatch.setattr(interfaces, "list_interfaces", lambda: pytest.fail("looked in vain"))
    assert choose_interfaces(("n1", "n2"), "n1") == ()


def test_a_node_is_no_peer_of_its_own_and_has_two_at_most():
    for hostname in ("n1", "n1.cluster.local"):
        assert choose_peers(("n1", "n2", "n3"), hostname) == ["n2"]
        assert choose_peers(("n1.cluster.local", "n2.cluster.local"), hostname) == [
            "n2.cluster.local"
        ]
    assert len(choose_peers(("n1", "n2", "n3", "n4"), "n3")) == 2


def test_it_is_told_only_while_mpi_starts(monkeypatch):
    monkeypatch.setenv(environment.SLURM_STEP_NODES, "n[1-2]")
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    # An empty value is no setting, but it is the user's.
    monkeypatch.setenv(environment.UCX_INTERFACES, "")
    with told_interfaces(OPEN_MPI, None, None) as interfaces:
        assert os.environ[environment.OPEN_MPI_INTERFACES] == "ens1"
        assert os.environ[environment.UCX_INTERFACES] == "ens1"
        assert interfaces == ("ens1",)
    assert environment.OPEN_MPI_INTERFACES not in os.environ
    assert os.environ[environment.UCX_INTERFACES] == ""
    with pytest.raises(ValueError, match="inside"), told_interfaces(OPEN_MPI, None, None):
        raise ValueError("inside")
    assert environment.OPEN_MPI_INTERFACES not in os.environ
    monkeypatch.setenv(environment.OPEN_MPI_INTERFACE_SETTINGS[1], "docker0")
    with told_interfaces(OPEN_MPI, None, None):
        assert environment.OPEN_MPI_INTERFACES not in os.environ


def test_ucx_is_told_below_any_library(tmp_path, monkeypatch):
    assert find_variables(MPICH, None, tmp_path) == [environment.UCX_INTERFACES]
    with monkeypatch.context() as patch:
        patch.setenv(environment.UCX_INTERFACES, "ib0")
        assert find_variables(MPICH, None, tmp_path) == []
    both = [environment.OPEN_MPI_INTERFACES, environment.UCX_INTERFACES]
    assert find_variables(OPEN_MPI, None, tmp_path) == both
    # Its devices have other names than interfaces.
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    assert find_variables(MPICH, None, tmp_path) == []


def test_on_one_host_there_is_no_tcp(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi_interfaces, "share_memory", lambda ranks: ranks == 2)
    before = dict(os.environ)
    monkeypatch.setattr(mpi_interfaces, "read_settings", lambda library: {})
    with told_interfaces(OPEN_MPI, None, LOCAL) as interfaces:
        assert interfaces == ()
        assert os.environ[environment.OPEN_MPI_TRANSPORTS] == "^tcp,ofi"
        assert os.environ["FI_TCP_IFACE"] == os.environ["FI_SOCKETS_IFACE"] == "lo"
    assert dict(os.environ) == before
    others = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "FI_SOCKETS_IFACE": "lo"}
    assert stay_on_host(MPICH, None, 2, tmp_path) == others
    # Without shared memory there is nothing else.
    assert stay_on_host(OPEN_MPI, None, 3, tmp_path) == others
    monkeypatch.setenv("FI_TCP_IFACE", "ib0")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert stay_on_host(MPICH, None, 2, tmp_path) == {"FI_SOCKETS_IFACE": "lo"}


def test_what_somebody_has_set_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi_interfaces, "share_memory", lambda ranks: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    library = tmp_path / "lib" / "libmpi.so.40"
    site, own = tmp_path / "etc/openmpi-mca-params.conf", tmp_path / ".openmpi/mca-params.conf"
    site.parent.mkdir()
    own.parent.mkdir()

    def choose():
        return stay_on_host(OPEN_MPI, library, 2).get(environment.OPEN_MPI_TRANSPORTS)

    # What is not to be used may be more.
    site.write_text("btl_base_verbose = 1\nbtl=^uct,openib\n# btl_tcp_if_include = eth0\n")
    assert choose() == "^uct,openib,tcp,ofi" and not is_configured({}, library)
    own.write_text("btl = ^smcuda\n")
    assert choose() == "^smcuda,tcp,ofi"
    for line in ("btl = self,tcp", "btl_tcp_if_include = eth0", "btl_tcp_if_exclude=lo"):
        own.write_text(f"{line}\n")
        assert choose() is None and is_configured({}, None) == ("tcp_if" in line)
    own.unlink()
    for name in (environment.OPEN_MPI_TRANSPORTS, *environment.OPEN_MPI_INTERFACE_SETTINGS):
        monkeypatch.setenv(name, "^openib")
        assert choose() is None
        assert is_configured({name: "x"}, library) == (name != environment.OPEN_MPI_TRANSPORTS)
        monkeypatch.delenv(name)
    assert choose() is not None


@pytest.mark.parametrize(
    ("version", "walls", "set_before", "told"),
    [
        (OPEN_MPI, {"pid"}, "", "^sm,vader"),
        (OPEN_MPI, {"pid", "user"}, "^ofi", "^ofi,sm,vader"),
        (OPEN_MPI, {"pid"}, "self,tcp", None),
        (OPEN_MPI, {"user"}, "", None),
        (MPICH, {"user"}, "", "1"),
    ],
)
def test_ranks_with_a_container_each_share_no_memory(monkeypatch, version, walls, set_before, told):
    name = environment.MPICH_APART if version is MPICH else environment.OPEN_MPI_TRANSPORTS
    monkeypatch.setenv(name, set_before)
    monkeypatch.setattr(mpi_interfaces, "find_own_namespaces", lambda _: walls)
    monkeypatch.setattr(mpi_interfaces, "stay_on_host", lambda *_: {})
    with told_interfaces(version, None, LOCAL):
        assert os.environ[name] == (set_before if told is None else told)


@pytest.mark.parametrize(("rows", "outside"), [("0 500 3\n7 1000 2", 1000), ("1 0 1", 7), ("", 7)])
def test_a_user_has_another_number_outside_of_a_container(monkeypatch, tmp_path, rows, outside):
    monkeypatch.setattr(containers, "USER_MAP", tmp_path / "map")
    (tmp_path / "map").write_text(rows)
    assert containers.find_outer_user(7) == outside


IN_CONTAINER = """
import ctypes, os, subprocess
from mpiddp.launch.launcher import containers
CLONE_NEWUSER = 0x10000000
ctypes.CDLL(None).unshare(CLONE_NEWUSER)
input("in it\\n")
daemon = subprocess.Popen("cat", stdin=subprocess.PIPE)
os.setuid(1)
print([containers._shares_users(each) for each in (daemon.pid, os.getppid())], flush=True)
"""


def test_a_daemon_of_root_in_the_same_container_is_no_wall():
    if os.geteuid() != 0:
        pytest.skip("root writes the map of a namespace's users")
    command = [sys.executable, "-c", IN_CONTAINER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "in it\n"
        Path(f"/proc/{process.pid}/uid_map").write_text("0 0 1\n1 100001 1\n")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "[True, False]\n"


LOOKS = "from mpiddp.launch.network.mpi_interfaces import share_memory; print(share_memory(2))"
HAS_ITS_OWN = "mount -t tmpfs none /dev/shm"


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("true", "True"),
        (HAS_ITS_OWN, "False"),
        # Whoever started it has the same one; where it is too small: share_memory(1 << 40).
        (f"{HAS_ITS_OWN} -o size=64m; sh -c", "True"),
    ],
)
def test_ranks_that_share_memory(mounts, expected):
    if os.geteuid() != 0:
        pytest.skip("mounts are made by root")
    look = shlex.join([sys.executable, "-c", LOOKS])
    command = ["unshare", "--mount", "sh", "-c"]
    if mounts.endswith("sh -c"):
        command.append(f"{mounts} {shlex.quote(f'{look}; true')}")
    else:
        command.append(f"{mounts}; exec {look}")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert answer.stdout == f"{expected}\n", answer.stderr


def test_slurm_starts_ranks_that_share_memory(tmp_path):
    # Its daemon is root's, and does not show its own.
    (tmp_path / "comm").write_text("slurmstepd\n")
    assert share_memory(2, tmp_path)
    (tmp_path / "comm").write_text("sh\n")
    assert not share_memory(2, tmp_path)
    assert not share_memory(1 << 40, Path("/proc/self"))


def test_the_routing_table_is_asked(monkeypatch):
    monkeypatch.undo()
    assert find_source("127.0.0.1") == "127.0.0.1"
    assert find_source("no-such-host.invalid") is None


# What MPICH hears from Slurm while it starts


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
        ("Intel(R) MPI Library 2021.11", launched("slurm"), "0"),
        # Hydra's server reads to the end of a line.
        (MPICH, launched("hydra"), "0"),
        (MPICH, None, "0"),
        (MPICH, launched("slurm"), None),
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
