"""What a launch can be told: each option of it, with its check, stands here once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from mpiddp.launch.device.binding import KINDS
from mpiddp.launch.device.choice import AUTO, read_list
from mpiddp.options.checks import check, check_choice, check_text
from mpiddp.options.fields import Argument
from mpiddp.process.sockets import ports
from mpiddp.process.streams.output import RankOutput

LONGEST_TIMEOUT = 1e6
"""Seconds; what torch's timers hold."""
SECONDS = Argument("SECONDS")
COLLECTIVES = {"framework": "", "mpiddp": "mpiddp.torch_backend"}
"""Whose collectives run where a script says ``gloo``, and the module that replaces Gloo by them."""
KIND_NAMES = {str: "text", float: "a number of seconds", bool: "True or False"}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the ranks find each other, and how long they wait."""

    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"] = "auto"
    """Communication: ``nccl``; ``xccl`` for Intel's GPUs; ``gloo``; ``mpi`` if torch was built with
    it; or ``auto``: that of the GPUs, if every rank has its own."""

    devices: Annotated[str, Argument("auto|cpu|cuda|xpu|LIST")] = AUTO
    """Where ranks compute. ``auto``: on a GPU if a rank sees one; ``cuda``, or ``xpu`` for Intel's:
    each must see one; ``cpu``; or a LIST of visible GPUs such as ``0,2``, one for each rank of a
    node, for dp several."""

    timeout: Annotated[float, SECONDS] = 300.0
    """Time limit of each phase of start-up, and of each collective of groups that mpiddp makes:
    those of a script keep their own (Gloo: 30 minutes). Over NCCL a collective has 30 seconds more,
    from the moment in which it is queued."""

    interface: Annotated[str, Argument("NAME")] = "auto"
    """Network interface: ``auto``, ``NAME``, ``HOST=NAME,…``, or NCCL's syntax (``^docker,lo``)."""

    port_range: Annotated[str, Argument("LOW-HIGH")] = ports.AUTO
    """Ports that mpiddp may listen on, two at least (default: those of MPIDDP_PORT_RANGE if it is
    set, else any)."""

    tuning: Annotated[str, Argument("FILE")] = ""
    """Tuning table of `python -m benchmarks tune`, which says what auto chooses for mpiddp's
    collectives (default: that of MPIDDP_TUNING if it is set, else none)."""

    collectives: Literal["framework", "mpiddp"] = "framework"
    """Whose collectives run on CPU tensors where a script or backend says ``gloo``: torch's own, or
    ``mpiddp``'s. NCCL is left alone."""

    allow_shared_gpu: bool = False
    """Let several ranks use one GPU: with Gloo, or with NCCL 2.30 or newer and
    NCCL_MULTI_RANK_GPU_ENABLE=1."""

    lifeline_timeout: Annotated[float, SECONDS] = 30.0
    """Time after which a silent node is considered lost."""

    bind: Literal["auto", "none", "cores", "numa"] = "auto"
    """Bind ranks that no launcher has bound to cores of their own, or to a NUMA node; ``auto``: to
    cores, if each rank has at least two."""

    stall_timeout: Annotated[float, SECONDS] = 0.0
    """End a job in which no rank's main thread has moved for so long (default: never)."""

    site_defaults: Annotated[str, Argument("FILE", bare="table")] = ""
    """Set environment variables that this node's fabric needs, if nobody has: those of mpiddp's
    table, and before them those of a site's FILE, as --site-defaults=FILE (default: of the file
    that MPIDDP_SITE names, if it is set, else none)."""

    debug: bool = False
    """Let torch, NCCL and Python print more. Sets environment variables that are not set yet, and
    prints which."""

    def __post_init__(self) -> None:
        read_list(self.devices)
        for field in fields(LaunchOptions):
            # What a script gives has any type.
            value, kind = getattr(self, field.name), type(field.default)
            good = isinstance(value, (int, float) if kind is float else kind)
            check(field.name, good, KIND_NAMES[kind], value)
        check_choice("bind", self.bind, KINDS)
        check_choice("collectives", self.collectives, tuple(COLLECTIVES))
        ports.parse_option(self.port_range)
        check("interface", self.interface != "", "auto, NAME or host=NAME,…", self.interface)
        check_text(self, "interface", "tuning", "site_defaults")
        for name in ("timeout", "lifeline_timeout"):
            seconds = getattr(self, name)
            expected = f"seconds above 0 and up to {LONGEST_TIMEOUT:g}"
            check(name, 0 < seconds <= LONGEST_TIMEOUT, expected, seconds)
        seconds = self.stall_timeout
        expected = f"seconds up to {LONGEST_TIMEOUT:g}, or 0 for never"
        check("stall_timeout", 0 <= seconds <= LONGEST_TIMEOUT, expected, seconds)


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions, RankOutput):
    """How ranks find each other, how long they wait, and where they print.

    The program that starts a launch redirects the output before anything else
    (`mpiddp.process.streams.output.redirect`).
    """

    def __post_init__(self) -> None:
        LaunchOptions.__post_init__(self)
        RankOutput.__post_init__(self)
