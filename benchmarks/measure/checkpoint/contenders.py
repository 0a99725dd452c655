"""What checkpoints cost a training: the kinds of save, their job, the table and the targets.

Steps and saves are timed apart, in turns within one job; a save's share is computed for an interval
between checkpoints. The difference between whole trainings would be less than their noise.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.engine import CellGroup, Quantity
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.processes import make_program, run_worker
from benchmarks.measure.trials import Rounds
from benchmarks.records.options import SECONDS, Count, Ranks, RunOptions, Seconds, describe_value
from benchmarks.records.schema import Cell, Coordinate, make_cell
from benchmarks.records.statistics import quantile
from benchmarks.records.workloads import parse_workload
from benchmarks.show.tables import format_table
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.options.fields import Argument
from mpiddp.wording import count_noun, describe_size

WORKER = "benchmarks.measure.checkpoint.worker"
WARM_UP = 1
"""Rounds that do not count: the first save makes the copies' memory."""
SYNCHRONOUS, ASYNCHRONOUS, OVER_RAW, AGREEMENT = 0.035, 0.01, 1.5, 0.01
LEAST_BYTES = 64 << 20
"""Smaller checkpoints take what their files' names and lists take, which grows with no bytes."""
CHECKPOINT, STEP = "checkpoint", "step"


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank in each round, as the ranks report them."""

    contender: str
    title: str
    """In the table."""
    part: str = ""

    def find(self, group: CellGroup) -> Cell:
        cell = group.find(self.contender, part=self.part or None)
        assert cell is not None
        return cell


COSTS = {
    STEP: Cost("no checkpoint", "a step without a checkpoint"),
    "synchronous": Cost("synchronous save", "a synchronous save"),
    "asynchronous": Cost("asynchronous save", "an asynchronous save"),
    "stall": Cost("asynchronous save", "  until the call returns", "stall"),
    "slowdown": Cost("asynchronous save", "  slower steps beside the write", "slowdown"),
    "raw": Cost("raw write and flush", "raw write and flush"),
    "digest": Cost("checksum alone (XXH3)", "XXH3 of the bytes, alone"),
}


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan(Rounds):
    """What is measured."""

    ranks: Ranks = (2,)
    """Numbers of ranks."""
    model: Annotated[str, Argument("MODEL")] = "resnet18"
    """convnet, resnet18, mlp or mlp:megabytes=M."""
    batch_size: Count = 64
    """Samples per rank and step."""
    save_every: Count = 50
    """Steps between two checkpoints."""
    steps: Count = 2
    """Steps without a checkpoint in a round."""
    directory: Annotated[Path | None, Argument("DIR")] = None
    """On the disk to be measured (default: the directory for temporary files)."""
    repetitions: Count = 5
    deadline: Seconds = 1800.0


def complete(options: RunOptions[CheckpointPlan]) -> CheckpointPlan:
    plan = options.plan
    parse_workload(plan.model)
    if plan.directory is not None and not plan.directory.is_dir():
        raise ConfigurationError(f"--directory: {plan.directory} is not a directory")
    return plan


def measure(plan: CheckpointPlan, launcher: Mpirun) -> Iterator[CellGroup]:
    """A job for each number of ranks. Raises RunError with its output if one fails."""
    for ranks in plan.ranks:
        program = make_program(launcher, ranks, [sys.executable, "-m", WORKER])
        try:
            with tempfile.TemporaryDirectory(prefix="mpiddp-bench-", dir=plan.directory) as name:
                # Ranks run in another directory.
                told = {**asdict(plan), "directory": str(Path(name).resolve())}
                found = run_worker(program, told, plan.deadline)
        except OSError as error:
            raise MpiddpError(f"--directory {plan.directory}: {error.strerror}") from None
        yield make_group(plan, ranks, **found)


def make_group(
    plan: CheckpointPlan,
    ranks: int,
    series: Mapping[str, Sequence[float]],
    facts: Mapping[str, Any],
) -> CellGroup:
    """``series``: of each of COSTS, round by round; ``facts``: what else the ranks report."""
    at: dict[str, Coordinate] = {"model": plan.model, "batch": plan.batch_size}
    cells = []
    for name, cost in COSTS.items():
        # Medians: the noise of a step is not its checkpoint's.
        cost_median, step = (quantile(series[each], 0.5) for each in (name, STEP))
        share = {"share": cost_median / (plan.save_every * step), "save_every": plan.save_every}
        cells.append(
            make_cell(
                series[name],
                quantity="training step" if name == STEP else CHECKPOINT,
                contender=cost.contender,
                ranks=ranks,
                at={**at, "part": cost.part} if cost.part else at,
                details={} if name == STEP else share,
            )
        )
    return CellGroup(ranks=ranks, cells=cells, facts={**at, "ranks": ranks, **facts})


# ---- what the cells say --------------------------------------------------------------------------


def find_share(group: CellGroup, name: str) -> float:
    """Such a cost by the time of the steps between two checkpoints."""
    return float(COSTS[name].find(group).details["share"])


def compare_with_raw(group: CellGroup) -> Ratio:
    """A synchronous save by the raw write, round by round."""
    names = ("raw", "synchronous", "digest")
    raw, saves, digests = (COSTS[name].find(group).samples for name in names)
    return compare_rounds(raw, saves, find_common([[raw, saves, digests]]))


def find_agreement_share(group: CellGroup) -> float:
    """Of a step: what it costs that a signal may come."""
    agreement = group.facts["agreement"]
    return float(agreement["look"] / COSTS[STEP].find(group).summary.median + agreement["thread"])


def tabulate(groups: Sequence[CellGroup], plan: CheckpointPlan) -> str:
    return "\n\n".join(_tabulate(each, plan) for each in groups)


def _tabulate(group: CellGroup, plan: CheckpointPlan) -> str:
    facts = group.facts

    def describe_quartiles(cost: Cost) -> str:
        summary = cost.find(group).summary
        ends = (summary.lower_quartile, summary.upper_quartile)
        return "–".join(describe_value(each, SECONDS) for each in ends)

    def describe_share(cost: Cost) -> str:
        share = cost.find(group).details.get("share")
        return "" if share is None else f"{share:.2%}"

    table = format_table(COSTS.values(), {
        "": lambda cost: cost.title,
        "median": lambda cost: describe_value(cost.find(group).summary.median, SECONDS),
        "quartiles": describe_quartiles,
        "share": describe_share,
    })  # fmt: skip
    state, files, copies, grown = (
        describe_size(max(0, facts[f"{name}_bytes"]))
        for name in ("state", "file", "copies", "grown")
    )
    look, thread = (facts["agreement"][name] for name in ("look", "thread"))
    agreement = find_agreement_share(group)
    title = (
        f"{plan.model}, AdamW, {group.ranks} ranks ({facts['device']}), batch {plan.batch_size} "
        f"per rank, a checkpoint every {plan.save_every} steps, {plan.repetitions} rounds; state "
        f"{state}, files {files}"
    )
    raw = f"{compare_with_raw(group).estimate:.2f} × the raw write"
    thread_share = f"its thread takes {thread:.3%} of a core"
    lines = [
        f"a synchronous save takes {raw}, round by round",
        f"a look for a signal, after a step: {describe_value(look, SECONDS)}; {thread_share}",
        f"both are {agreement:.3%} of a step",
        f"memory of all ranks: {copies} of copies, {grown} more in all",
    ]
    return "\n".join([title, table, *lines])


def judge(groups: Sequence[CellGroup], plan: CheckpointPlan) -> list[Target]:
    every = f"a checkpoint every {plan.save_every} steps"
    found: dict[tuple[str, float], dict[str, Ratio | float]] = {}
    for group in groups:
        whole, part = (find_share(group, name) for name in ("synchronous", "asynchronous"))
        rows: list[tuple[str, Ratio | float, float]] = [
            (
                f"{every}, synchronous: at most {SYNCHRONOUS:.1%} of training time",
                whole,
                SYNCHRONOUS,
            ),
            (
                f"{every}, asynchronous: at most {ASYNCHRONOUS:.0%} of training time",
                part,
                ASYNCHRONOUS,
            ),
        ]
        if group.facts["file_bytes"] >= LEAST_BYTES:
            raw = f"a synchronous save: at most {OVER_RAW:g} × the raw write and flush"
            rows.append((raw, compare_with_raw(group), OVER_RAW))
        looks = f"agreeing on signals: at most {AGREEMENT:.0%} of a step"
        rows.append((looks, find_agreement_share(group), AGREEMENT))
        place = count_noun(group.ranks, "rank") if len(groups) > 1 else ""
        for text, value, limit in rows:
            found.setdefault((text, limit), {})[place] = value
    return [Target(text, values, at_most=limit) for (text, limit), values in found.items()]


QUANTITY = Quantity(
    command="checkpoint",
    description="Time checkpoints, synchronous and beside training, against a raw write of their "
    "bytes, and by the time of the steps between two of them.",
    explanation="""\
Times are of the slowest rank, medians over rounds. A share is of the time of the steps between two
checkpoints. A synchronous save ends when the checkpoint is on the disk. An asynchronous one costs
the time until the call returns, and what the steps beside the write take longer (noise may make
that negative). Raw: one file per rank, as many bytes, written and flushed.""",
    without=("warm_up",),
    plan=CheckpointPlan,
    complete=complete,
    measure=measure,
    tabulate=tabulate,
    judge=judge,
    is_told_at_once=True,
)
