"""``python -m benchmarks simulate``: what each algorithm takes on a machine that you describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import results
from benchmarks.common.checks import check_outputs
from benchmarks.common.options import CommandLine, at_least, size
from benchmarks.common.trials import show_progress
from benchmarks.models import machines
from benchmarks.models.simulate_report import Row, Table, count_steps, describe, draw
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import Machine, bound, check_nodes
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice

RANKS = (8, 64, 1024, 65536)
MOST_RANKS = 1 << 24
SIZES = (1 << 10, 1 << 20, 1 << 28)
PLOTTED_SIZES = tuple(1 << exponent for exponent in range(10, 29, 2))


@dataclass(frozen=True)
class Options:
    """What is priced."""

    choices: tuple[Choice, ...]
    ranks: tuple[int, ...]
    per_node: int
    sizes: tuple[int, ...]
    """Bytes."""
    shown: tuple[int, ...]
    """Those in the table; a plot has more."""
    machine: Machine
    json: Path | None
    plot: Path | None

    def nodes(self, ranks: int) -> tuple[int, ...]:
        rest = ranks % self.per_node
        return (self.per_node,) * (ranks // self.per_node) + ((rest,) if rest else ())


def parse_options(arguments: Sequence[str]) -> Options:
    parser = CommandLine(
        "simulate",
        "Price all-reduce algorithms on a machine with given latencies and bandwidths: "
        f"step by step up to {LARGEST_SIMULATED} ranks, by a formula beyond, which is marked.",
    )
    add = parser.add
    parser.add_algorithms()
    add("ranks", type=at_least(1, MOST_RANKS), default=RANKS)
    add("ranks-per-node", "ranks that share a node and its link", type=at_least(1), default=1,
        metavar="M")  # fmt: skip
    add("bytes", "buffers; K, M, G are 2^10, 2^20, 2^30 (default: 1K 1M 256M; with --plot 1K to "
        "256M)", type=size, nargs="+", metavar="B")  # fmt: skip
    add("json", "write all prices")
    add("plot", "draw time over lower bound against size (.svg, .png, .pdf)")
    machines.add_options(parser)
    values = parser.read_values(arguments)
    asked = values["bytes"] or ()
    return Options(
        choices=values["algorithms"],
        ranks=values["ranks"],
        per_node=values["ranks_per_node"],
        sizes=asked or (PLOTTED_SIZES if values["plot"] else SIZES),
        shown=asked or SIZES,
        machine=machines.read_machine(values, several=values["ranks_per_node"] > 1),
        json=values["json"],
        plot=values["plot"],
    )


def main(arguments: Sequence[str]) -> None:
    """Print a table for each number of ranks."""
    options = parse_options(arguments)
    check_outputs(options.json, plot=options.plot)
    if options.plot is not None and (len(options.sizes) < 2 or max(options.ranks) < 2):
        raise ConfigurationError("--plot needs two sizes at least, and two ranks")
    tables = price_all(options)
    machine = _describe_machine(options)
    print(*describe(machine, options.sizes, options.shown, tables), sep="\n")
    if options.json is not None:
        results.write_record(options.json, "simulate", to_record(options, tables))
    if options.plot is not None:
        draw(options.plot, options.sizes, tables, machine)


def price_all(options: Options) -> list[Table]:
    """Every algorithm on every number of ranks."""
    total = len(options.ranks) * len(options.choices)
    with show_progress(total, "price") as bar:
        tables = []
        for ranks in options.ranks:
            nodes = check_nodes(ranks, options.nodes(ranks))
            rows = []
            for choice in options.choices:
                rows.append(_price(choice, nodes, options))
                bar.update()
            bounds = [bound(count, options.machine, nodes) for count in options.sizes]
            tables.append(Table(ranks, len(nodes), tuple(rows), tuple(bounds)))
    if not any(row.prices for table in tables for row in table.rows):
        raise ConfigurationError(tables[0].rows[0].obstacle)
    return tables


def _price(choice: Choice, nodes: tuple[int, ...], options: Options) -> Row:
    try:
        return Row(str(choice), tuple(choice.prices(options.sizes, options.machine, nodes)))
    except ConfigurationError as error:
        return Row(str(choice), None, str(error))


def _describe_machine(options: Options) -> str:
    several = options.per_node > 1
    figures = machines.describe_machine(options.machine, several=several)
    return figures + (f", {options.per_node} ranks on each node" if several else "")


def to_record(options: Options, tables: Sequence[Table]) -> dict[str, Any]:
    """All figures, in bytes and seconds; of the machine, seconds for each byte."""
    return {
        "machine": {
            **asdict(options.machine),
            "uplink": options.machine.uplink,
            "ranks_per_node": options.per_node,
        },
        "bytes": options.sizes,
        "tables": [
            {
                "ranks": table.ranks,
                "nodes": table.nodes,
                "lower_bounds": [least.seconds for least in table.bounds],
                "algorithms": {
                    row.name: {
                        "seconds": [price.seconds for price in row.prices],
                        "source": row.prices[0].source,
                        "steps": count_steps(row.prices[0]),
                    }
                    for row in table.rows
                    if row.prices
                },
            }
            for table in tables
        ],
    }
