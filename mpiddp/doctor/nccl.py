"""What NCCL really chose, read from its own log (NCCL_DEBUG=INFO).

The forms of the lines are those of NCCL's src/transport/{net,net_ib,net_socket,p2p,shm}.cc and of
the plugins of AWS, HPE and NVIDIA. Names of networks are theirs: IB, IBext_v8, Socket,
AWS Libfabric, Libfabric, OFI, ….
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp import environment
from mpiddp.doctor.findings import Finding, failed, passed, skipped, warned
from mpiddp.errors import FAILURE

TRANSPORT = "NCCL transport"

_VERSION = re.compile(r"NCCL version (\d[\w.]*(?:\+[\w.]+)?)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_USING = re.compile(r"NCCL INFO (NET/[^:\n]+?) ?: Using (.+?)\s*$", re.MULTILINE)
# Before 2.12 a rank is followed by the GPU's bus id, later by its number; until 2.10 the channel
# has no connection behind a slash, and before 2.5 it is called a ring.
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via "
    r"(P2P|SHM|NET/[^/\n]+|NVLS|COLLNET)([^\n]*)"
)
_DIRECT = "/GDRDMA"


@dataclass(frozen=True)
class Transport:
    """What one rank's log says; or, merged, that of several."""

    version: str = ""
    network: str = ""
    """What NCCL calls the network between nodes."""
    devices: tuple[str, ...] = ()
    """What it found for each kind of network."""
    channels: tuple[tuple[str, int], ...] = ()
    """How many channels go by P2P, SHM, NET/IB, …"""
    direct: bool = False
    """Whether any network channel reads GPU memory directly (GPUDirect RDMA)."""


def read_log(text: str) -> Transport:
    """Read what NCCL wrote."""
    version = _VERSION.search(text)
    network = _NETWORK.search(text)
    channels = Counter(match[3] for match in _CHANNEL.finditer(text))
    return Transport(
        version=version[1] if version else "",
        network=network[1] if network else "",
        devices=tuple(dict.fromkeys(f"{m[1]}: {m[2]}" for m in _USING.finditer(text))),
        channels=tuple(sorted(channels.items())),
        direct=any(_DIRECT in match[4] for match in _CHANNEL.finditer(text)),
    )


def judge_transport(
    transport: Transport, infiniband: Sequence[str], node_count: int, has_peers: bool
) -> Finding:
    """Whether NCCL took the best that a node has.

    Args:
        infiniband: the node's devices.
        has_peers: whether its GPUs can read each other's memory.
    """
    kinds = [kind for kind, _ in transport.channels]
    network = transport.network or next((k for k in kinds if k.startswith("NET/")), "")
    network = network.removeprefix("NET/")
    by_socket = "NET/Socket" in kinds or (node_count > 1 and network == "Socket")
    found = describe_transport(transport)
    if by_socket and infiniband:
        return failed(
            TRANSPORT,
            f"{found}: between nodes by TCP sockets, though there is {', '.join(infiniband)}",
            "See why with NCCL_DEBUG=INFO: NCCL_IB_DISABLE set? user-space libraries (rdma-core) "
            "missing, in a container above all? locked memory limited? NCCL_IB_HCA names another?",
            FAILURE,
        )
    if by_socket and node_count == 1:
        return warned(
            TRANSPORT,
            f"{found}: within one node by TCP sockets",
            "Unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; containers of one node need a common "
            "/dev/shm and PID namespace (--ipc=host --pid=host)",
        )
    if "SHM" in kinds and "P2P" not in kinds and has_peers:
        return warned(
            TRANSPORT,
            f"{found}: through the host's memory, though these GPUs can read each other's",
            "Unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL; see why with NCCL_DEBUG=INFO",
        )
    if not kinds:
        return skipped(TRANSPORT, f"{found}: no channels to other ranks in NCCL's log")
    return passed(TRANSPORT, found)


def describe_transport(transport: Transport) -> str:
    """``NCCL 2.27.3+cuda12.9, network IB with GPUDirect RDMA, channels by P2P and NET/IB``."""
    parts = [f"NCCL {transport.version or '(version not in its log)'}"]
    if transport.network:
        direct = " with GPUDirect RDMA" if transport.direct else ""
        parts.append(f"network {transport.network}{direct}")
    if transport.channels:
        parts.append("channels by " + " and ".join(kind for kind, _ in transport.channels))
    return ", ".join(parts)


def merge_transports(transports: Sequence[Transport]) -> Transport:
    """One node's, from those of its ranks."""
    channels: Counter[str] = Counter()
    for transport in transports:
        channels.update(dict(transport.channels))
    return Transport(
        version=next((t.version for t in transports if t.version), ""),
        network=next((t.network for t in transports if t.network), ""),
        devices=tuple(dict.fromkeys(device for t in transports for device in t.devices)),
        channels=tuple(sorted(channels.items())),
        direct=any(transport.direct for transport in transports),
    )


class Recording:
    """NCCL's log of this process, in a file that is removed again.

    NCCL reads ``variables`` when it is first used: they must be set before. What they hold of
    the user's is left aside, so that the log is complete.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mpiddp-nccl-")
        self._path = Path(self._folder.name) / "log"
        self.variables = {
            environment.NCCL_DEBUG: "INFO",
            environment.NCCL_DEBUG_SUBSYSTEMS: "INIT,NET",
            environment.NCCL_DEBUG_FILE: str(self._path),
        }

    def finish(self) -> Transport:
        """What was recorded so far; the file is removed."""
        try:
            text = self._path.read_text(errors="replace")
        except OSError:
            text = ""
        self._folder.cleanup()
        return read_log(text)
