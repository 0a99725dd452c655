"""What NCCL really chose, read from its own log (NCCL_DEBUG=INFO).

The forms of the lines are those of NCCL's src/transport/{net,net_ib,net_socket,p2p,shm}.cc and of
the plugins of AWS, HPE and NVIDIA. Names of networks are theirs: IB, IBext_v8, Socket,
AWS Libfabric, Libfabric, OFI, ….
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp import environment
from mpiddp.doctor.examiner.findings import Finding, failed, passed, skipped, warned
from mpiddp.launch.fabrics import NodeFabrics

TRANSPORT = "NCCL transport"
SOCKET_ADVICE = (
    "See why with NCCL_DEBUG=INFO: NCCL_IB_DISABLE set? user-space libraries (rdma-core) missing, "
    "in a container above all? locked memory limited? NCCL_IB_HCA names another?"
)
PLUGIN_ADVICE = (
    'NCCL has no plugin that can use this fabric: {advice}; with NCCL_NET="AWS Libfabric" NCCL '
    "stops if it is missing"
)
PROVIDER_ADVICE = (
    "The plugin is there, but its libfabric cannot use the cards: unset FI_PROVIDER; take the "
    "site's libfabric; in a container pass /dev/cxi* (of EFA: /dev/infiniband) in; see why with "
    "FI_LOG_LEVEL=info"
)

_VERSION = re.compile(r"[NR]CCL version (?:: )?(\d[\w.]*(?:\+[\w.]+)?)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
# Before 2.12 a rank is followed by the GPU's bus id, later by its number; until 2.10 the channel
# has no connection behind a slash, and before 2.5 it is called a ring.
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via "
    r"(P2P|SHM|NET/[^/\n]+|NVLS|COLLNET)([^\n]*)"
)
# Once for each card. A line about a single GPU ("for GPU 0 / HCA 1") may be of a distant card.
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (\w+)")
_SLOW_PROVIDERS = ("tcp", "sockets", "udp", "net")
"""Of libfabric: they go through the kernel, over any interface."""
_EVIDENCE = re.compile(
    r"(?:NCCL (?:INFO|WARN) )((?:NET/Plugin ?: .*(?:[Nn]o plugin found|Could not find|cannot open)"
    r"|NET/IB : No device found|Failed to open libibverbs|NET/OFI No eligible|NCCL_NET set by"
    r"|NCCL_IB_DISABLE set by|NET/OFI Selected [Pp]rovider is|Using network ).*?)\s*$",
    re.MULTILINE,
)
"""Lines that say why a network was chosen."""
SHOWN_EVIDENCE = 3
_ABILITY = re.compile(r"NET/(?:IB|NCCL RDMA)[^:\n]* : GPU Direct RDMA (\w+) for HCA")


@dataclass(frozen=True)
class Transport:
    """What one rank's log says; or, merged, that of several."""

    version: str = ""
    network: str = ""
    """What NCCL calls the network between nodes."""
    kinds: frozenset[str] = frozenset()
    """By what channels go: P2P, SHM, NET/IB, …"""
    provider: str = ""
    """Of libfabric, which a plugin has chosen: cxi, efa, tcp, …"""
    evidence: tuple[str, ...] = ()
    """Lines that say why this network was chosen, without hosts and processes."""
    direct: bool = False
    """Whether any network channel reads GPU memory directly (GPUDirect RDMA)."""
    is_refused: bool = False
    """Whether NCCL says that no InfiniBand card can read GPU memory directly."""

    @property
    def is_staged(self) -> bool:
        """Whether InfiniBand carries data, or would, that goes through the host's memory first."""
        by_card = any(kind.startswith(("NET/IB", "NET/NCCL RDMA")) for kind in self.kinds)
        return not self.direct and (by_card or self.is_refused)

    def goes_by_sockets(self, node_count: int) -> bool:
        """Whether NCCL itself goes over TCP, or, between nodes, would."""
        return "NET/Socket" in self.kinds or (node_count > 1 and self.network == "Socket")

    @property
    def quoted(self) -> str:
        """The last lines of the evidence, as its log has them."""
        lines = [f"“{line}”" for line in self.evidence[-SHOWN_EVIDENCE:]]
        return f" (in its log: {', '.join(lines)})" if lines else ""


def read_log(text: str) -> Transport:
    version, network = _VERSION.search(text), _NETWORK.search(text)
    provider = _PROVIDER.search(text)
    channels = list(_CHANNEL.finditer(text))
    return Transport(
        version=version[1] if version else "",
        network=network[1] if network else "",
        provider=provider[1] if provider else "",
        evidence=tuple(dict.fromkeys(_EVIDENCE.findall(text))),
        kinds=frozenset(match[3] for match in channels),
        direct=any("/GDRDMA" in match[4] for match in channels),
        is_refused=set(_ABILITY.findall(text)) == {"Disabled"},
    )


def judge_transport(
    transport: Transport, node: NodeFabrics, node_count: int, has_peers: bool, has_module: bool
) -> Finding:
    """Whether NCCL took the best that a node has.

    ``has_peers``: whether its GPUs can read each other's memory;
    ``has_module``: whether the kernel has nvidia-peermem.
    """
    kinds, found = transport.kinds, _describe_transport(transport)
    by_socket = transport.goes_by_sockets(node_count)
    if node.fabrics and by_socket:
        return _refuse_sockets(transport, node, found)
    if node.fabrics and node_count > 1 and transport.provider in _SLOW_PROVIDERS:
        return failed(
            TRANSPORT,
            f"{found}: by libfabric's provider {transport.provider}, over TCP, though there is "
            f"{node.name}{transport.quoted}",
            PROVIDER_ADVICE,
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
    if transport.is_staged and node.devices and node.plugin is None:
        return warned(
            TRANSPORT,
            f"{found}: {', '.join(node.devices)} without GPUDirect RDMA, so what goes between "
            "nodes is copied through the host's memory",
            _advise_on_direct(has_module),
        )
    if not kinds:
        return skipped(TRANSPORT, f"{found}: no channels to other ranks in NCCL's log")
    return passed(TRANSPORT, found)


def _describe_transport(transport: Transport) -> str:
    parts = [f"NCCL {transport.version or '(version not in its log)'}"]
    if transport.network:
        direct = " with GPUDirect RDMA" if transport.direct else ""
        provider = f" (provider {transport.provider})" if transport.provider else ""
        parts.append(f"network {transport.network}{provider}{direct}")
    if transport.kinds:
        parts.append("channels by " + " and ".join(sorted(transport.kinds)))
    return ", ".join(parts)


def _refuse_sockets(transport: Transport, node: NodeFabrics, found: str) -> Finding:
    advice = SOCKET_ADVICE
    if node.plugin is not None:
        advice = PLUGIN_ADVICE.format(advice=node.plugin.advice)
    return failed(
        TRANSPORT,
        f"{found}: between nodes by TCP sockets, though there is {node.name}{transport.quoted}",
        advice,
    )


def _advise_on_direct(has_module: bool) -> str:
    if has_module:
        return (
            "nvidia-peermem is loaded, so card and GPU are further apart than NCCL allows "
            "(nvidia-smi topo -m): try NCCL_NET_GDR_LEVEL=PHB, or SYS, and measure"
        )
    return (
        "Load the kernel module (modprobe nvidia-peermem), or use DMA-BUF, which needs the "
        "driver's open kernel modules, Linux 5.12 and CUDA 11.7; if it is there, raise "
        "NCCL_NET_GDR_LEVEL. Some GPUs never can, such as GeForce"
    )


def merge_transports(transports: Sequence[Transport]) -> Transport:
    """One node's, from those of its ranks."""
    return Transport(
        version=next((t.version for t in transports if t.version), ""),
        network=next((t.network for t in transports if t.network), ""),
        provider=next((t.provider for t in transports if t.provider), ""),
        evidence=next((t.evidence for t in transports if t.evidence), ()),
        kinds=frozenset[str]().union(*(t.kinds for t in transports)),
        direct=any(t.direct for t in transports),
        is_refused=any(t.is_refused for t in transports),
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
