"""The options that describe a machine for the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.records.options import RATES, TIMES, describe_seconds, in_words
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.schedules.cost import ClosedForm
from mpiddp.schedules.machine import Machine, MessageCost

MICROSECOND = 1e-6
GIGABIT = 1e9 / 8
GIGABYTE = 1e9

Time = Annotated[float, Argument("µs", in_words("µs", TIMES, zero=True))]
TimeOrNone = Annotated[float | None, Argument("µs", in_words("µs", TIMES, zero=True))]
Rate = Annotated[float, Argument("Gbit/s", in_words("Gbit/s", RATES))]
RateOrNone = Annotated[float | None, Argument("Gbit/s", in_words("Gbit/s", RATES))]
AdditionRate = Annotated[float, Argument("GB/s", in_words("GB/s", RATES))]


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Latency and bandwidth between and inside nodes, and additions."""

    latency: Time = 10.0
    """Latency of a message; also 5us, 1.5ms."""

    bandwidth: Rate = 10.0
    """Bandwidth of a link, each way; also 400Mbit, 12.5GB."""

    inside_latency: TimeOrNone = None
    """Latency within a node (default: a tenth of --latency)."""

    inside_bandwidth: RateOrNone = None
    """Bandwidth within a node (default: ten times --bandwidth)."""

    node_bandwidth: RateOrNone = None
    """Of the link to the network that a node's ranks share, each way (default: as --bandwidth,
    which one rank can fill alone)."""

    addition: AdditionRate = 10.0
    """Bytes that a rank adds in a second; also 500MB, 20GB."""


def read_machine(options: MachineOptions, *, several: bool) -> Machine:
    """The machine; without nodes (``several`` false) all messages are alike.

    Raises ConfigurationError if the inside figures are given without nodes.
    """
    for name in ("inside_latency", "inside_bandwidth", "node_bandwidth"):
        if getattr(options, name) is not None and not several:
            raise ConfigurationError(f"--{name.replace('_', '-')} is for nodes of several ranks")
    _check_order(vars(options))
    between = _read_link(options.latency, options.bandwidth)
    latency, bandwidth = options.inside_latency, options.inside_bandwidth
    near = _read_link(
        options.latency / 10 if latency is None else latency,
        options.bandwidth * 10 if bandwidth is None else bandwidth,
    )
    addition = 1 / (options.addition * GIGABYTE)
    return Machine(near if several else between, between, addition, read_shared(options))


def read_shared(options: MachineOptions) -> float | None:
    """Seconds per byte of the link that a node's ranks share."""
    return None if options.node_bandwidth is None else 1 / (options.node_bandwidth * GIGABIT)


def _check_order(values: Mapping[str, Any]) -> None:
    for least, most in (
        ("inside_latency", "latency"),
        ("bandwidth", "inside_bandwidth"),
        ("bandwidth", "node_bandwidth"),
    ):
        low, high = values[least], values[most]
        if low is not None and high is not None and low > high:
            names = [f"--{name.replace('_', '-')}" for name in (least, most)]
            raise ConfigurationError(
                f"{names[0]} {low:g} must not be above {names[1]} {high:g}: inside a node messages "
                "are no slower, and its link has room for one rank at least"
            )


def _read_link(latency: float, bandwidth: float) -> MessageCost:
    return MessageCost(latency * MICROSECOND, 1 / (bandwidth * GIGABIT))


def describe_place(ranks: int, nodes: int) -> str:
    """``64 ranks on 8 nodes``; nothing of nodes that have one rank each."""
    beside = f" on {nodes:,} node{'s' if nodes > 1 else ''}" if nodes != ranks else ""
    return f"{ranks:,} rank{'s' if ranks > 1 else ''}{beside}"


def describe_machine(machine: Machine, *, several: bool) -> str:
    parts = [_describe_link(machine.between)]
    if several:
        parts[0] += " between nodes"
        parts.append(f"{_describe_link(machine.inside)} inside")
        if machine.uplink != machine.between.seconds_per_byte:
            parts.append(f"{1 / machine.uplink / GIGABIT:g} Gbit/s for each node")
    parts.append(f"γ {1 / machine.addition / GIGABYTE:g} GB/s")
    return ", ".join(parts)


def _describe_link(link: MessageCost) -> str:
    bandwidth = 1 / link.seconds_per_byte / GIGABIT
    return f"α {describe_seconds(link.latency)} and β {bandwidth:g} Gbit/s"


def describe_form(form: ClosedForm, seconds: float, size: int, machine: Machine) -> str:
    """`` = `` and the formula with its numbers, S the buffer; nothing where it is not so simple.

    With nodes of several ranks a step may be decided by a rank or by its node's link, and the sum
    over the steps need not be a sum of terms. Chunks that differ by an element make it ``≈``.
    """
    link = machine.inside if form.near.messages else machine.between
    load = form.near if form.near.messages else form.far
    if form.near.messages and form.far.messages:
        return ""
    value = (
        load.messages * link.latency
        + load.volume * size * link.seconds_per_byte
        + form.added * size * machine.addition
    )
    if not math.isclose(value, seconds, rel_tol=0.02):
        return ""
    parts = ((load.messages, "α"), (load.volume, "S·β"), (form.added, "S·γ"))
    text = " + ".join(f"{factor:.4g} {unit}" for factor, unit in parts if factor) or "0"
    return f" {'=' if math.isclose(value, seconds, rel_tol=1e-9) else '≈'} {text}"
