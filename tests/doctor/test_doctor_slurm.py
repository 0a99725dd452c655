"""The doctor on a real Slurm cluster: each fault that can be caused there is found."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import copies
import launchers
from doctors import CHECKS, examine

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]

EACH = ("--nodes=4", "--ntasks-per-node=1")
SILENT_SERVER = "198.51.100.1"
"""Of TEST-NET-2 (RFC 5737), where nobody is; the node must have a route that leads nowhere."""


def flags(nodes, *more):
    return (f"--nodelist=node[1-{nodes}]", f"--nodes={nodes}", "--ntasks-per-node=1", *more)


# README runs it, too.
@pytest.mark.long
def test_four_good_nodes(slurm_cluster, tmp_path, record_property):
    launcher = slurm_cluster.srun(*EACH)
    reading = examine(launcher, 4, "--json", tmp_path / "found.json", cwd=tmp_path)
    assert tuple(line.check for line in reading.lines) == CHECKS
    assert reading.bad() == {}
    assert "srun (pmix)" in reading.line("MPI library").text
    assert "4 ranks on 4 nodes (node[1-4]), 1 per node" in reading.line("ranks").text
    assert "eth0" in reading.line("interfaces").text
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["check"] for row in found["findings"]] == list(CHECKS)
    record_property("note", f"doctor on 4 nodes: {reading.seconds} s")


def test_faults_of_single_nodes_are_all_found(slurm_cluster, tmp_path):
    """One run, and on each node another fault."""
    runs = tmp_path / "runs"
    runs.mkdir()
    hosts = slurm_cluster.must("exec", "node1", "cat", "/etc/hosts")

    def shell(node, line):
        slurm_cluster.must("exec", node, "sh", "-c", line)

    try:
        shell("node1", f"printf %s '127.0.1.1 node1\n{hosts}' > /etc/hosts")
        shell("node2", "mount -o remount,size=16m /dev/shm")
        shell("node3", "tc qdisc add dev ens1f0 root tbf rate 10mbit burst 80kb latency 50ms")
        shell("node4", f"mount -t tmpfs tmpfs {runs}")
        launcher = slurm_cluster.srun(*flags(4))
        # Shared memory that small is Open MPI's own trouble, too.
        quiet = {"OMPI_MCA_btl": "self,tcp"}
        reading = examine(launcher, 4, "--runs-dir", runs, cwd=tmp_path, exit_code=2, env=quiet)
    finally:
        shell("node1", f"printf %s '{hosts}' > /etc/hosts")
        shell("node2", "mount -o remount,size=4g /dev/shm")
        shell("node3", "tc qdisc delete dev ens1f0 root")
        shell("node4", f"umount {runs}")
    bad = reading.bad()
    wanted = {
        "host name": "warn",
        "shared memory": "warn",
        "links": "warn",
        "run directory": "fail",
    }
    assert wanted.items() <= bad.items(), str(reading.result)
    assert "node1" in reading.line("host name").text
    assert "127.0.1.1" in reading.line("host name").text
    assert "node2" in reading.line("shared memory").text
    assert "node3 →" in reading.line("links").text
    assert reading.line("run directory").text.startswith("node4")


def test_other_code_on_one_node(slurm_cluster, tmp_path):
    """As after an installation that reached only some nodes."""
    copy = tmp_path / "copy" / "mpiddp"
    copies.copy(launchers.ROOT / "mpiddp", copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "errors.py"
    source.write_text(source.read_text() + "\n# edited on one node\n")
    mount = ("mount", "--bind", str(copy), str(launchers.ROOT / "mpiddp"))
    slurm_cluster.must("exec", "node2", *mount)
    try:
        reading = examine(slurm_cluster.srun(*flags(2)), 2, cwd=tmp_path, exit_code=3)
    finally:
        slurm_cluster.must("exec", "node2", "umount", str(launchers.ROOT / "mpiddp"))
    assert reading.bad() == {"code": "fail"}
    assert re.search(r"node2", reading.line("code").text)


def test_look_ups_that_wait_for_a_silent_server(slurm_cluster, tmp_path):
    hosts = slurm_cluster.must("exec", "node1", "cat", "/etc/hosts")
    resolver = slurm_cluster.directory / "resolv.conf"
    before = resolver.read_text()
    plain = "".join(
        line for line in hosts.splitlines(keepends=True) if not line.startswith("::ffff:")
    )
    try:
        # One file for all nodes, so all of them would ask that server.
        resolver.write_text(f"nameserver {SILENT_SERVER}\n")
        for node in ("node1", "node2"):
            route = "ip link add nowhere type veth peer name nobody; ip link set nobody up; "
            route += f"ip link set nowhere up; ip route add {SILENT_SERVER} dev nowhere"
            slurm_cluster.must("exec", node, "sh", "-c", route)
            write = f"printf %s '{plain}' > /etc/hosts"
            slurm_cluster.must("exec", node, "sh", "-c", write)
        reading = examine(slurm_cluster.srun(*flags(2)), 2, cwd=tmp_path)
    finally:
        resolver.write_text(before)
        for node in ("node1", "node2"):
            slurm_cluster.must("exec", node, "sh", "-c", f"printf %s '{hosts}' > /etc/hosts")
            slurm_cluster.must("exec", node, "ip", "link", "delete", "nowhere")
    assert reading.bad() == {"reverse look-ups": "warn"}, str(reading.result)


@pytest.mark.parametrize(("library", "mpi"), [("openmpi", "none"), ("mpich", "pmix")])
def test_a_library_that_does_not_fit(library, mpi, slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*flags(2), mpi=mpi, library=library)
    reading = examine(launcher, 2, cwd=tmp_path, exit_code=3)
    assert reading.bad() == {"MPI library": "fail"}
    assert "srun --mpi=" in reading.line("MPI library").text


def test_one_node_and_no_secret_is_printed(slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*flags(1), "--cpus-per-task=1")
    secrets = {"WANDB_API_KEY": "wandb-secret", "AWS_SECRET_ACCESS_KEY": "aws-secret"}
    reading = examine(
        launcher, 1, "--json", tmp_path / "found.json", cwd=tmp_path, env=dict(secrets)
    )
    everything = reading.result.output + (tmp_path / "found.json").read_text()
    assert not any(value in everything for value in secrets.values())
    assert reading.bad() == {}


def test_a_node_that_is_cut_off_is_named(slurm_cluster, tmp_path):
    launcher = slurm_cluster.srun(*flags(2))
    waiting = f"""
import pathlib, socket, time
from mpiddp.launch.network import interfaces
original = interfaces.list_interfaces
folder = pathlib.Path({str(tmp_path)!r})
def wait():
    (folder / f"at-{{socket.gethostname()}}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    return original()
interfaces.list_interfaces = wait
import sys
sys.argv = ["doctor", "--timeout", "8"]
from mpiddp.doctor.__main__ import main
main()
"""
    with launchers.start(launcher, 2, ["-c", waiting], timeout=80, cwd=tmp_path) as job:
        job.until(lambda: len(list(Path(tmp_path).glob("at-*"))) == 2, "both nodes")
        try:
            slurm_cluster.must("cut", "node2")
            (tmp_path / "go").touch()
            job.until(lambda: "node2" in job.stderr(), "a report that names node2")
        finally:
            slurm_cluster.must("heal", "node2")
        result = job.wait()
    assert re.search(
        r"mpiddp: rank 0 of 2 on node1: .*rank 1 on node2 \(no answer\)", result.stderr
    )
    assert result.returncode != 0
