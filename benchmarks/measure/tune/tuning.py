"""``python -m benchmarks tune``: measures which algorithms are fastest, and writes that down.

First all algorithms are measured in a few rounds, to find at each size those that may be the
fastest. These and today's choice are then measured anew, in as many rounds as asked for. That
alone decides: what looked fast by chance does not do so twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from benchmarks.judge.choosing import (
    FINALISTS,
    RULE,
    SizeChoice,
    Way,
    choose,
    list_finalists,
    list_ranges,
)
from benchmarks.measure.checks import check_run
from benchmarks.measure.collectives.measurement import measure
from benchmarks.measure.collectives.options import ALL, CollectivesPlan, complete
from benchmarks.measure.engine import CellGroup, list_wrong, record_group
from benchmarks.measure.launching.srun import Launcher
from benchmarks.measure.trials import WrongResultError
from benchmarks.measure.tune import nccl
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.options import (
    RunOptions,
    describe_interval,
    describe_seconds,
    make_reader,
    make_run,
)
from benchmarks.records.schema import Cell, Record, read_record
from benchmarks.show.results import open_output
from benchmarks.show.tables import format_table
from mpiddp import environment
from mpiddp.collectives import AUTO, MPI
from mpiddp.collectives.tuning import NO_TABLE, Section, describe_layout, write_table
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import RECORD, TABLE, Kind, Outputs, check_outputs, find, writes
from mpiddp.wording import describe_size, print_text

NEAR = 1.05
"""Of the fastest one's time: what counts as near it."""
SCREENING_ROUNDS = 3
ROUNDS = 15
"""Of the second measurement, if --repetitions says nothing."""
FEWEST_ROUNDS = 6
"""Fewer have no interval of 95 %."""
MADE = ("date", "packages", "commit", "launcher", "mpi_library", "processor", "cores", "kernel")
"""What a table keeps of the environment that it was made in."""


TUNING = Kind("tuning table", (".json",))
NCCL = Kind("NCCL's tuner plugin", (".conf",))


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is read, and what is written."""

    records: Annotated[tuple[Path, ...], Argument("RECORD", is_positional=True)] = ()
    """Records, in place of a measurement: of auto beside other algorithms."""

    output: Annotated[Outputs, writes(TUNING, NCCL, RECORD, TABLE)] = ()
    """Write what was chosen, for --tuning or MPIDDP_TUNING, or for NCCL's example tuner plugin, or
    what was measured."""

    collectives: Annotated[tuple[str, ...], Argument(choices=tuple(sorted(COLLECTIVES)))] = (
        "all-reduce",
    )
    """Those that are measured."""


OWN = frozenset(TuneOptions.__dataclass_fields__)
READER = make_reader(
    command="tune",
    description="Find the fastest algorithm by size, and write a table that auto follows.",
    groups={"the table": TuneOptions, "what is measured": CollectivesPlan, "the run": RunOptions},
    epilog="By default all algorithms are measured, over mpiddp's usual transport and over MPI.",
    without=("quantity", "probes", "rivals", "operators", "cold", "busy", "overlap", "guidelines",
             "budget", "link", "targets"),
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    values = READER.read(arguments)
    options = pick(TuneOptions, values)
    check_outputs(options.output, inputs=options.records)
    if options.records:
        choose_by_records(values, options)
        return
    runs = read_runs(values, options)
    launcher = check_run(runs[0], runs[0].plan.ranks)
    groups: list[CellGroup] = []
    with open_output("tune", runs[0], launcher) as output:
        try:
            for run in runs:
                for ranks in run.plan.ranks:
                    plan = replace(run.plan, ranks=(ranks,))
                    finalists, screened = find_finalists(plan, launcher)
                    groups += screened
                    for group in measure(finalists, launcher):
                        tell(group, "measured")
                        record_group(output.record, group)
                        groups.append(group)
        finally:
            # Whatever was measured before an interruption or an error.
            if output.record.cells:
                print_text()
                finish_table([output.record.cells], output.environment, options)
    if wrong := list_wrong(groups):
        raise WrongResultError(f"wrong results: {'; '.join(wrong)}")


def choose_by_records(values: Mapping[str, Any], options: TuneOptions) -> None:
    """Without measuring. Raises ConfigurationError for options that are for that."""
    refused = [
        *(f"--{name.replace('_', '-')}" for name in values if name not in OWN),
        *(f"--output {each}" for each in options.output if each.kind in (RECORD, TABLE)),
    ]
    if refused:
        raise ConfigurationError(
            f"{refused[0]} is for a measurement, and a RECORD takes its place: leave out one of "
            "them"
        )
    read = list(map(read_record, options.records))
    if options.output:
        refuse_tuned(read)
    finish_table([each.cells for each in read], read[-1].environment, options)


def refuse_tuned(records: Iterable[Record]) -> None:
    """Raise ConfigurationError if a tuning table was in use while one of them was measured."""
    for record in records:
        described = [each["collectives"] for each in record.others if "collectives" in each]
        if {each.get("tuning", NO_TABLE.text) for each in described} - {NO_TABLE.text}:
            raise ConfigurationError(
                f"{record.path} was measured with a tuning table, so auto did not follow its rule, "
                "which is what others are measured beside: measure without "
                f"{environment.TUNING}"
            )


def read_runs(values: Mapping[str, Any], options: TuneOptions) -> list[RunOptions[CollectivesPlan]]:
    """A run for each collective. Raises ConfigurationError."""
    if os.environ.get(environment.TUNING):
        raise ConfigurationError(
            f"{environment.TUNING} is set, and what auto chooses by a table is not its rule, which "
            "is what others are measured beside: unset it"
        )
    defaults = {"algorithms": (ALL,), "transports": (AUTO, MPI), "repetitions": ROUNDS}
    run = make_run({**defaults, **values}, CollectivesPlan)
    if run.plan.repetitions < FEWEST_ROUNDS:
        raise ConfigurationError(
            f"--repetitions: expected {FEWEST_ROUNDS} or more, since fewer rounds have no interval "
            f"of 95 %, found {run.plan.repetitions}"
        )
    plan = replace(
        run.plan,
        rivals=False,
        algorithms=(AUTO, *run.plan.algorithms),
        transports=tuple(dict.fromkeys((AUTO, *run.plan.transports))),
    )
    run = replace(run, plan=plan)
    return [replace(run, plan=complete(each, run)) for each in options.collectives]


def find_finalists(
    plan: CollectivesPlan, launcher: Launcher
) -> tuple[CollectivesPlan, Sequence[CellGroup]]:
    """Screen all algorithms in a few rounds, if they are many.

    Returns the plan for the final rounds, of the fastest, and what was measured.
    """
    if (len(plan.algorithms) - 1) * len(plan.transports) <= FINALISTS:
        return plan, ()
    groups = []
    for group in measure(replace(plan, repetitions=SCREENING_ROUNDS), launcher):
        tell(group, "screened")
        groups.append(group)
    ways = list_finalists(cell for group in groups for cell in group.cells)
    finalists = replace(
        plan,
        algorithms=tuple(dict.fromkeys([AUTO, *(each.algorithm for each in ways)])),
        transports=tuple(dict.fromkeys([AUTO, *(each.transport for each in ways)])),
    )
    return finalists, groups


def tell(group: CellGroup, what: str) -> None:
    """A line for a size that is finished."""
    for cell in group.cells[:1]:
        size = f"{describe_size(cell.bytes)} of {cell.at['type']}"
        # The bar, if there is one, stays below.
        with tqdm.external_write_mode():
            print_text(f"{what}: {cell.quantity} on {cell.ranks} ranks, {size}")


def finish_table(
    groups: Sequence[Iterable[Cell]], described: Mapping[str, Any], options: TuneOptions
) -> None:
    """Choose, print what was found, and write it."""
    verdicts, left_out = choose(groups)
    parts = [format_section(section, found) for section, found in verdicts.items()]
    print_text("\n\n".join([*parts, describe_share(chain.from_iterable(verdicts.values()))]))
    for text in left_out:
        print_text(f"Left out: {text}.")
    for path in find(options.output, TUNING):
        sections = [replace(one, ranges=list_ranges(found)) for one, found in verdicts.items()]
        write_table(path, {name: described.get(name) for name in MADE}, sections)
        print_text(f"Written: {path}; used by --tuning {path}, or {environment.TUNING}={path}.")
    for path in find(options.output, NCCL):
        lacking = nccl.write_csv(path, verdicts)
        print_text(f"Written: {path}.")
        for text in lacking:
            print_text(f"NCCL has no such algorithm: {text}.")


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TuneRow:
    """A size in one kind of buffer."""

    verdict: SizeChoice
    buffer: str

    @property
    def best(self) -> Way:
        return self.verdict.find_fastest(self.buffer)

    def find_seconds(self, way: Way) -> float:
        return self.verdict.timings[self.buffer][way].seconds

    def describe_time(self, way: Way) -> str:
        return describe_seconds(self.find_seconds(way))

    def describe_gain(self) -> str:
        """Empty if nothing else was chosen than what auto runs today."""
        if self.verdict.chosen == RULE:
            return ""
        ratio = self.verdict.timings[self.buffer][self.verdict.chosen].ratio.turned
        return f"{ratio.estimate:.2f} × ({describe_interval(ratio.interval, '{:.2f}'.format)})"

    def is_near(self, way: Way) -> bool:
        """Whether it is as quick as the best, or near."""
        return self.find_seconds(way) <= NEAR * self.find_seconds(self.best)


COLUMNS: Sequence[tuple[str, Callable[[TuneRow], str]]] = (
    ("size", lambda row: describe_size(row.verdict.bytes)),
    ("buffer", lambda row: row.buffer),
    ("auto runs", lambda row: row.verdict.rule),
    ("time", lambda row: row.describe_time(RULE)),
    ("best", lambda row: str(row.best)),
    ("time", lambda row: row.describe_time(row.best)),
    ("chosen", lambda row: "the same" if not row.describe_gain() else str(row.verdict.chosen)),
    ("time", lambda row: row.describe_time(row.verdict.chosen)),
    ("gain", TuneRow.describe_gain),
)


def list_rows(verdicts: Iterable[SizeChoice]) -> list[TuneRow]:
    return [TuneRow(verdict, buffer) for verdict in verdicts for buffer in verdict.timings]


def format_section(section: Section, verdicts: Sequence[SizeChoice]) -> str:
    """A table: a row for each size and kind of buffer."""
    title = (
        f"{section.collective} of {section.type}, {describe_layout(section.nodes)}, "
        f"{section.device.upper()}"
    )
    return f"{title}\n{format_table(list_rows(verdicts), COLUMNS)}"


def describe_share(verdicts: Iterable[SizeChoice]) -> str:
    """How often what auto ran and what was chosen are near the fastest."""
    rows = list_rows(verdicts)
    todays = sum(row.is_near(RULE) for row in rows)
    chosen = sum(row.is_near(row.verdict.chosen) for row in rows)
    return (
        f"Within {100 * (NEAR - 1):.0f} % of the best: auto in {todays} of {len(rows)} cells, what "
        f"was chosen in {chosen}."
    )
