"""Tuning tables: what ``auto`` chooses for measured calls (`python -m benchmarks tune`).

A table is a JSON file. It has sections, each for one collective, one layout of ranks on nodes, one
type of elements, and CPUs or GPUs; a section has ranges of bytes, each with an algorithm and a
transport. ``auto`` in place of an algorithm is the rule of `mpiddp.collectives.planner`, which
also decides if no range fits. The variable MPIDDP_TUNING names the file; each rank reads it,
and the ranks compare its digest when they prepare their first collective call.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.collectives import AUTO, TRANSPORTS
from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import decode, read_whole, write_whole
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Collective
from mpiddp.wording import count_noun, name_ranks

SCHEMA = 1
"""Version of the file's form."""
KIND = "mpiddp tuning table"
CPU, GPU = "cpu", "gpu"
Key = tuple[str, str, str]
"""Which calls a section is for: the collective, the elements' type, ``cpu`` or ``gpu``."""
MAKE = "make one with: python -m benchmarks tune --output FILE.json"


@dataclass(frozen=True)
class Range:
    """What is used for buffers of some sizes."""

    least: int
    """Bytes of the smallest buffer."""
    most: int
    """Bytes of the largest one."""
    algorithm: str
    transport: str = AUTO

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            sizes = (self.least, self.most)
            raise ContentError(f"expected 0 <= least <= most, in bytes, found {sizes}")
        try:
            parse(self.algorithm if self.algorithm != AUTO else "ring")
        except ConfigurationError as error:
            raise ContentError(str(error)) from None
        if self.transport not in (AUTO, *TRANSPORTS):
            raise ContentError(
                f"no transport is called {self.transport!r}; there are auto, "
                f"{', '.join(TRANSPORTS)}"
            )


@dataclass(frozen=True)
class Section:
    """The ranges of one collective."""

    collective: str
    """As `Collective` names it."""
    nodes: tuple[int, ...]
    """The ranks of each node, in ascending order."""
    type: str
    """Of the elements, as torch names it."""
    device: str
    """``cpu`` or ``gpu``, on which the buffers are."""
    ranges: tuple[Range, ...]
    """In ascending order."""

    def __post_init__(self) -> None:
        if self.collective not in {each.value for each in Collective}:
            raise ContentError(f"no collective is called {self.collective!r}")
        if not self.nodes or min(self.nodes) < 1:
            raise ContentError(f"nodes: expected the ranks of each, found {self.nodes}")
        if self.device not in (CPU, GPU):
            raise ContentError(f"device: expected cpu or gpu, found {self.device!r}")
        for one, other in pairwise(self.ranges):
            if other.least <= one.most:
                raise ContentError(
                    f"expected ranges in ascending order that do not overlap, found one up to "
                    f"{one.most} B and the next from {other.least} B"
                )

    @property
    def key(self) -> Key:
        return (self.collective, self.type, self.device)


@dataclass(frozen=True)
class Table:
    """A file that was read."""

    path: Path
    text: str
    """The file's."""
    made: Mapping[str, Any]
    """When, by which version and on which machine."""
    sections: tuple[Section, ...]

    @cached_property
    def digest(self) -> str:
        """Of the file's bytes, SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def title(self) -> str:
        return f"{self.path} (SHA-256 {self.digest[:12]})"


@dataclass(frozen=True)
class Tuning:
    """What a table says to the ranks of one communicator."""

    text: str = "none"
    """Which table is used, and for what; or why it is not."""
    ranges: Mapping[Key, tuple[Range, ...]] = field(default_factory=dict)
    title: str = ""
    """The table's."""

    def find(self, key: Key, size: int) -> Range | None:
        """The range of a buffer of ``size`` bytes, if a table has one."""
        for each in self.ranges.get(key, ()):
            if each.least <= size <= each.most:
                return each
        return None

    def list_transports(self, collective: Collective) -> list[str]:
        """Those that it names for a collective."""
        found = {
            each.transport
            for key, ranges in self.ranges.items()
            for each in ranges
            if key[0] == collective.value
        }
        return sorted(found - {AUTO})


NO_TABLE = Tuning()


def make_key(collective: Collective, kind: str, *, on_gpu: bool) -> Key:
    """The key of a call on elements of type ``kind``."""
    return (collective.value, kind, GPU if on_gpu else CPU)


def write_table(path: Path, made: Mapping[str, Any], sections: Sequence[Section]) -> None:
    """Write a table. Raises ConfigurationError if the file cannot be written."""
    content = {
        "kind": KIND,
        "schema": SCHEMA,
        "made": made,
        "sections": [asdict(each) for each in sections],
    }
    try:
        write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class _Form:
    kind: str
    schema: int

    def __post_init__(self) -> None:
        if (self.kind, self.schema) != (KIND, SCHEMA):
            raise ContentError(
                f"expected kind {KIND!r} and schema {SCHEMA}, found {self.kind!r} and {self.schema}"
            )


@dataclass(frozen=True)
class _Content:
    made: Mapping[str, Any]
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        for one, others in Counter((each.nodes, each.key) for each in self.sections).items():
            if others > 1:
                raise ContentError(f"it has two sections for {' '.join(one[1])}")


def read_table(path: Path) -> Table:
    """Read a table. Raises ConfigurationError that says what is wrong with it."""
    try:
        data = read_whole(path)
        decode(data, _Form)
        content = decode(data, _Content)
    except ContentError as error:
        raise ContentError(f"the tuning table {path}: {error}; {MAKE}") from None
    except OSError as error:
        raise ConfigurationError(
            f"the tuning table {path} cannot be read: {error.strerror}"
        ) from None
    return Table(path, data.decode(), content.made, content.sections)


def find_table_path() -> Path | None:
    """The file that the environment names, if it names one."""
    text = os.environ.get(environment.TUNING)
    return Path(text) if text else None


@dataclass(frozen=True)
class Reading:
    """What a rank tells the others about its table."""

    digest: str = ""
    """Empty without a table."""
    problem: str = ""
    """Why it cannot be used; empty if it can."""


def read_own() -> tuple[Table | None, Reading]:
    """This rank's table, if it has one, and what to tell the others."""
    path = find_table_path()
    if path is None:
        return None, Reading()
    try:
        table = read_table(path)
    except ConfigurationError as error:
        return None, Reading(problem=str(error))
    return table, Reading(table.digest)


def check_readings(readings: Sequence[Reading]) -> None:
    """Raise ConfigurationError, on all ranks alike, unless all have the same table, or none."""
    refused = [rank for rank, each in enumerate(readings) if each.problem]
    if refused:
        where = "" if len(refused) == len(readings) else f" (on {name_ranks(refused)})"
        raise ConfigurationError(f"{readings[refused[0]].problem}{where}")
    first = readings[0].digest
    others = [rank for rank, each in enumerate(readings) if each.digest != first]
    if others:
        raise ConfigurationError(
            f"{environment.TUNING} must name the same table on all ranks: rank 0 has "
            f"{_name(first)}, but not {name_ranks(others)}: {_name(readings[others[0]].digest)}"
        )


def _name(digest: str) -> str:
    return f"one with SHA-256 {digest[:12]}" if digest else "none"


def fit_table(table: Table | None, nodes: Sequence[int], transports: Sequence[str]) -> Tuning:
    """What a table says to ranks of this layout, over the transports that connect them.

    ``nodes``: the ranks of each node.
    """
    if table is None:
        return NO_TABLE
    own = tuple(sorted(nodes))
    fitting = [each for each in table.sections if each.nodes == own]
    if not fitting:
        layouts = sorted({each.nodes for each in table.sections})
        listed = " and for ".join(map(describe_layout, layouts)) or "nothing"
        return Tuning(
            f"{table.title} is not used: it is for {listed}, and here are {describe_layout(own)}"
        )
    ranges = {
        each.key: tuple(one for one in each.ranges if one.transport in (AUTO, *transports))
        for each in fitting
    }
    covered = [
        f"{collective} of {kind}, {device.upper()}" for collective, kind, device in sorted(ranges)
    ]
    lost = {one.transport for each in fitting for one in each.ranges} - {AUTO, *transports}
    absent = f"; without its ranges over {' and '.join(sorted(lost))}: not possible here"
    text = f"{table.title} is used for {'; '.join(covered)}{absent if lost else ''}"
    return Tuning(text, ranges, table.title)


def describe_layout(nodes: Sequence[int]) -> str:
    """The ranks of each node in words."""
    ranks, count = count_noun(sum(nodes), "rank"), count_noun(len(nodes), "node")
    if len(set(nodes)) == 1:
        return f"{ranks} on {count}"
    return f"{ranks} on {count} ({', '.join(map(str, nodes))})"
