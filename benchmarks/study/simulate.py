"""``python -m benchmarks simulate``: what each algorithm takes on a machine that you describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from benchmarks.judge.fit.fitted import Fit, describe_fit, read_fit
from benchmarks.records import machines
from benchmarks.records.options import (
    Algorithms,
    Count,
    File,
    Load,
    Sizes,
    list_algorithms,
    make_model_reader,
)
from benchmarks.records.schema import RecordWriter
from benchmarks.show import results
from benchmarks.study import fastest as winners
from benchmarks.study import prices
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, list_fields, pick
from mpiddp.options.outputs import PICTURE, RECORD, Outputs, check_outputs, find, writes
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice
from mpiddp.wording import print_text

RANKS = (8, 64, 1024, 65536)
MOST_RANKS = 1 << 24
SIZES = (1 << 10, 1 << 20, 1 << 28)
PLOTTED_SIZES = tuple(1 << exponent for exponent in range(10, 30, 2))


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(machines.MachineOptions):
    """What is priced, and on which machine."""

    algorithms: Algorithms = ()
    """(default: all)"""
    load: Load = ()
    """Algorithms of your own: Python files or plans."""
    ranks: Annotated[tuple[int, ...], Argument("N", at_least(1, MOST_RANKS))] = RANKS
    """Numbers of ranks."""
    ranks_per_node: Count = 1
    """Ranks that share a node and its link."""
    bytes: Sizes = ()
    """Buffers; K, M, G are 2^10, 2^20, 2^30 (default: 1K 1M 256M; in a picture 1K to 256M)."""
    fit: File = None
    """A machine as fit wrote it, in place of latencies and bandwidths."""
    map: bool = False
    """Show which algorithm is quickest, and the sizes at which that changes (default: for 2 to
    65536 ranks, 1K to 1G, algorithms that leave no rank out)."""
    output: Annotated[Outputs, writes(RECORD, PICTURE)] = ()
    """Write all prices, or draw time over lower bound against size, or the map."""

    @property
    def pictures(self) -> list[Path]:
        return find(self.output, PICTURE)

    @property
    def choices(self) -> tuple[Choice, ...]:
        everyone = list_algorithms()
        if self.map:
            everyone = tuple(choice for choice in everyone if winners.leaves_nobody_out(choice))
        return self.algorithms or everyone

    @property
    def shown(self) -> tuple[int, ...]:
        """The sizes in the table; a plot has more."""
        return self.bytes or SIZES

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.map:
            return tuple(sorted(self.bytes)) or winners.SIZES
        return self.bytes or (PLOTTED_SIZES if self.pictures else SIZES)

    @cached_property
    def fitted(self) -> Fit | None:
        return None if self.fit is None else read_fit(self.fit)

    def find_machine(self, nodes: Sequence[int]) -> Machine:
        """The machine for nodes of so many ranks."""
        if self.fitted is not None:
            return self.fitted.make_machine(nodes, machines.read_shared(self))
        return machines.read_machine(self, several=self.ranks_per_node > 1)

    def nodes(self, ranks: int) -> prices.Place:
        """The ranks of each node."""
        rest = ranks % self.ranks_per_node
        return (self.ranks_per_node,) * (ranks // self.ranks_per_node) + ((rest,) if rest else ())

    @property
    def question(self) -> prices.Question:
        places = list(map(self.nodes, sorted(self.ranks) if self.map else self.ranks))
        return prices.Question(self.choices, places, self.sizes, self.find_machine)

    def describe_machine(self) -> str:
        several = self.ranks_per_node > 1
        if self.fitted is not None:
            figures = describe_fit(self.fitted)
        else:
            machine = self.find_machine(self.nodes(2 * self.ranks_per_node))
            figures = machines.describe_machine(machine, several=several)
        return figures + (f", {self.ranks_per_node} ranks on each node" if several else "")


READER = make_model_reader(
    "simulate",
    "Price all-reduce algorithms on a machine with given latencies and bandwidths: "
    f"step by step up to {LARGEST_SIMULATED} ranks, by a formula beyond, which is marked.",
    SimulateOptions,
    "ring:segments=4",
)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    check_outputs(options.output, inputs=(options.fit,))
    if options.pictures and (len(options.sizes) < 2 or max(options.ranks) < 2):
        raise ConfigurationError("a picture needs two sizes at least, and two ranks")
    with results.open_model("simulate", options) as record:
        machine = options.find_machine(options.nodes(max(options.ranks)))
        text, seconds = options.describe_machine(), asdict(machine)
        record.write("machine", text=text, **seconds, uplink=machine.uplink)
        if options.map:
            _show_map(options, record, text)
        else:
            _show_prices(options, record, text)


def parse(arguments: Sequence[str]) -> SimulateOptions:
    """Raises ConfigurationError for what does not go together."""
    values = READER.read(arguments)
    if values.get("fit") is not None:
        for field in list_fields(machines.MachineOptions):
            if field.name in values and field.name != "node_bandwidth":
                raise ConfigurationError(f"{field.flag}: the machine is that of --fit already")
    usual = winners.RANKS if values.get("map") else RANKS
    return pick(SimulateOptions, {"ranks": usual, **values})


def _show_prices(options: SimulateOptions, record: RecordWriter, machine: str) -> None:
    tables = prices.price_all(options.question)
    for table in tables:
        prices.record_table(record, table, options.sizes)
    print_text(machine, *prices.describe(options.sizes, options.shown, tables))
    for path in options.pictures:
        prices.draw_prices(path, options.sizes, tables, machine)


def _show_map(options: SimulateOptions, record: RecordWriter, machine: str) -> None:
    rows = winners.make_map(options.question)
    print_text(machine, *winners.describe_map(rows, options.sizes))
    for path in options.pictures:
        winners.draw_map(path, rows, machine)
    for row in rows:
        record.write("winners", **asdict(row))
