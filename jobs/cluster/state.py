"""What the cluster is and where it keeps itself: its shape, its machines, its state directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

DIRECTORY_VARIABLE = "MPIDDP_CLUSTER_DIR"
DEFAULT_DIRECTORY = "/run/mpiddp-cluster"
MARKER = ".mpiddp-cluster"
"""In every state directory; nothing without it is ever deleted."""
LONGEST_DIRECTORY = 70
"""Characters: the paths of sockets below it may have 107."""
LOCK = Path("/run/mpiddp-cluster.lock")
LOCK_SECONDS = 60.0

# As different as in the wild, and one a prefix of another: what one name for all nodes, or a
# match by prefix, gets wrong.
INTERFACES = ("ens1f1", "ens1f0np0", "ens1f0", "eth0", "ib0", "enp65s0f0", "hsn0", "bond1")
MOST_NODES = 200
IP = {"4": (4,), "dual": (4, 6), "6": (6,)}
"""Which addresses machines have, by the word for it."""
CONTROLLER_NUMBER = 253
HOST_NUMBER = 254


class ClusterError(Exception):
    """A mistake or a lack that one line explains."""


@dataclass(frozen=True)
class Machine:
    """One network namespace with its own hostname, processes and shared memory."""

    name: str
    addresses: tuple[str, ...]
    """The one that Slurm uses first."""
    interface: str
    port: str
    """The other end of its link, on the controller's bridge."""

    @property
    def address(self) -> str:
        return self.addresses[0]


@dataclass(frozen=True)
class Shape:
    """All that decides the cluster's configuration."""

    nodes: int
    cpus: int
    """That each node claims, however many the machine has."""
    gpus: int
    """Per node."""
    network: str
    """The first three numbers of all addresses, as ``10.77.0``."""
    host_interface: str
    """This machine's own way into the cluster."""
    devices: tuple[str, ...] = ()
    """The device files of this machine's own GPUs, if nodes have those; else GPUs are fake."""
    ip: str = "4"
    """A key of ``IP``."""

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The nodes, in order."""
        return tuple(
            Machine(
                name=f"node{number}",
                addresses=self.find_addresses(number),
                interface=INTERFACES[(number - 1) % len(INTERFACES)],
                port=f"port{number}",
            )
            for number in range(1, self.nodes + 1)
        )

    def find_addresses(self, number: int | str) -> tuple[str, ...]:
        """A machine's, by its number. ``[1-4]`` for one is Slurm's form for four addresses."""
        forms = {
            4: f"{self.network}.{number}",
            6: f"fd00:{self.network.replace('.', ':')}::{number}",
        }
        return tuple(forms[family] for family in IP[self.ip])

    def find_gpus(self, number: int) -> tuple[str, ...]:
        """The device files of a node's real GPUs. Nodes share a GPU only if there are too few."""
        first = number * self.gpus
        return tuple(self.devices[i % len(self.devices)] for i in range(first, first + self.gpus))

    @property
    def controller(self) -> Machine:
        """Where slurmctld runs and the bridge is."""
        return Machine("controller", self.find_addresses(CONTROLLER_NUMBER), "bridge", "")

    @property
    def host_addresses(self) -> tuple[str, ...]:
        """This machine's own addresses in the cluster."""
        return self.find_addresses(HOST_NUMBER)

    def find(self, name: str) -> Machine:
        """The node of that name. Raises ClusterError."""
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise ClusterError(
            f"no node {name!r}: there are {self.machines[0].name} to node{self.nodes}"
        )


def directory() -> Path:
    """The directory of all that the cluster writes. Raises ClusterError for a bad one."""
    text = os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY
    if not re.fullmatch(r"(/[\w.+-]+)+", text) or ".." in text or len(text) > LONGEST_DIRECTORY:
        raise ClusterError(
            f"{DIRECTORY_VARIABLE}={text!r}: expected a full path of at most {LONGEST_DIRECTORY} "
            "letters, digits, '.', '_', '+', '-' and '/'"
        )
    return Path(text)


def claim_directory() -> None:
    """Make the state directory, or take over one of a start that did not get far.

    Raises ClusterError if the directory is somebody else's.
    """
    path = directory()
    if not path.parent.is_dir():
        raise ClusterError(f"{path.parent}, in which {path.name} is to be made, does not exist")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o755)
        (path / MARKER).touch()
    check_ours()


def check_ours() -> None:
    """Raises ClusterError unless the state directory was made by ``claim_directory``."""
    path = directory()
    if path.is_symlink() or not (path / MARKER).is_file() or path.stat().st_uid != 0:
        raise ClusterError(f"{path} is there, and no cluster's: {DIRECTORY_VARIABLE} names another")


def machine_directory(machine: Machine) -> Path:
    """What belongs to one machine; on a node it is mounted over ``local``."""
    return directory() / "machines" / machine.name


def local_directory() -> Path:
    """The same path on every machine, and another directory on each node."""
    return directory() / "local"


def load_shape() -> Shape | None:
    """The shape of the cluster that is up, or was when something crashed; None without one."""
    try:
        return Shape(**json.loads((directory() / "shape.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ClusterError(
            f"{directory()}/shape.json is damaged: jobs/cluster/down clears everything away"
        ) from None


def demand_shape() -> Shape:
    """The shape of the cluster that is up. Raises ClusterError without one."""
    shape = load_shape()
    if shape is None:
        raise ClusterError("no cluster is up; start one with: jobs/cluster/up")
    return shape


def save_shape(shape: Shape) -> None:
    """Write the shape, whole or not at all."""
    path = directory() / "shape.json"
    path.with_suffix(".new").write_text(json.dumps(asdict(shape), indent=2) + "\n")
    path.with_suffix(".new").replace(path)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep others from changing this or another cluster of this machine meanwhile.

    Only root can open the lock's file, or make it where it is: no user can take the lock first.
    Raises ClusterError.
    """
    end = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "r+") as lock:
            if not _take(lock):
                if time.monotonic() > end:
                    raise ClusterError(
                        f"another jobs/cluster command, process {lock.read().strip() or '?'}, "
                        f"has held {LOCK} for {LOCK_SECONDS:g} s"
                    )
                time.sleep(0.02)
                continue
            lock.truncate()
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            try:
                yield
            finally:
                LOCK.unlink()
            return


def _take(lock: TextIO) -> bool:
    """Whether this process has the lock now; False if its last holder has removed the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), LOCK.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def load_rate() -> str | None:
    """The rate that links are limited to; None for no limit."""
    try:
        return (directory() / "rate").read_text().strip() or None
    except FileNotFoundError:
        return None


def save_rate(rate: str | None) -> None:
    """Remember the rate, for nodes that are started later."""
    (directory() / "rate").write_text(f"{rate or ''}\n")
