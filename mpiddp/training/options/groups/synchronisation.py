"""Options of the synchronisation: how the gradients of all ranks become one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import check
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

    sync: str = FRAMEWORK
    """How gradients become one: framework, auto, an algorithm (as ring), or parameter-server."""

    transport: Literal["auto", "shared-memory", "shared-memory+mpi", "mpi", "torch"] = "auto"
    """What carries gradients, with sync auto or an algorithm."""

    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """In which type gradients travel, with sync auto or an algorithm; auto is their own."""

    overlap: Annotated[Literal["auto", "on", "off"], FREE] = "auto"
    """Whether gradients travel during the backward pass, with sync auto or an algorithm."""

    servers: int = 1
    """Servers that share the weights, with sync parameter-server."""

    server_placement: Literal["colocated", "dedicated"] = "colocated"
    """Whether the ranks that serve compute, too, with sync parameter-server."""

    staleness: str = "0"
    """Steps that a worker may be ahead of the slowest, or unlimited, with sync parameter-server."""

    straggler: Annotated[str | None, FREE] = None
    """Slow a worker's passes on purpose: RANK=FACTOR, or random=FACTOR, drawn for each step."""

    def __post_init__(self) -> None:
        _check_sync(self.sync)
        check("servers", self.servers >= 1, "1 or more", self.servers)
        good = self.staleness == UNLIMITED or self.staleness.isdecimal()
        check("staleness", good, "a number of steps, or unlimited", self.staleness)
        if self.straggler is not None:
            parse_straggler(self.straggler)


def _check_sync(sync: str) -> None:
    if sync in (FRAMEWORK, "auto", PARAMETER_SERVER):
        return
    # They need NumPy, for which --help does not wait.
    from mpiddp.schedules import registry

    try:
        registry.parse(sync)
    except ConfigurationError as error:
        expected = "expected framework, auto, parameter-server, or an algorithm"
        raise ConfigurationError(f"sync: {expected}: {error}") from None
