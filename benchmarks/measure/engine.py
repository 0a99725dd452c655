"""The engine of the commands that measure: from the words of one to its record, table and targets.

A `Quantity` says what is measured. How its contenders are started and take turns is in `trials` and
``launching/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.checks import check_run
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.srun import Launcher
from benchmarks.measure.trials import WRONG, Refusal, Surroundings, WrongResultError
from benchmarks.records.options import RunOptions, make_reader, make_run
from benchmarks.records.schema import Cell, Coordinate, RecordWriter
from benchmarks.show.results import open_output
from mpiddp.errors import ConfigurationError
from mpiddp.wording import print_text


@dataclass(frozen=True)
class Sample:
    """One value of a cell that takes long: it is in the record if the command is killed."""

    quantity: str
    contender: str
    value: float
    at: Mapping[str, Coordinate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CellGroup(Surroundings):
    """What was measured in turns: cells, what was left out, and what holds for all of it."""

    cells: Sequence[Cell] = ()
    refusals: Sequence[Refusal] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """A line of the record; no line if it is empty."""

    def find(self, contender: str, quantity: str = "", **at: Coordinate | None) -> Cell | None:
        """The first cell of a contender with such coordinates; None: without one of that name."""
        for cell in self.cells:
            is_here = all(cell.at.get(name) == value for name, value in at.items())
            if cell.contender == contender and quantity in ("", cell.quantity) and is_here:
                return cell
        return None

    def find_samples(
        self, contender: str, quantity: str = "", **at: Coordinate | None
    ) -> tuple[float, ...]:
        """Its values, round by round; empty if there is no such cell."""
        cell = self.find(contender, quantity, **at)
        return cell.samples if cell is not None else ()

    @cached_property
    def whole(self) -> list[Cell]:
        """The cells without those of parts and of other quantities than the first one's."""
        return [
            cell
            for cell in self.cells
            if cell.quantity == self.cells[0].quantity and "part" not in cell.at
        ]

    @cached_property
    def coefficient(self) -> float:
        """How alike neighbouring rounds are, in the ratios of contenders."""
        return find_common([[cell.samples for cell in self.whole]])

    def divide(self, contender: str, other: str) -> Ratio | None:
        """The time of one over that of the other, round by round; None if either was not timed."""
        mine, others = (self.find_samples(name, part=None) for name in (contender, other))
        return compare_rounds(others, mine, self.coefficient) if mine and others else None


def find_speeds(groups: Sequence[CellGroup], own: str, other: str) -> list[Ratio | None]:
    """In each, how many times as fast as ``other`` ``own`` is, round by round.

    None if either was not timed.
    """
    pairs = [(each.find_samples(own), each.find_samples(other)) for each in groups]
    coefficient = find_common(pair for pair in pairs if all(pair))
    return [
        compare_rounds(mine, others, coefficient) if mine and others else None
        for mine, others in pairs
    ]


class MeasuringPlan(Protocol):
    """What every plan has."""

    @property
    def ranks(self) -> int | tuple[int, ...]: ...


P = TypeVar("P", bound=MeasuringPlan)


@dataclass(frozen=True, kw_only=True)
class Quantity(Generic[P]):
    """What a command measures, and how that is read; `run` does the rest."""

    command: str
    description: str
    """What the command's help begins with."""
    plan: type[P]
    """The options of what is measured."""
    run: type[RunOptions[P]] = RunOptions
    """The options of where ranks are started and where the results go."""
    measure: Callable[[P, Any], Iterator[CellGroup | Sample]]
    """Of a plan and a launcher, from each group as it is finished to the last one."""
    tabulate: Callable[[Sequence[CellGroup], P], str]
    judge: Callable[[Sequence[CellGroup], P], Sequence[Target]] = lambda groups, plan: ()
    """The project's targets that the groups say something about."""
    complete: Callable[[RunOptions[P]], P] = lambda options: options.plan
    """The plan as it is measured; a ConfigurationError for one that cannot be."""
    explanation: str = ""
    """Printed before anything is measured."""
    epilog: str = ""
    """What the command's help ends with."""
    without: tuple[str, ...] = ()
    """Shared options that are none of it."""
    on_cluster: bool = False
    """Whether srun can start the ranks, too; else all of them are on this machine."""
    is_told_at_once: bool = False
    """Print a table of each group as soon as it is finished; else one table at the end."""

    def parse(self, arguments: Sequence[str]) -> RunOptions[P]:
        """Raises ConfigurationError."""
        reader = make_reader(
            command=self.command,
            description=self.description,
            groups={"what is measured": self.plan, "the run": self.run},
            epilog=self.epilog,
            without=self.without if self.on_cluster else (*self.without, "nodes"),
        )
        options = make_run(reader.read(arguments), self.plan)
        return replace(options, plan=self.complete(options))

    def find_launcher(self, options: RunOptions[P]) -> Launcher:
        """Refuse what cannot be measured. Raises LaunchError and ConfigurationError."""
        plan = options.plan
        ranks = (plan.ranks,) if isinstance(plan.ranks, int) else plan.ranks
        launcher = check_run(options, ranks, link=getattr(plan, "link", False))
        if not self.on_cluster and not isinstance(launcher, Mpirun):
            raise ConfigurationError(
                "--launcher: expected an mpirun, found srun: runs are on one node"
            )
        return launcher


def run(quantity: Quantity[P], arguments: Sequence[str]) -> None:
    """Measure, record, print and draw. Raises WrongResultError if a contender's results are wrong.

    Whatever was measured before an interruption or an error is printed, too.
    """
    options = quantity.parse(arguments)
    launcher, plan = quantity.find_launcher(options), options.plan
    groups: list[CellGroup] = []
    text = quantity.explanation and f"{quantity.explanation}\n"
    with open_output(quantity.command, options, launcher, text) as output:
        try:
            for item in quantity.measure(plan, launcher):
                if isinstance(item, Sample):
                    output.record.keep(item.quantity, item.contender, item.value, **item.at)
                    continue
                record_group(output.record, item)
                groups.append(item)
                if quantity.is_told_at_once:
                    print_text(f"{quantity.tabulate([item], plan)}\n")
        finally:
            targets = quantity.judge(groups, plan) if options.targets else ()
            is_due = groups and not quantity.is_told_at_once
            output.show(quantity.tabulate(groups, plan) if is_due else "", targets=targets)
    if wrong := list_wrong(groups):
        raise WrongResultError(f"wrong results: {'; '.join(wrong)}")


def list_wrong(groups: Iterable[CellGroup]) -> list[str]:
    """Which contenders compute something else, when first asked or in a later round, and what."""
    wrong = [str(each) for group in groups for each in group.refusals if each.kind == WRONG]
    for cell in (cell for group in groups for cell in group.cells):
        if count := cell.details.get("wrong"):
            wrong.append(f"{cell.name}: its result has {count} wrong elements")
    return wrong


def record_group(record: RecordWriter, group: CellGroup) -> None:
    for cell in group.cells:
        record.add(cell)
    for each in group.refusals:
        each.write(record)
    if group.facts:
        record.write("group", **group.facts)
