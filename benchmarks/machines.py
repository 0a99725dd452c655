"""The options that describe a machine for the cost model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.options import describe_seconds, positive
from mpiddp.collectives.closed_form import ClosedForm
from mpiddp.collectives.cost import Link, Machine
from mpiddp.errors import ConfigurationError

MICROSECOND = 1e-6
GIGABIT = 1e9 / 8
GIGABYTE = 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """Latency and bandwidth between and inside nodes, and additions."""
    add = parser.add_argument_group("the machine").add_argument
    add("--latency", type=positive("µs", zero=True), default=10.0, metavar="µs",
        help="of a message (default: 10)")  # fmt: skip
    add("--bandwidth", type=positive("Gbit/s"), default=10.0, metavar="Gbit/s",
        help="of a link, each way (default: 10)")  # fmt: skip
    add("--inside-latency", type=positive("µs", zero=True), default=None, metavar="µs",
        help="of a message within a node (default: a tenth of --latency)")  # fmt: skip
    add("--inside-bandwidth", type=positive("Gbit/s"), default=None, metavar="Gbit/s",
        help="within a node (default: ten times --bandwidth)")  # fmt: skip
    add("--addition", type=positive("GB/s"), default=10.0, metavar="GB/s",
        help="bytes that a rank adds in a second (default: 10)")  # fmt: skip


def read_machine(values: Mapping[str, Any], *, several: bool) -> Machine:
    """The machine; without nodes (``several`` false) all messages are alike.

    Raises ConfigurationError where the inside figures are given without nodes.
    """
    inside = (values["inside_latency"], values["inside_bandwidth"])
    if not several and inside != (None, None):
        raise ConfigurationError("--inside-latency and --inside-bandwidth are for several nodes")
    between = _read_link(values["latency"], values["bandwidth"])
    latency, bandwidth = inside
    near = _read_link(
        values["latency"] / 10 if latency is None else latency,
        values["bandwidth"] * 10 if bandwidth is None else bandwidth,
    )
    addition = 1 / (values["addition"] * GIGABYTE)
    return Machine(near if several else between, between, addition)


def _read_link(latency: float, bandwidth: float) -> Link:
    return Link(latency * MICROSECOND, 1 / (bandwidth * GIGABIT))


def describe_machine(machine: Machine, *, several: bool) -> str:
    """The figures, in one line."""
    parts = [_describe_link(machine.between)]
    if several:
        parts[0] += " between nodes"
        parts.append(f"{_describe_link(machine.inside)} inside")
    parts.append(f"additions at {1 / machine.addition / GIGABYTE:g} GB/s")
    return ", ".join(parts)


def _describe_link(link: Link) -> str:
    bandwidth = 1 / link.seconds_per_byte / GIGABIT
    return f"α {describe_seconds(link.latency)} and {bandwidth:g} Gbit/s"


def describe_form(form: ClosedForm) -> str:
    """The formula with its numbers, S the buffer."""
    near, far = form.near, form.far
    parts = [(near.messages, "α"), (near.volume, "S·β")]
    if near.messages and far.messages:
        parts = [(factor, f"{unit} inside") for factor, unit in parts]
        parts += [(far.messages, "α between"), (far.volume, "S·β between")]
    elif far.messages:
        parts = [(far.messages, "α"), (far.volume, "S·β")]
    parts.append((form.added, "S·γ"))
    return " + ".join(f"{factor:.4g} {unit}" for factor, unit in parts if factor) or "0"
