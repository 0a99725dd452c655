"""Which interfaces MPI's TCP transports are told to use, before MPI starts.

Open MPI connects over every pair of interfaces that look alike on two nodes, UCX (below MPICH,
and at times below Open MPI) over the first that seems good. One that leads nowhere (an empty
port, a container bridge that has the same address everywhere) then makes MPI_Init hang or abort.
Where Slurm has named the job's hosts, the kernel's routing table says which ones lead to them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mpiddp import environment
from mpiddp.launch.hostnames import is_host
from mpiddp.launch.infiniband import INFINIBAND, find_infiniband
from mpiddp.launch.launcher import hosts_of_step

PARAMETER = re.compile(r"^\s*btl_tcp_if_(in|ex)clude\s*=", re.MULTILINE)


@contextlib.contextmanager
def told_interfaces(version: str, library: Path | None) -> Iterator[tuple[str, ...]]:
    """Tell MPI's TCP transports their interfaces while the body initialises it; yields them.

    Args:
        version: of the MPI library, as MPI_Get_library_version says it.
        library: its file, whose installation may hold settings of the site's.
    """
    names = find_variables(version, library)
    chosen = choose_interfaces(hosts_of_step(), socket.gethostname()) if names else ()
    before = {name: os.environ.get(name) for name in names if chosen}
    for name in before:
        os.environ[name] = ",".join(chosen)
    try:
        yield chosen
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_variables(version: str, library: Path | None, infiniband: Path = INFINIBAND) -> list[str]:
    """The variables of this library's transports by which nobody has chosen yet.

    UCX_NET_DEVICES names InfiniBand's devices as well, and would leave them out.
    """
    names = []
    if version.startswith("Open MPI") and not is_configured(os.environ, library):
        names.append(environment.OPEN_MPI_INTERFACES)
    if not os.environ.get(environment.UCX_INTERFACES) and not find_infiniband(infiniband):
        names.append(environment.UCX_INTERFACES)
    return names


def is_configured(variables: Mapping[str, str], library: Path | None) -> bool:
    """Whether somebody has told Open MPI already: the environment, or its parameter files."""
    if environment.is_set(environment.OPEN_MPI_INTERFACE_SETTINGS, variables):
        return True
    files = [Path("~/.openmpi/mca-params.conf").expanduser()]
    if library is not None:
        files.append(library.parent.parent / "etc" / "openmpi-mca-params.conf")
    files.append(Path("/etc/openmpi/openmpi-mca-params.conf"))
    return any(PARAMETER.search(_read(path)) for path in files)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def choose_interfaces(hostnames: Sequence[str], hostname: str) -> tuple[str, ...]:
    """This node's interfaces that lead to the job's first host and to the next one.

    Empty where there is nothing to choose: one host, one interface, or names that do not resolve.
    """
    if len(hostnames) < 2 or len(socket.if_nameindex()) < 3:
        return ()
    from mpiddp.launch.network import find_interface, list_interfaces

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
