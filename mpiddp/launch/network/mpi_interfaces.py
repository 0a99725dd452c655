"""Which transports and interfaces MPI is told to use, before MPI starts.

Between hosts, Open MPI connects over every pair of interfaces that look alike on two nodes, UCX
(below MPICH, and at times below Open MPI) over the first that seems good. One that leads nowhere
(an empty port, a container bridge that has the same address everywhere) then makes MPI_Init hang
or abort. If Slurm has named the job's hosts, the kernel's routing table says which ones lead to
them.

On one host shared memory is enough, yet each rank of Open MPI's listens on 0.0.0.0, whatever
interfaces it is told (``mca_btl_tcp_component_create_listen``), and UCX and libfabric listen on
every interface. So Open MPI goes without TCP there, and the others have loopback alone.

If each rank has a container of its own, MPI takes ranks for neighbours that cannot reach each
other's memory: Open MPI 5 crashes, MPICH hangs or aborts. They send messages then.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from mpiddp import environment
from mpiddp.launch.launcher.containers import PROCESSES, find_own_namespaces
from mpiddp.launch.launcher.exported_variables import set_meanwhile
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.launcher.launcher import Launcher, hosts_of_step
from mpiddp.launch.network.infiniband import INFINIBAND, find_infiniband

LISTENING = ("tcp", "ofi")
"""Open MPI's transports that listen."""
SHARING = ("sm", "vader")
"""Those through shared memory."""
PARAMETER = re.compile(r"^[ \t]*(btl\w*)[ \t]*=[ \t]*(\S*)", re.MULTILINE)
LOOPBACK = "lo"
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_BYTES = 1 << 24
"""What each rank of Open MPI 5 takes of it."""


@contextlib.contextmanager
def told_interfaces(
    version: str, library: Path | None, launcher: Launcher | None
) -> Iterator[tuple[str, ...]]:
    """Tell MPI what to use while the body initialises it.

    Yields the interfaces that lead to the job's other hosts; none if nothing was said of them.

    Args:
        version: of the MPI library, as MPI_Get_library_version says it.
        library: its file, whose installation may hold settings of the site's.
        launcher: that started this process.
    """
    chosen: tuple[str, ...] = ()
    if launcher is not None and launcher.is_on_one_host:
        settings = stay_on_host(version, library, launcher.size or 1)
    else:
        names = find_variables(version, library)
        chosen = choose_interfaces(hosts_of_step(), socket.gethostname()) if names else ()
        settings = {name: ",".join(chosen) for name in names if chosen}
    if launcher is not None and (namespaces := find_own_namespaces(launcher)):
        settings |= keep_apart(version, namespaces)
    with set_meanwhile(settings):
        yield chosen


def stay_on_host(
    version: str, library: Path | None, ranks: int, infiniband: Path = INFINIBAND
) -> dict[str, str]:
    """Variables by which ``ranks`` ranks of one host can be reached from no other.

    What somebody has chosen is left alone, but for a list of what is not to be used, as Debian's:
    it grows longer. TCP is left to ranks that do not share memory.
    """
    settings = {}
    if version.startswith("Open MPI") and not is_configured(os.environ, library):
        name = environment.OPEN_MPI_TRANSPORTS
        excluded = read_settings(library).get(name, "") or "^"
        if not os.environ.get(name) and excluded.startswith("^") and share_memory(ranks):
            settings[name] = _exclude(excluded, LISTENING)
    names = [*environment.OFI_INTERFACES, *_find_ucx(infiniband)]
    return settings | {name: LOOPBACK for name in names if not os.environ.get(name)}


def keep_apart(version: str, namespaces: Collection[str]) -> dict[str, str]:
    """Variables by which ranks of one host, with these namespaces between them, share no memory.

    A list of what Open MPI is to use is left alone; one of what it is not to use grows longer.
    """
    if version.startswith("MPICH Version"):
        return {environment.MPICH_APART: "1"}
    excluded = os.environ.get(environment.OPEN_MPI_TRANSPORTS) or "^"
    if version.startswith("Open MPI") and PROCESSES in namespaces and excluded.startswith("^"):
        return {environment.OPEN_MPI_TRANSPORTS: _exclude(excluded, SHARING)}
    return {}


def _exclude(excluded: str, names: Sequence[str]) -> str:
    """A list of what Open MPI is not to use (``^tcp``), made longer."""
    return "^" + ",".join([*filter(None, excluded[1:].split(",")), *names])


def share_memory(ranks: int, parent: Path | None = None) -> bool:
    """Whether ranks of this host can be expected to find each other in shared memory.

    Not so in containers that have a /dev/shm each, as far as this process and who started it tell.
    """
    if parent is None:
        if os.getppid() <= 1:
            return False  # The first process of a container: who started it cannot be seen.
        parent = Path(f"/proc/{os.getppid()}")
    try:
        room = os.statvfs(SHARED_MEMORY)
        if room.f_bavail * room.f_frsize < ranks * SEGMENT_BYTES:
            return False
        # Slurm starts ranks itself, as root, and does not let them look.
        if (parent / "comm").read_text().strip() == "slurmstepd":
            return True
        return os.path.samestat(SHARED_MEMORY.stat(), (parent / "root/dev/shm").stat())
    except OSError:
        return False


def find_variables(version: str, library: Path | None, infiniband: Path = INFINIBAND) -> list[str]:
    """The variables of this library's transports by which nobody has chosen interfaces yet."""
    names = []
    if version.startswith("Open MPI") and not is_configured(os.environ, library):
        names.append(environment.OPEN_MPI_INTERFACES)
    return names + _find_ucx(infiniband)


def _find_ucx(infiniband: Path) -> list[str]:
    """UCX's variable. It names InfiniBand's devices as well, and would leave them out."""
    if os.environ.get(environment.UCX_INTERFACES) or find_infiniband(infiniband):
        return []
    return [environment.UCX_INTERFACES]


def is_configured(variables: Mapping[str, str], library: Path | None) -> bool:
    """Whether somebody has told Open MPI its interfaces already, by a variable or a file."""
    names = environment.OPEN_MPI_INTERFACE_SETTINGS
    return environment.is_set(names, variables) or bool(set(names) & set(read_settings(library)))


def read_settings(library: Path | None) -> dict[str, str]:
    """What Open MPI's parameter files say, by the variable that says the same; the user's first."""
    files = [Path("/etc/openmpi/openmpi-mca-params.conf")]
    if library is not None:
        files.append(library.parent.parent / "etc" / "openmpi-mca-params.conf")
    files.append(Path("~/.openmpi/mca-params.conf").expanduser())
    settings = {}
    for path in files:
        for name, value in PARAMETER.findall(_read(path)):
            settings[environment.OPEN_MPI_PREFIX + name] = value
    return settings


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def choose_interfaces(hostnames: Sequence[str], hostname: str) -> tuple[str, ...]:
    """This node's interfaces that lead to the job's first host and to the next one.

    Empty if there is nothing to choose: one host, one interface, or names that do not resolve.
    """
    if len(hostnames) < 2 or len(socket.if_nameindex()) < 3:
        return ()
    from mpiddp.launch.network.interfaces import find_interface, list_interfaces

    found = []
    interfaces = list_interfaces()
    for peer in choose_peers(hostnames, hostname):
        address = find_source(peer)
        interface = find_interface(interfaces, address) if address is not None else None
        if interface is not None:
            found.append(interface)
    leading = [each for each in interfaces if each in found and not each.is_loopback]
    others = [each for each in interfaces if each not in found and not each.is_loopback]
    return tuple(each.name for each in leading) if others else ()


def choose_peers(hostnames: Sequence[str], hostname: str) -> list[str]:
    """The first host and the one after this one, round the ring; never this one."""
    own = next((i for i, name in enumerate(hostnames) if is_host(name, hostname)), 0)
    peers = (hostnames[0], hostnames[(own + 1) % len(hostnames)])
    return [peer for peer in dict.fromkeys(peers) if not is_host(peer, hostname)]


def find_source(hostname: str) -> str | None:
    """This node's IPv4 address on its way to a host, by the routing table; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((hostname, 9))
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return address
