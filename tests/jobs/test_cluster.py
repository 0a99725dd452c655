"""A Slurm cluster of several nodes on this machine comes up, changes, and goes without a trace."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import copies
import launchers
import slurm

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


def load(name: str):
    """A module of the commands, which import each other by their directory."""
    sys.path.insert(0, str(slurm.COMMANDS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(slurm.COMMANDS))


def table(cluster) -> dict[str, list[str]]:
    """The rows of ``status`` by node: address, interface, link, rate, slurmd, Slurm's word."""
    lines = cluster.must("status").splitlines()[2:]
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line) for line in lines)}


def traces_of(cluster, link: str) -> list[str]:
    """What a cluster could leave behind on this machine, where there may be other clusters."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    found = [line for line in mounts if str(cluster.directory) in line]
    # Unlike the interface's name, its number does not come back.
    return found + [link] * (link in map(number_of, Path("/sys/class/net").iterdir()))


def number_of(interface: Path) -> str:
    """The kernel's number of an interface, which may go meanwhile."""
    try:
        return (interface / "ifindex").read_text()
    except OSError:
        return ""


def processes_in(directory) -> list[str]:
    """Processes whose command line or open namespace belongs to a cluster."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environ = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(directory) in line or f"SLURM_CONF={directory}" in environ:
            found.append(line)
    return found


@pytest.mark.long
def test_it_comes_up_is_repaired_and_goes(slurm_cluster, tmp_path):
    elsewhere = copies.copy(slurm.COMMANDS, tmp_path / "cluster") / "down"
    with slurm.bring_up("--nodes=2", "--cpus=2") as cluster:
        state = json.loads((cluster.directory / "shape.json").read_text())
        link = number_of(Path("/sys/class/net", state["host_interface"]))
        assert traces_of(cluster, link) == [link]
        # The name of an interface says what it is to connect, and one is a prefix of the other.
        rows = table(cluster)
        assert [row[1] for row in rows.values()] == ["ens1f1", "ens1f0np0"]
        assert {tuple(row[2:]) for row in rows.values()} == {("up", "unlimited", "running", "idle")}
        # Whatever has died is started again, the controller's bridge and the links included.
        init = int((cluster.directory / "machines/controller/init").read_text().split()[0])
        os.kill(init, 9)
        cluster.must("kill", "node2")
        assert "controller is not running" in cluster.must("status")
        assert table(cluster)["node1"][2] == "gone"
        assert "ready" in cluster.must("up")
        assert table(cluster)["node2"][2:] == ["up", "unlimited", "running", "idle"]
        # What an interrupted start leaves half-done, too.
        for line in (
            "ip address flush dev ens1f0np0",
            "ip link set ens1f0np0 down",
            "pkill slurmd",
        ):
            cluster.must("exec", "node2", *line.split())
        cluster.must("exec", "controller", "ip", "link", "set", "port1", "nomaster")
        cluster.must("up")
        hosts = cluster.must("exec", "node1", "getent", "ahostsv4", "node2")
        assert hosts.split()[0] == f"{state['network']}.2"
        refused = cluster.control("up", "--nodes=3")
        assert refused.returncode == 1 and "--nodes 2 is up" in refused.stderr
        # Of a start that was broken off the shape is missing, which is written last.
        shape = cluster.directory / "shape.json"
        shape.unlink()
        line = 'umask 077 && exec "$0" --nodes=2 --cpus=2'
        cluster.must("/bin/bash", "-c", line, str(slurm.COMMANDS / "up"))
        assert (cluster.directory / "slurm.conf").stat().st_mode & 0o444 == 0o444
        whole = shape.read_text()
        shape.write_text("{")
        assert "jobs/cluster/down" in cluster.control("status").expect(1).stderr
        shape.write_text(whole)
        # It ends what runs, from any checkout.
        words = ["-c", "import os, time; print(os.uname()[1], flush=True); time.sleep(600)"]
        with launchers.start(cluster.srun("--nodes=2", mpi="none"), 2, words) as job:
            job.until(lambda: sorted(job.stdout().split()) == ["node1", "node2"], "both ranks")
            cluster.must(str(elsewhere))
            job.process.wait(20)
        assert not cluster.directory.exists()
        assert processes_in(cluster.directory) == []
        assert traces_of(cluster, link) == []
        assert "no cluster is up" in cluster.must("down")


def test_nodes_are_apart(slurm_cluster):
    slurm_cluster.must("exec", "node1", "sh", "-c", "echo mine > /dev/shm/only-here")
    try:
        there = slurm_cluster.control("exec", "node2", "cat", "/dev/shm/only-here")
        assert there.returncode != 0 and "No such file" in there.stderr
        assert not Path("/dev/shm/only-here").exists()
    finally:
        slurm_cluster.must("exec", "node1", "rm", "/dev/shm/only-here")
    # Where the machine itself prefers reno, nodes have it anyway, and this shows nothing.
    shell = f"hostname; cat {CONGESTION_CONTROL}; pwd; ls /sys/class/net; exit 37"
    for name in ("node1", "node4"):
        done = slurm_cluster.control("exec", name, "sh", "-c", shell).expect(37)
        assert done.stdout.splitlines()[:3] == [name, "reno", os.getcwd()]
        assert len(done.stdout.splitlines()) == 5 and "lo" in done.stdout.splitlines()


def test_links_are_shaped_cut_and_healed(slurm_cluster):
    address = {name: row[0] for name, row in table(slurm_cluster).items()}
    reaches = [sys.executable, "-c", REACH, address["node2"]]

    def reach(is_good) -> bool:
        # The machine may be busy.
        return any(is_good(measure_rate(slurm_cluster, address["node2"])) for _ in range(4))

    try:
        slurm_cluster.must("rate", "100mbit")
        assert {row[3] for row in table(slurm_cluster).values()} == {"100Mbit"}
        assert reach(lambda rate: 50 < rate < 105)
        slurm_cluster.must("cut", "node2")
        assert table(slurm_cluster)["node2"][2] == "cut"
        assert slurm_cluster.control("exec", "node1", *reaches).returncode != 0
        slurm_cluster.must("heal", "node2")
        assert slurm_cluster.control("exec", "node1", *reaches).returncode == 0
    finally:
        slurm_cluster.must("heal", "node2")
        slurm_cluster.must("rate", "none")
    assert {row[3] for row in table(slurm_cluster).values()} == {"unlimited"}
    assert reach(lambda rate: rate > 150)


REACH = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 2).close()
except ConnectionRefusedError:
    pass
"""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    size, began = 0, None
    while block := connection.recv(1 << 20):
        began = began or time.monotonic()
        size += len(block)
    print(size * 8 / 1e6 / (time.monotonic() - began))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as connection:
    connection.sendall(bytes(4_000_000))
"""


def measure_rate(cluster, address) -> float:
    """Mbit/s of TCP's payload from node1 to node2."""
    words = (slurm.COMMANDS / "exec", "node2", sys.executable, "-c", RECEIVE, address)
    env = launchers.clean_environment({"MPIDDP_CLUSTER_DIR": str(cluster.directory)})
    with launchers.begin(*words, env=env) as (receiver, port):
        cluster.must("exec", "node1", sys.executable, "-c", SEND, address, port)
        return float(receiver.stdout.read())


def test_a_node_dies_and_lives_again(slurm_cluster):
    shell = ("exec", "node4", "sh", "-c", "cat /sys/class/net/*/address")
    hardware = slurm_cluster.must(*shell)
    slurm_cluster.must("kill", "node4")
    try:
        assert table(slurm_cluster)["node4"][2:5] == ["-", "-", "not running"]
        gone = slurm_cluster.control("exec", "node4", "true")
        assert gone.returncode == 1 and "node4 is not running" in gone.stderr
    finally:
        slurm_cluster.must("revive", "node4")
    assert table(slurm_cluster)["node4"][2:] == ["up", "unlimited", "running", "idle"]
    # Those who remember another one would send to it for up to a minute.
    assert slurm_cluster.must(*shell) == hardware


# With a /dev of its own, in which six twins of /dev/null are called GPUs.
REAL_GPUS = """
set -e
mkdir "$1/dev"; mount -t tmpfs none "$1/dev"
for name in null zero random urandom tty; do cp -a /dev/$name "$1/dev"; done
mkdir "$1/dev/shm"; mount --bind /dev/shm "$1/dev/shm"
for name in 0 1 2 3 4 10 ctl; do mknod "$1/dev/nvidia$name" c 1 3; done
mount --move "$1/dev" /dev
trap "$2/down" EXIT
"$2/up" --nodes 3 --gpus real
eval "$("$2/env")"
srun --mpi=none --nodes=3 --gpus-per-node=2 sh -c 'echo "$(hostname): $CUDA_VISIBLE_DEVICES"'
"""


@pytest.mark.long
def test_nodes_share_out_the_gpus_of_this_machine(slurm_cluster):
    with slurm.make_room() as cluster:
        folder, commands = str(cluster.directory.parent), str(slurm.COMMANDS)
        words = ("--mount", "bash", "-c", REAL_GPUS, "bash", folder, commands)
        printed = cluster.must("/usr/bin/unshare", *words)
    assert "3 nodes, 4 CPUs each, 2 real GPUs each" in printed
    assert {"node1: 0,1", "node2: 2,3", "node3: 4,10"} <= set(printed.splitlines())


def test_a_drained_node_is_named(slurm_cluster):
    name = "NodeName=node4"
    slurm_cluster.ask("scontrol", "update", name, "State=DRAIN", "Reason=test")
    try:
        assert "drained, and taking no jobs: node4" in slurm_cluster.must("up")
    finally:
        slurm_cluster.ask("scontrol", "update", name, "State=RESUME")


def test_a_directory_of_somebody_else_is_left_alone(slurm_cluster):
    with slurm.make_room() as cluster:
        cluster.directory.mkdir()
        (cluster.directory / "precious").write_text("x")
        for command in ("up", "down"):
            assert "no cluster's" in cluster.control(command).expect(1).stderr
        assert [path.name for path in cluster.directory.iterdir()] == ["precious"]


@pytest.mark.long
def test_a_user_who_is_not_root(slurm_cluster):
    """Submits and looks, but changes nothing."""
    environment = {
        **slurm_cluster.environment(),
        "MPIDDP_CLUSTER_DIR": str(slurm_cluster.directory),
        "PATH": os.environ["PATH"],
    }
    exports = [f"{name}={value}" for name, value in environment.items()]

    def run(*command):
        line = ["runuser", "-u", "nobody", "--", "env", *exports, *map(str, command)]
        return launchers.execute(*line, cwd="/")

    done = run(slurm.find_program("srun"), "--mpi=none", "-N2", "id", "-un")
    assert done.stdout.split() == ["nobody", "nobody"], done.stderr
    # A Python, and a copy, that everybody may read, wherever checkout and environment are.
    copy = slurm_cluster.directory.parent / "commands"
    shutil.copytree(slurm.COMMANDS, copy)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755)
    shown = run("/usr/bin/python3", "-B", copy / "status").stdout
    assert shown.count("idle") == 4 and shown.endswith("\n-: only root can see it\n")
    for name in ("up", "down", "cut", "exec"):
        arguments = {"cut": ["node1"], "exec": ["node1", "true"]}.get(name, [])
        refused = run("/usr/bin/python3", "-B", copy / name, *arguments)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "the cluster is made by root" in refused.stderr


MISSING = (
    "not installed: munge, libpmix-dev; run jobs/cluster/up --install, or: "
    "apt-get install -y --no-install-recommends munge libpmix-dev"
)


@pytest.fixture
def requirements(monkeypatch):
    """The module, on a machine of root's that lacks nothing."""
    module = load("requirements")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(module, "find_missing", list)
    return module


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("platform.system", lambda: "Darwin", "Linux namespaces; this is Darwin"),
        ("os.geteuid", lambda: 1000, "made by root"),
        ("requirements.find_missing", lambda: ["munge", "libpmix-dev"], MISSING),
        ("requirements.UNSHARE", ("false",), "cannot make the namespaces, mounts, bridge"),
    ],
)
def test_what_is_lacking_is_one_line(name, value, says, requirements, monkeypatch):
    monkeypatch.setattr(name, value)
    with pytest.raises(requirements.ClusterError) as caught:
        requirements.check(may_install=False, shaped=True, with_gpus=True)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_packages_are_installed_with_new_lists_where_old_ones_fail(requirements, monkeypatch):
    missing, codes, asked = [["munge"], []], [1, 0, 0, 0], []

    def run(command, **_):
        asked.append(command[1])
        return subprocess.CompletedProcess(command, codes.pop(0), "", "E: old lists")

    monkeypatch.setattr(requirements, "find_missing", lambda: missing.pop(0))
    monkeypatch.setattr(requirements, "subprocess", SimpleNamespace(run=run))
    requirements.check(may_install=True, shaped=True, with_gpus=True)
    # The last one is the attempt to make namespaces.
    assert asked == ["install", "update", "install", requirements.UNSHARE[1]]


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["up", "--nodes=201"], 2, "expected 1 to 200, found '201'"),
        (["up", "--nodes=two"], 2, "expected 1 to 200, found 'two'"),
        (["up", "--rate=fast"], 1, "rate 'fast': expected one such as 400mbit"),
        (["rate", "0mbit"], 1, "rate '0mbit'"),
        (["up"], 1, "expected a full path"),
        (["env"], 1, "no cluster is up; start one with: jobs/cluster/up"),
        (["exec", "node1"], 1, "no COMMAND given"),
        (["cut"], 2, "NODE"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(command, code, says):
    directory = "/tmp/mpiddp no cluster" if "full path" in says else "/tmp/mpiddp-no-cluster"
    done = slurm.Cluster(Path(directory)).control(*command)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr and "Traceback" not in done.stderr
    assert not Path(directory).exists()


def test_one_command_at_a_time_and_the_other_one_is_named(tmp_path, monkeypatch):
    state = load("state")
    monkeypatch.setattr(state, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(state, "LOCK_SECONDS", 0.1)
    with (
        state.locked(),
        pytest.raises(state.ClusterError, match=f"process {os.getpid()}, has held {tmp_path}/lock"),
        state.locked(),
    ):
        pass
    assert not (tmp_path / "lock").exists()
    # One that was killed holds nothing, and leaves its file.
    (tmp_path / "lock").write_text("123456789\n")
    with state.locked():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    # Who can open it to read can take it, too.
    with state.locked():
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    # One that its holder took away meanwhile is none.
    with (tmp_path / "lock").open("w") as late:
        with state.locked():
            assert not state._take(late)
        assert not state._take(late)


BLOCK = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
name.bind("\\0mpiddp-cluster")
try:
    os.open("/run/mpiddp-cluster.lock", os.O_RDONLY | os.O_CREAT)
except PermissionError:
    print("kept out", flush=True)
sys.stdin.read()
"""


def test_another_user_blocks_no_command(slurm_cluster):
    with launchers.begin(sys.executable, "-I", "-S", "-c", BLOCK) as (_, line):
        assert line == "kept out"
        slurm_cluster.must("heal", "node1")


@pytest.mark.parametrize(
    ("has_slurm", "files", "has_pmix"),
    [
        (False, [], False),
        (False, ["lib/x86_64-linux-gnu/libpmix.so"], True),
        (True, [], True),
        (True, ["lib64/slurm/mpi_pmix.so", "lib/x86_64-linux-gnu/libpmix.so.2"], False),
        (True, ["lib64/slurm/mpi_pmix.so", "local/lib/libpmix.so"], True),
    ],
)
def test_slurms_pmix_plugin_needs_a_library(has_slurm, files, has_pmix, tmp_path):
    """All that is missing is found at once, on a machine that has no Slurm as well."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert load("requirements").has_pmix(tmp_path, has_slurm=has_slurm) is has_pmix
