"""Options of the synchronisation: how the gradients of all ranks become one update."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import check
from mpiddp.options.fields import Argument
from mpiddp.training.options.groups.effects import FREE
from mpiddp.training.options.groups.straggler import parse_straggler

FRAMEWORK = "framework"
"""The synchronisation that is DDP's own."""
PARAMETER_SERVER = "parameter-server"
UNLIMITED = "unlimited"
"""The staleness that has no bound."""


@dataclass(frozen=True, kw_only=True)
class SynchronisationOptions:
    """How the gradients of all ranks become one update."""

    sync: Annotated[str, Argument("SYNC")] = FRAMEWORK
    """How gradients are averaged: framework, auto, an algorithm such as ring, or
    parameter-server."""

    load: Annotated[Path | None, Argument("FILE")] = None
    """Python file that registers an algorithm of your own, or a plan, for sync."""

    transport: Literal["auto", "shared-memory", "shared-memory+mpi", "mpi", "torch"] = "auto"
    """What carries gradients, with sync auto or an algorithm."""

    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which gradients are sent, with sync auto or an algorithm; auto is their own."""

    overlap: Annotated[Literal["auto", "on", "off"], FREE] = "auto"
    """Send gradients during the backward pass, with sync auto or an algorithm."""

    servers: int = 1
    """Servers that share the weights, with sync parameter-server."""

    server_placement: Literal["colocated", "dedicated"] = "colocated"
    """Servers are ranks that also compute, or ranks of their own, with sync parameter-server."""

    staleness: Annotated[str, Argument("STEPS")] = "0"
    """Steps that a worker may be ahead of the slowest, or unlimited, with sync parameter-server."""

    average_every: Annotated[int | None, Argument("STEPS")] = None
    """Local SGD: each rank takes so many steps with its own gradients, then all average their
    weights by sync (default: gradients are averaged in each step)."""

    straggler: Annotated[str | None, Argument("WHO=FACTOR"), FREE] = None
    """Slow a worker's passes on purpose: RANK=FACTOR, or random=FACTOR, drawn for each step."""

    def __post_init__(self) -> None:
        _check_sync(self.sync, self.load)
        check("servers", self.servers >= 1, "1 or more", self.servers)
        good = self.staleness == UNLIMITED or self.staleness.isdecimal()
        check("staleness", good, "a number of steps, or unlimited", self.staleness)
        every = self.average_every
        check("average_every", every is None or every >= 1, "1 or more steps", every)
        if self.straggler is not None:
            parse_straggler(self.straggler)


def _check_sync(sync: str, load: Path | None) -> None:
    if sync in (FRAMEWORK, "auto", PARAMETER_SERVER):
        return
    # They need NumPy, for which --help does not wait.
    from mpiddp.schedules import registry
    from mpiddp.schedules.plans import loading

    if load is not None:
        loading.load(load)

    try:
        registry.parse(sync)
    except ConfigurationError as error:
        expected = "expected framework, auto, parameter-server, or an algorithm"
        raise ConfigurationError(f"sync: {expected}: {error}") from None
