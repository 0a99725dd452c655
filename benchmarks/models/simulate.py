"""``python -m benchmarks simulate``: what each algorithm takes on a machine that you describe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from benchmarks.common import machines, results
from benchmarks.common.checks import check_outputs
from benchmarks.common.options import (
    Algorithms,
    Count,
    File,
    Load,
    Sizes,
    describe_algorithms,
    describe_seconds,
    describe_size,
    list_algorithms,
    make_reader,
)
from benchmarks.common.plotting import (
    Line,
    choose_names,
    draw_line,
    finish_sizes,
    label_lines,
    list_scores,
    note_left_out,
    open_figure,
)
from benchmarks.common.records import RecordWriter, make_cell
from benchmarks.common.statistics import summarize
from benchmarks.common.trials import show_progress
from benchmarks.fit.fitted import COMMAND, NETWORK, Fit, describe_fit, read_fit
from benchmarks.models import disturbed, winners
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, list_fields, pick
from mpiddp.schedules.cost import Bounds, bound, check_nodes
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice, Price

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTITY = "predicted all-reduce"
RANKS = (8, 64, 1024, 65536)
MOST_RANKS = 1 << 24
SIZES = (1 << 10, 1 << 20, 1 << 28)
PLOTTED_SIZES = tuple(1 << exponent for exponent in range(10, 29, 2))


@dataclass(frozen=True, kw_only=True)
class Options(machines.MachineOptions):
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
    """Buffers; K, M, G are 2^10, 2^20, 2^30 (default: 1K 1M 256M; with --plot 1K to 256M)."""
    fit: File = None
    """A machine as fit --output wrote it, in place of latencies and bandwidths."""
    map: bool = False
    """Show which algorithm is quickest, and the sizes at which that changes (default: for 2 to
    65536 ranks, 1K to 1G, algorithms that leave no rank out)."""
    straggler: disturbed.Stragglers = ()
    """A rank that begins so late, as in 3:5ms, or that takes so many times as long, as in 3:x2."""
    slow_link: disturbed.SlowLinks = ()
    """Two nodes between which messages take so many times as long, as in 0-3:x4."""
    json: File = None
    """Write all prices."""
    plot: File = None
    """Draw time over lower bound against size, or the map (.svg, .png, .pdf)."""

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
        return self.bytes or (PLOTTED_SIZES if self.plot else SIZES)

    @property
    def disturbances(self) -> tuple[disturbed.Straggler | disturbed.SlowLink, ...]:
        return (*self.straggler, *self.slow_link)

    @cached_property
    def fitted(self) -> Fit | None:
        return None if self.fit is None else read_fit(self.fit)

    def find_machine(self, nodes: Sequence[int]) -> Machine:
        """The machine for nodes of so many ranks."""
        if self.fitted is not None:
            if NETWORK not in self.fitted.links and len(nodes) > 1:
                raise ConfigurationError(
                    "the fit has no messages between nodes: measure them, too "
                    f"({COMMAND}), or put all on one (--ranks-per-node {sum(nodes)})"
                )
            return self.fitted.make_machine(nodes, machines.read_shared(self))
        return machines.read_machine(self, several=self.ranks_per_node > 1)

    def nodes(self, ranks: int) -> tuple[int, ...]:
        """The ranks of each node."""
        rest = ranks % self.ranks_per_node
        return (self.ranks_per_node,) * (ranks // self.ranks_per_node) + ((rest,) if rest else ())


@dataclass(frozen=True)
class Row:
    name: str
    prices: tuple[Price, ...] | None
    """For each size; None where it can neither be simulated nor has a closed form."""
    obstacle: str = ""


@dataclass(frozen=True)
class Table:
    ranks: int
    nodes: int
    rows: tuple[Row, ...]
    bounds: tuple[Bounds, ...]

    @property
    def title(self) -> str:
        return machines.describe_place(self.ranks, self.nodes)


READER = make_reader(
    command="simulate",
    description="Price all-reduce algorithms on a machine with given latencies and bandwidths: "
    f"step by step up to {LARGEST_SIMULATED} ranks, by a formula beyond, which is marked.",
    groups={"options": Options},
    epilog=describe_algorithms("ring:segments=4"),
)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    check_outputs(options.json, plot=options.plot, inputs=(options.fit,))
    if options.plot is not None and (len(options.sizes) < 2 or max(options.ranks) < 2):
        raise ConfigurationError("--plot needs two sizes at least, and two ranks")
    with results.open_model("simulate", options) as record:
        machine = options.find_machine(options.nodes(max(options.ranks)))
        seconds = {**asdict(machine), "uplink": machine.uplink}
        record.write("machine", text=_describe_machine(options), **seconds)
        if options.map:
            show_map(options, record)
        elif options.disturbances:
            show_disturbed(options, record)
        else:
            show_prices(options, record)


def parse(arguments: Sequence[str]) -> Options:
    """Raises ConfigurationError for what does not go together."""
    values = READER.read(arguments)
    if values.get("fit") is not None:
        for field in list_fields(machines.MachineOptions):
            if field.name in values and field.name != "node_bandwidth":
                raise ConfigurationError(f"{field.flag}: the machine is that of --fit already")
    is_disturbed = values.get("straggler") or values.get("slow_link")
    if is_disturbed and values.get("map"):
        raise ConfigurationError("--map is of a machine on which nothing is late or slow")
    if is_disturbed and values.get("plot") is not None:
        raise ConfigurationError("--plot draws no stragglers and slow links: --json writes them")
    most = LARGEST_SIMULATED if is_disturbed else MOST_RANKS
    if max(values.get("ranks", (1,))) > most:
        raise ConfigurationError(
            f"--straggler and --slow-link are simulated step by step, for up to {most} ranks"
        )
    usual = winners.RANKS if values.get("map") else tuple(n for n in RANKS if n <= most)
    return pick(Options, {"ranks": usual, **values})


def show_prices(options: Options, record: RecordWriter) -> None:
    """Print the tables, and draw them if asked to."""
    tables = price_all(options)
    for table in tables:
        record_table(record, table, options.sizes)
    machine = _describe_machine(options)
    print(*describe(machine, options.sizes, options.shown, tables), sep="\n")
    if options.plot is not None:
        draw(options.plot, options.sizes, tables, machine)


def show_map(options: Options, record: RecordWriter) -> None:
    """As ``show_prices``, of who is quickest."""
    places = [options.nodes(ranks) for ranks in sorted(options.ranks)]
    rows = winners.make_map(options.choices, places, options.sizes, options.find_machine)
    machine = _describe_machine(options)
    print(machine, *winners.describe_map(rows, options.sizes), sep="\n")
    if options.plot is not None:
        winners.draw_map(options.plot, rows, machine)
    for row in rows:
        record.write("winners", **asdict(row))


def show_disturbed(options: Options, record: RecordWriter) -> None:
    """As ``show_prices``, with stragglers and slow links."""
    disturbance = disturbed.make_disturbance(options.straggler, options.slow_link)
    named = " and ".join(map(str, options.disturbances))
    print(_describe_machine(options))
    print(f"time with {named}; in brackets, what that costs")
    tables = []
    with show_progress(len(options.ranks) * len(options.choices), "simulate") as bar:
        for ranks in options.ranks:
            nodes, rows = options.nodes(ranks), []
            disturbance.check(ranks, len(nodes))
            for choice in options.choices:
                machine = options.find_machine(nodes)
                rows.append(disturbed.time_both(choice, nodes, options.sizes, machine, disturbance))
                bar.update()
            tables.append((machines.describe_place(ranks, len(nodes)), rows))
            record_disturbed(record, named, nodes, options.sizes, rows)
    for title, rows in tables:
        print("", title, *disturbed.describe_times(rows, options.sizes), sep="\n")


def price_all(options: Options) -> list[Table]:
    total = len(options.ranks) * len(options.choices)
    with show_progress(total, "price") as bar:
        tables = []
        for ranks in options.ranks:
            nodes = check_nodes(ranks, options.nodes(ranks))
            rows = []
            for choice in options.choices:
                rows.append(_price(choice, nodes, options))
                bar.update()
            machine = options.find_machine(nodes)
            bounds = [bound(count, machine, nodes) for count in options.sizes]
            tables.append(Table(ranks, len(nodes), tuple(rows), tuple(bounds)))
    if not any(row.prices for table in tables for row in table.rows):
        raise ConfigurationError(tables[0].rows[0].obstacle)
    return tables


def _price(choice: Choice, nodes: tuple[int, ...], options: Options) -> Row:
    try:
        prices = choice.prices(options.sizes, options.find_machine(nodes), nodes)
        return Row(str(choice), tuple(prices))
    except ConfigurationError as error:
        return Row(str(choice), None, str(error))


def _describe_machine(options: Options) -> str:
    several = options.ranks_per_node > 1
    if options.fitted is not None:
        figures = describe_fit(options.fitted)
    else:
        machine = options.find_machine(options.nodes(2 * options.ranks_per_node))
        figures = machines.describe_machine(machine, several=several)
    return figures + (f", {options.ranks_per_node} ranks on each node" if several else "")


def record_table(record: RecordWriter, table: Table, sizes: Sequence[int]) -> None:
    """A cell for each price, with the steps and the lower bound, in seconds."""
    for row in table.rows:
        if row.prices is None:
            record.refuse(QUANTITY, row.name, row.obstacle, ranks=table.ranks)
        for size, price, least in zip(sizes, row.prices or (), table.bounds, strict=False):
            details = {
                "source": price.source, "steps": count_steps(price), "bound": least.seconds,
            }  # fmt: skip
            cell = make_cell(
                [price.seconds], quantity=QUANTITY, contender=row.name, ranks=table.ranks,
                nodes=table.nodes, at={"bytes": size, "type": "float32"}, details=details,
            )  # fmt: skip
            record.add(cell)


def record_disturbed(
    record: RecordWriter,
    named: str,
    nodes: Sequence[int],
    sizes: Sequence[int],
    rows: Sequence[disturbed.Times],
) -> None:
    """A cell for each time with the disturbance, and the time without it."""
    for row in rows:
        for size, seconds, alone in zip(sizes, row.disturbed, row.alone, strict=True):
            at = {"bytes": size, "type": "float32", "disturbance": named}
            cell = make_cell(
                [seconds], quantity=QUANTITY, contender=row.name, ranks=sum(nodes),
                nodes=len(nodes), at=at, details={"undisturbed": alone},
            )  # fmt: skip
            record.add(cell)


def get_ratio(price: Price, least: Bounds) -> float | None:
    """How many times the lower bound; None where that is nothing."""
    return price.seconds / least.seconds if least.seconds else None


def describe(
    machine: str, sizes: Sequence[int], shown: Sequence[int], tables: Sequence[Table]
) -> Iterator[str]:
    """The tables of the ``shown`` sizes: seconds, and in brackets times the lower bound."""
    yield machine
    yield "time; in brackets, how many times the lower bound of summing over all ranks that is"
    width = max(len(row.name) for table in tables for row in table.rows) + 2
    places = [sizes.index(count) for count in shown]
    for table in tables:
        yield ""
        yield table.title
        heads = "".join(f"{describe_size(count):>13}{'':10}" for count in shown)
        yield f"{'algorithm':<{width}}{'steps':>7}{heads}".rstrip()
        for row in table.rows:
            yield _describe_row(row, table, width, places)
        least = [describe_seconds(table.bounds[place].seconds) for place in places]
        floor = "".join(f"{text:>13}{'':10}" for text in least)
        yield f"{'lower bound':<{width}}{'':7}{floor}".rstrip()
    obstacles = [row.obstacle for table in tables for row in table.rows if row.obstacle]
    if obstacles:
        yield from ("", "— could not be priced:", *(f"  {text}" for text in obstacles))
    if any(row.prices and row.prices[0].source != "simulated" for t in tables for row in t.rows):
        yield (
            "~ is the algorithm's closed form, for chunks of equal size; "
            "all else is simulated step by step"
        )


def _describe_row(row: Row, table: Table, width: int, places: Sequence[int]) -> str:
    if row.prices is None:
        return f"{row.name:<{width}}{'':>7}{'—':>13}"
    cells = [_describe_price(row.prices[place], table.bounds[place]) for place in places]
    steps = count_steps(row.prices[0])
    return f"{row.name:<{width}}{steps:>7,}{''.join(cells)}".rstrip()


def count_steps(price: Price) -> int:
    """Of the simulation, or else of the formula."""
    if price.simulation is not None:
        return len(price.simulation.steps)
    return price.form.steps if price.form is not None else 0


def _describe_price(price: Price, least: Bounds) -> str:
    mark = "" if price.source == "simulated" else "~"
    ratio = get_ratio(price, least)
    if ratio is None:
        return f"{mark}{describe_seconds(price.seconds)}".rjust(13) + " " * 10
    share = f" ({ratio:,.0f})" if ratio >= 100 else f" ({ratio:.3g})"
    return f"{mark}{describe_seconds(price.seconds)}".rjust(13) + share.ljust(10)


def draw(path: Path, sizes: Sequence[int], tables: Sequence[Table], note: str) -> None:
    """A panel for each number of ranks; of all algorithms those that are best on the whole."""
    columns = min(2, len(tables))
    rows = -(-len(tables) // columns)
    priced = {
        (row.name, (place, size)): price.seconds
        for place, table in enumerate(tables)
        for row in table.rows
        for size, price in zip(sizes, row.prices or (), strict=False)
    }
    shown, left_out = choose_names(list_scores(priced))
    note = note_left_out(left_out, "algorithm", note)
    title = "All-reduce on a modelled machine: how many times the lower bound it takes"
    with open_figure(path, 7 * columns, 4.2 * rows + 0.8, title, note) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        panels = {}
        for axis, table in zip(grid.flat, tables, strict=False):
            panels[axis] = list(_list_curves(sizes, table, shown))
            _draw_panel(axis, sizes, table, panels[axis])
        for axis in list(grid.flat)[len(tables) :]:
            axis.set_visible(False)
        label_lines(figure, panels)


def _list_curves(sizes: Sequence[int], table: Table, shown: Sequence[str]) -> Iterator[Line]:
    for row in table.rows:
        if row.prices is not None and row.name in shown and table.ranks > 1:
            ratios = [
                get_ratio(price, least) or math.nan
                for price, least in zip(row.prices, table.bounds, strict=True)
            ]
            values = [summarize([ratio]) for ratio in ratios]
            yield Line(row.name, sizes, values, shown.index(row.name))


def _draw_panel(axis: Axes, sizes: Sequence[int], table: Table, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import LogLocator

    sources = {row.prices[0].source for row in table.rows if row.prices}
    axis.set_title(f"{table.title}, {' and '.join(sorted(sources))}", loc="left", fontsize=10)
    axis.axhline(1, color="#bbbbbb", lw=3)
    for line in lines:
        draw_line(axis, line, has_band=False)
    axis.set_yscale("log")
    axis.set_ylabel("times the lower bound", fontsize=9)
    finish_sizes(axis, sizes[::2], "buffer of each rank")
    axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:,.10g} ×")
    axis.set_xlim(sizes[0], sizes[-1])
    axis.set_ylim(bottom=0.9)
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
