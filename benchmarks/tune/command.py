"""``python -m benchmarks tune``: measures which algorithms are fastest, and writes that down.

First all algorithms are measured in a few rounds, to find at each size those that may be the
fastest. These and today's choice are then measured anew, in as many rounds as asked for, and what
is chosen is decided by the second measurement alone: what looked fast by chance does not again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from benchmarks.collectives.measurement import measure
from benchmarks.collectives.options import ALL, RANKS_ON_CLUSTER, Plan, finish
from benchmarks.common import results
from benchmarks.common.checks import check_outputs, check_run
from benchmarks.common.options import File, RunOptions, make_reader, make_run
from benchmarks.common.records import Cell, Record, RecordWriter, open_record, read_record
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.srun import Srun
from benchmarks.tune import nccl, report
from benchmarks.tune.choosing import (
    COLLECTIVES,
    choose,
    list_finalists,
    list_ranges,
)
from mpiddp import environment
from mpiddp.collectives import AUTO, MPI
from mpiddp.collectives.tuning import NO_TABLE, write_table
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument, pick

SCREENING_ROUNDS = 3
ROUNDS = 15
"""Of the second measurement, if --repetitions says nothing."""
FEWEST_ROUNDS = 6
"""Fewer have no interval of 95 %."""
MADE = ("date", "packages", "commit", "launcher", "mpi_library", "processor", "cores", "kernel")
"""What a table keeps of the environment that it was made in."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is read, and what is written."""

    records: Annotated[tuple[Path, ...], Argument("RECORD", is_positional=True)] = ()
    """Files that --json wrote, in place of a measurement: of auto beside other algorithms."""

    output: File = None
    """Write the table, for --tuning or MPIDDP_TUNING."""

    nccl_csv: File = None
    """Write what NCCL has of it for NCCL's example tuner plugin."""

    collectives: Annotated[tuple[str, ...], Argument(choices=tuple(sorted(COLLECTIVES)))] = (
        "all-reduce",
    )
    """Those that are measured."""


READER = make_reader(
    command="tune",
    description="Find the fastest algorithm by size, and write a table that auto follows.",
    groups={"the table": TuneOptions, "what is measured": Plan, "the run": RunOptions},
    epilog="By default all algorithms are measured, over mpiddp's usual transport and over MPI.",
    without=("quantity", "operators", "cold", "busy", "overlap", "guidelines", "budget", "link",
             "targets", "plot"),
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    values = READER.read(arguments)
    options = pick(TuneOptions, values)
    check_outputs(options.output, options.nccl_csv)
    if options.records:
        refused = [name for name in values if name not in TuneOptions.__dataclass_fields__]
        if refused:
            raise ConfigurationError(
                f"--{refused[0].replace('_', '-')} is for a measurement, and a RECORD takes its "
                "place: leave out one of them"
            )
        read = [read_measured(path) for path in options.records]
        finish_table([each.cells for each in read], read[-1].environment, options)
        return
    if os.environ.get(environment.TUNING):
        raise ConfigurationError(
            f"{environment.TUNING} is set, and what auto chooses by a table is not its rule, which "
            "is what others are measured beside: unset it"
        )
    defaults = {"algorithms": (ALL,), "transports": (AUTO, MPI), "repetitions": ROUNDS}
    run = make_run({**defaults, **values}, Plan, RANKS_ON_CLUSTER)
    if run.plan.repetitions < FEWEST_ROUNDS:
        raise ConfigurationError(
            f"--repetitions: expected {FEWEST_ROUNDS} or more, since fewer rounds have no interval "
            f"of 95 %, found {run.plan.repetitions}"
        )
    launcher = check_run(run, run.plan.ranks)
    described, _ = results.begin(launcher)
    groups: list[Sequence[Cell]] = []
    try:
        with open_record(run.json, "tune", described, vars(run.plan)) as record:
            for collective in options.collectives:
                plan = finish(replace(run.plan, quantity=collective))
                for ranks in plan.ranks:
                    cells: list[Cell] = []
                    groups.append(cells)
                    measure_twice(ranks, launcher, plan, record, cells)
    finally:
        # After an interruption, of what there is.
        if any(groups):
            finish_table(groups, described, options)


def read_measured(path: Path) -> Record:
    """A record. Raises ConfigurationError if a tuning table was in use while it was measured."""
    record = read_record(path)
    tunings = [line["collectives"].get("tuning", NO_TABLE.text) for line in record.others
               if "collectives" in line]  # fmt: skip
    if set(tunings) - {NO_TABLE.text}:
        raise ConfigurationError(
            f"{path} was measured with a tuning table: what auto chose is not its rule, which is "
            f"what others are measured beside; measure without {environment.TUNING}"
        )
    return record


def measure_twice(
    ranks: int, launcher: Mpirun | Srun, plan: Plan, record: RecordWriter, cells: list[Cell]
) -> None:
    """Find out which ways may be the fastest, and measure these anew, into ``cells``."""
    first = replace(plan, repetitions=SCREENING_ROUNDS)
    screened = [each for each in measure(ranks, launcher, first) if isinstance(each, Cell)]
    ways = list_finalists(screened)
    second = replace(
        plan,
        algorithms=tuple(dict.fromkeys([AUTO, *(each.algorithm for each in ways)])),
        transports=tuple(dict.fromkeys([AUTO, *(each.transport for each in ways)])),
    )
    for item in measure(ranks, launcher, second):
        if isinstance(item, Cell):
            cells.append(item)
            record.add(item)


def finish_table(
    groups: Sequence[Iterable[Cell]], described: Mapping[str, Any], options: TuneOptions
) -> None:
    """Choose, print what was found, and write it."""
    verdicts, left_out = choose(groups)
    parts = [report.format_section(section, found) for section, found in verdicts.items()]
    print("\n\n".join([*parts, report.describe_share(verdicts)]))
    for text in left_out:
        print(f"Left out: {text}.")
    if options.output is not None:
        sections = [replace(one, ranges=list_ranges(found)) for one, found in verdicts.items()]
        write_table(options.output, {name: described.get(name) for name in MADE}, sections)
        print(
            f"Written: {options.output}; used by --tuning {options.output}, or "
            f"{environment.TUNING}={options.output}."
        )
    if options.nccl_csv is not None:
        lacking = nccl.write_csv(options.nccl_csv, verdicts)
        print(f"Written: {options.nccl_csv}.")
        for text in lacking:
            print(f"NCCL has no such algorithm: {text}.")
