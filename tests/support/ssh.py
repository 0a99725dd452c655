"""An sshd on each node of the virtual cluster, for ranks that are started without Slurm.

    hosts.run("node1", "-m", "mpiddp", "-n", "4", "--hosts", "node1:2,node2:2", "script.py")

Keys and settings are in a directory of their own; nobody else's are read or changed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import launchers
import slurm
from copies import write_program

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
SSH = shutil.which("ssh")
NODES = [f"node{number}" for number in range(1, slurm.NODES + 1)]
SERVER = """\
HostKey {folder}/host
AuthorizedKeysFile {keys}
PasswordAuthentication yes
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
PidFile {folder}/{name}.pid
SetEnv TMPDIR={temporary}
"""
SETTINGS = """\
IdentityFile {folder}/user
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
"""


def find_obstacle() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    return None if SSHD and SSH else "there is no sshd: apt-get install openssh-server"


@dataclass(frozen=True)
class Hosts:
    """Nodes that answer over SSH, and the directory with the keys and a ``bin`` for PATH."""

    cluster: slurm.Cluster
    folder: Path

    def start(self, name: str, *, keys: str = "user.pub") -> None:
        """``keys``: the file of keys that may come in; another one: it asks for a password."""
        settings = self.folder / f"{name}.conf"
        text = SERVER.format(
            folder=self.folder, keys=self.folder / keys, name=name, temporary=self.find_tmp(name)
        )
        settings.write_text(text)
        self.cluster.must("exec", name, SSHD, "-f", str(settings))

    def find_tmp(self, name: str) -> Path:
        """A node's own: processes of nodes have the same numbers, after which Open MPI's daemons
        name their directories."""
        folder = self.cluster.directory.parent / name
        folder.mkdir(exist_ok=True)
        return folder

    def stop(self, name: str) -> None:
        self.cluster.must("exec", name, "sh", "-c", f"kill $(cat {self.folder}/{name}.pid)")

    def command(self, name: str, *words: str, **variables: str) -> list[str]:
        """What runs this Python on a node, with an ssh that has the keys."""
        row = launchers.find("openmpi")
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        own = {"MPIDDP_MPIRUN": str(row.mpirun), "PATH": path, "TMPDIR": str(self.find_tmp(name))}
        given = {**row.environment, **own, **variables}
        settings = [f"{key}={value}" for key, value in given.items()]
        run = ["env", "-u", "SLURM_CONF", *settings, sys.executable, *words]
        return [str(slurm.COMMANDS / "exec"), name, *run]

    def run(self, name: str, *words: str, cwd: Path, **variables: str) -> launchers.Result:
        """Run this Python on a node to its end."""
        where = {"MPIDDP_CLUSTER_DIR": str(self.cluster.directory)}
        command = self.command(name, *words, **variables)
        return launchers.execute(*command, env=where, cwd=cwd, timeout=slurm.COMMAND_SECONDS)


@contextlib.contextmanager
def open_hosts(cluster: slurm.Cluster, folder: Path) -> Iterator[Hosts]:
    """Start an sshd on each node; they end with this block, or with the nodes."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    known = "".join(f"{name} {key}\n" for name in NODES)
    (folder / "known_hosts").write_text(known)
    (folder / "config").write_text(SETTINGS.format(folder=folder))
    write_program(folder / "bin" / "ssh", f'exec {SSH} -F {folder}/config "$@"')
    (folder / "nobody.pub").touch()
    hosts = Hosts(cluster, folder)
    for name in NODES:
        hosts.start(name)
    try:
        yield hosts
    finally:
        for name in NODES:
            with contextlib.suppress(AssertionError):
                hosts.stop(name)
