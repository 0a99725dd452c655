"""Options of the launch: how the ranks find each other, and how long they wait."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from mpiddp.process.sockets import ports
from mpiddp.training.options.groups.checks import check, check_text, is_positive
from mpiddp.training.options.groups.effects import FREE


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the ranks find each other, and how long they wait."""

    backend: Annotated[Literal["auto", "nccl", "gloo"], FREE] = "auto"
    """Communication; auto takes nccl where every rank has its own GPU."""

    interface: Annotated[str, FREE] = "auto"
    """Network interface: auto, NAME, or host=NAME,host=NAME."""

    port_range: Annotated[str, FREE] = ports.AUTO
    """Ports that mpiddp may listen on: LOW-HIGH; auto takes MPIDDP_PORT_RANGE, else any."""

    timeout: Annotated[float, FREE] = 300.0
    """Deadline of each phase of start-up and of each collective, in seconds."""

    lifeline_timeout: Annotated[float, FREE] = 30.0
    """Seconds after which a silent node is considered lost."""

    stall_timeout: Annotated[float, FREE] = 600.0
    """End the run when no rank has made progress for so many seconds, such as by ending a step; 0
    for never."""

    bind: Annotated[Literal["auto", "none", "cores", "numa"], FREE] = "auto"
    """Bind ranks that no launcher has bound to cores of their own, or to a NUMA node; auto: to
    cores, where each rank has at least two."""

    allow_shared_gpu: Annotated[bool, FREE] = False
    """Let several ranks share one GPU: with gloo, or with NCCL 2.30 or newer and
    NCCL_MULTI_RANK_GPU_ENABLE=1."""

    def __post_init__(self) -> None:
        for name in ("timeout", "lifeline_timeout"):
            check(name, is_positive(getattr(self, name)), "above 0 seconds", getattr(self, name))
        good = self.stall_timeout >= 0 and math.isfinite(self.stall_timeout)
        check("stall_timeout", good, "0 or more seconds", self.stall_timeout)
        check("interface", self.interface != "", "auto, NAME or host=NAME,…", self.interface)
        check_text(self, "interface")
        ports.parse_option(self.port_range)
