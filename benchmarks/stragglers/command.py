"""``python -m benchmarks stragglers``: how long training takes while a worker is slow.

Whole trainings of ``python -m mpiddp.train``, in turns: the framework's all-reduce, and a parameter
server with each bound on staleness, for each kind of straggler. What counts is the time that
training itself took, up to the first epoch whose evaluation reached the accuracy; evaluations, and
the copy of the servers' weights to all ranks before each of them, are left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from benchmarks.common import results
from benchmarks.common.options import at_least, positive
from benchmarks.common.statistics import Series, interleave, summarize
from benchmarks.launching import launchers, processes
from benchmarks.launching.processes import Program
from benchmarks.startup import command as startup
from benchmarks.stragglers.runs import IN_STEP, Cell, Outcome, read_outcome
from mpiddp.errors import ConfigurationError
from mpiddp.launch.arguments import Parser
from mpiddp.training.config import FRAMEWORK, PARAMETER_SERVER, UNLIMITED, Configuration
from mpiddp.training.straggler import RANDOM, parse_straggler

CONSTANT_TARGET, RANDOM_TARGET = 0.5, 0.7
"""Most of the synchronous server's time that the asynchronous one may take with one slow worker,
and that a bounded one may take with a random one."""


@dataclass(frozen=True)
class Options:
    """What is measured, and where the results go."""

    ranks: int
    model: str
    epochs: int
    batch_size: int
    accuracy: float
    stragglers: tuple[str, ...]
    staleness: tuple[str, ...]
    repetitions: int
    seed: int
    """Of the order, and of the first round's training; the next round's is one higher."""
    deadline: float
    launcher: str | None
    json: Path | None
    plot: Path | None


@dataclass(frozen=True)
class Target:
    """A promise and what was measured."""

    text: str
    limit: float
    found: float | None
    """None where the accuracy was not reached."""

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.found is not None and self.found <= self.limit

    def __str__(self) -> str:
        found = "never there" if self.found is None else f"{self.found:.2f}"
        return f"{self.text}: {found}, at most {self.limit:g}: {'met' if self.met else 'missed'}"


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Raises ConfigurationError; SystemExit(0) after ``--help``."""
    parser = Parser(
        prog="python -m benchmarks stragglers",
        description="Train until an accuracy is reached while a worker is slow: the framework's "
        "all-reduce, and a parameter server with each bound on staleness, in turns.",
        allow_abbrev=False,
    )
    count, add = at_least(1), parser.add_argument
    add("--ranks", type=at_least(2), default=2, metavar="N", help="all of them workers (default: "
        "2)")  # fmt: skip
    add("--model", default="convnet", help="of python -m mpiddp.train (default: convnet)")
    add("--epochs", type=count, default=8, metavar="N", help="default: 8")
    add("--batch-size", type=count, default=16, metavar="N", help="per worker (default: 16)")
    add("--accuracy", type=positive("a share"), default=0.97, metavar="SHARE",
        help="of the test samples, to be reached (default: 0.97)")  # fmt: skip
    add("--stragglers", nargs="+", default=("0=4", f"{RANDOM}=4"), metavar="WHO=FACTOR",
        help="a rank, or random, and how much longer its passes take (default: 0=4 "
        "random=4)")  # fmt: skip
    add("--staleness", nargs="+", default=(IN_STEP, "4", UNLIMITED), metavar="STEPS",
        help=f"default: {IN_STEP} 4 {UNLIMITED}")  # fmt: skip
    add("--repetitions", type=count, default=3, metavar="N", help="rounds (default: 3)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the order, and of the first "
        "round's training (default: 0)")  # fmt: skip
    add("--deadline", type=positive("seconds"), default=600.0, metavar="SECONDS",
        help="per run (default: 600)")  # fmt: skip
    add("--launcher", metavar="PROGRAM", help="mpirun to use (default: MPIDDP_MPIRUN, or this "
        "Python's, or the first in PATH)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write every run and the environment")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy by time (.svg, .png or .pdf)")
    values = vars(parser.parse_args(arguments))
    lists = {name: tuple(dict.fromkeys(values[name])) for name in ("stragglers", "staleness")}
    return Options(**{**values, **lists})


def check(options: Options) -> launchers.Mpirun:
    """Refuse what cannot work before anything is measured; returns the launcher to use."""
    if options.accuracy > 1:
        raise ConfigurationError(f"--accuracy: expected at most 1, found {options.accuracy:g}")
    for straggler in options.stragglers:
        rank = parse_straggler(straggler).rank
        if rank is not None and rank >= options.ranks:
            raise ConfigurationError(
                f"--stragglers: expected ranks 0 to {options.ranks - 1}, found {straggler!r}"
            )
    for staleness in options.staleness:
        _configure(options, Cell(options.stragglers[0], staleness))
    results.check_outputs(options.json, options.plot)
    outputs = (options.json, options.plot)
    found = startup.check_start((options.ranks,), options.launcher, None, *outputs)
    if not isinstance(found, launchers.Mpirun):
        raise ConfigurationError("--launcher: expected an mpirun, found srun: runs are on one node")
    return found


def _configure(options: Options, cell: Cell, number: int = 0) -> Configuration:
    """For the round of this number. Raises ConfigurationError for what the trainer would refuse."""
    served = cell.staleness is not None
    return Configuration(
        name="run",
        data="digits",
        model=options.model,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed + number,
        evaluate_every=1,
        sync=PARAMETER_SERVER if served else FRAMEWORK,
        staleness=cell.staleness or IN_STEP,
        straggler=cell.straggler,
    ).resolve()


def make_program(
    options: Options, cell: Cell, number: int, launcher: launchers.Mpirun, runs: Path
) -> Program:
    """One training, into ``runs``."""
    configuration = _configure(options, cell, number)
    words = [sys.executable, "-m", "mpiddp.train", f"--runs-dir={runs}"]
    for name in ("name", "data", "model", "epochs", "batch_size", "seed", "evaluate_every", "sync",
                 "staleness", "straggler"):  # fmt: skip
        words.append(f"--{name.replace('_', '-')}={getattr(configuration, name)}")
    environment = launchers.clean_environment(
        {**launcher.variables(options.ranks), **launcher.tuned}
    )
    return Program((*launcher.command(options.ranks), *words), environment)


def train(options: Options, cell: Cell, number: int, launcher: launchers.Mpirun) -> Outcome:
    """One run of the round of this number. Raises RunError with its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name:
        runs = Path(name)
        processes.run(make_program(options, cell, number, launcher, runs), options.deadline)
        lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    return read_outcome([json.loads(line) for line in lines])


def measure(options: Options, launcher: launchers.Mpirun) -> dict[Cell, Series[Outcome]]:
    """All cells in turns."""
    cells = {
        cell.name: cell
        for straggler in options.stragglers
        for cell in (Cell(straggler, staleness) for staleness in (None, *options.staleness))
    }
    numbers = dict.fromkeys(cells, 0)
    bar: tqdm[NoReturn]
    total = options.repetitions * len(cells)
    # disable=None: a bar only on a terminal.
    with tqdm(total=total, disable=None, unit="run", leave=False) as bar:

        def visit(name: str) -> Outcome:
            bar.set_description(name)
            outcome = train(options, cells[name], numbers[name], launcher)
            numbers[name] += 1
            bar.update()
            return outcome

        found = interleave(
            list(cells), visit, rounds=options.repetitions, warm_up=0, seed=options.seed
        )
    return {cells[name]: series for name, series in found.items()}


def find_median(series: Series[Outcome], accuracy: float) -> float | None:
    """Of the times to the accuracy; None where a run did not come there."""
    times = [outcome.find_time(accuracy) for outcome in series.samples]
    known = [time for time in times if time is not None]
    return summarize(known).median if len(known) == len(times) else None


def judge(found: Mapping[Cell, Series[Outcome]], accuracy: float) -> list[Target]:
    """The targets that these runs say something about; ratios are of medians."""
    targets = []
    for cell, series in found.items():
        base = found.get(Cell(cell.straggler, IN_STEP))
        is_random = parse_straggler(cell.straggler).rank is None
        bounded = cell.staleness not in (None, IN_STEP, UNLIMITED)
        if base is None or (not bounded if is_random else cell.staleness != UNLIMITED):
            continue
        ours, theirs = find_median(series, accuracy), find_median(base, accuracy)
        ratio = None if ours is None or theirs is None else ours / theirs
        text = f"straggler {cell.straggler}: time of {cell.way} to {100 * accuracy:g}%, by in step"
        targets.append(Target(text, RANDOM_TARGET if is_random else CONSTANT_TARGET, ratio))
    return targets


def format_table(found: Mapping[Cell, Series[Outcome]], accuracy: float) -> str:
    """One block for each straggler."""
    heads = ("seconds to it", "by in step", "seconds, all epochs", "last accuracy", "staleness")
    lines = []
    for straggler in dict.fromkeys(cell.straggler for cell in found):
        title = f"straggler {straggler}, to {100 * accuracy:g}%"
        lines.append(f"{title:<26}" + "".join(f"{head:>21}" for head in heads))
        base = found.get(Cell(straggler, IN_STEP))
        for cell, series in found.items():
            if cell.straggler == straggler:
                cells = _format_row(series, base, accuracy)
                lines.append(f"  {cell.way:<24}" + "".join(f"{each:>21}" for each in cells))
        lines.append("")
    return "\n".join(lines).rstrip()


def _format_row(
    series: Series[Outcome], base: Series[Outcome] | None, accuracy: float
) -> list[str]:
    ours = find_median(series, accuracy)
    theirs = None if base is None else find_median(base, accuracy)
    ends = [outcome.points[-1] for outcome in series.samples]
    counts: Counter[int] = Counter()
    for outcome in series.samples:
        counts.update(outcome.staleness)
    mean = sum(late * times for late, times in counts.items()) / max(1, sum(counts.values()))
    return [
        "never" if ours is None else f"{ours:.2f}",
        f"{ours / theirs:.2f}" if ours is not None and theirs is not None else "",
        f"{summarize([each.seconds for each in ends]).median:.2f}",
        f"{summarize([each.accuracy for each in ends]).median:.2%}",
        f"mean {mean:.2f}, max {max(counts)}" if counts else "",
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables and write what was asked for."""
    options = parse(arguments)
    launcher = check(options)
    environment = results.describe_environment(launcher)
    heading = startup.describe_environment(environment)
    ranks = f"{options.ranks} ranks, {options.model} on digits"
    print(f"{heading}; load {os.getloadavg()[0]:.1f}\n{ranks}\n", flush=True)
    found = measure(options, launcher)
    targets = judge(found, options.accuracy)
    print(format_table(found, options.accuracy))
    print("\n" + "\n".join(f"target: {target}" for target in targets))
    if options.json is not None:
        content = {
            "environment": environment,
            "load_average_after": list(os.getloadavg()),
            "ranks": options.ranks,
            "accuracy": options.accuracy,
            "runs": [
                {**asdict(cell), "rounds": [asdict(outcome) for outcome in series.samples]}
                for cell, series in found.items()
            ],
            "targets": [{**asdict(target), "met": target.met} for target in targets],
        }
        results.write_record(options.json, "stragglers", content)
    if options.plot is not None:
        from benchmarks.stragglers.plot import draw

        draw(options.plot, found, options.accuracy, f"{ranks}; {heading}")
