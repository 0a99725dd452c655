"""What a measurement begins and ends with: its machine, its heading, its files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.judge.targets import Target
from benchmarks.records.collectives import write_tables
from benchmarks.records.environment import DescribedLauncher, describe_environment, describe_heading
from benchmarks.records.options import RunOptions
from benchmarks.records.schema import RecordWriter, open_record
from benchmarks.show.pictures import write_picture
from mpiddp.options.outputs import PICTURE, RECORD, find, find_one
from mpiddp.wording import print_text


@dataclass(frozen=True)
class Output:
    """Where a measurement goes: `open_output` makes one."""

    record: RecordWriter
    """Its cells, as they are finished."""
    environment: Mapping[str, Any]
    heading: str
    """The environment in a line, as printed."""

    def show(self, *parts: str, targets: Sequence[Target] = ()) -> None:
        """Print what is not empty of the parts and of the targets, which the record gets, too."""
        if targets:
            self.record.write("targets", targets=[target.describe() for target in targets])
        verdicts = "\n".join(f"target: {target}" for target in targets)
        text = "\n\n".join(filter(None, [*parts, verdicts]))
        if text:
            print_text(text)


@contextmanager
def open_output(
    benchmark: str, options: RunOptions[Any], launcher: DescribedLauncher, more: str = ""
) -> Iterator[Output]:
    """Print the heading and open the record; at the end, also by an error, write the tables
    and the pictures."""
    environment = describe_environment(launcher)
    heading = describe_heading(environment)
    print_text(f"{heading}; load {os.getloadavg()[0]:.1f}\n{more}")
    hidden = [] if options.hosts else find_hosts(launcher)
    if options.hosts:
        ranks = options.plan.ranks
        counts = (ranks,) if isinstance(ranks, int) else ranks
        environment["hosts"] = {str(count): launcher.place(count) for count in counts}
    plan = describe_plan(options.plan)
    path = find_one(options.output, RECORD)
    with open_record(path, benchmark, environment, plan, hidden) as record:
        try:
            yield Output(record, environment, heading)
        finally:
            write_tables(record.cells, options.output)
            for picture in find(options.output, PICTURE):
                write_picture(picture, record.cells, heading)


@contextmanager
def open_model(benchmark: str, options: Any) -> Iterator[RecordWriter]:
    """The record of a command that starts no ranks, if its option ``output`` names one."""
    path = find_one(options.output, RECORD)
    environment = describe_environment(None) if path is not None else {}
    with open_record(path, benchmark, environment, describe_plan(options)) as record:
        yield record


def describe_plan(plan: Any) -> dict[str, Any]:
    """The fields of a dataclass, as JSON can hold them."""
    return {each.name: _describe_value(getattr(plan, each.name)) for each in fields(plan)}


def _describe_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_describe_value, value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def find_hosts(launcher: DescribedLauncher) -> list[str]:
    """The names of all hosts that an error may name."""
    own = socket.gethostname()
    return sorted({own, own.partition(".")[0], *launcher.list_hosts()} - {"localhost"})
