"""``python -m benchmarks prove``: every algorithm keeps its promise, for every number of ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated

from benchmarks.records.options import (
    Algorithms,
    Count,
    Ranks,
    list_algorithms,
    load_file,
    make_model_reader,
)
from benchmarks.show import results
from benchmarks.show.progress import show_progress
from benchmarks.study.plan_proofs import describe_plans, prove_files, raise_for_wrong
from mpiddp.errors import ConfigurationError, MpiddpError, ScheduleError
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import RECORD, Outputs, check_outputs, writes
from mpiddp.process.cpus import count_cores
from mpiddp.schedules.plans.loading import PLANS, load
from mpiddp.schedules.proof import check_programs, prove, tabulate
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice, find, is_built_in, parse
from mpiddp.schedules.schedule import Schedule, halve, project, segment
from mpiddp.wording import print_text

RANKS = 64
CORES = count_cores()
SEGMENTS = (1, 2)
"""For every number of ranks."""
MORE_SEGMENTS = (3, 5)
FEWER_RANKS = 16
"""As far as more segments and the halves are proved: the work grows with the ranks' square."""


@dataclass(frozen=True)
class Case:
    """One algorithm on one number of ranks, in several segmentations, and its halves."""

    choice: str
    """As ``parse`` reads it: it goes to another process."""
    group: str
    """The choice whose verdict it is part of."""
    ranks: int
    nodes: tuple[int, ...] | None
    segments: tuple[int, ...]


@dataclass(frozen=True)
class ProofVerdict:
    """What has been proved of one case, or of several."""

    fewest: int = 0
    """Ranks of the smallest case."""
    schedules: int = 0
    messages: int = 0
    failures: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    """Numbers of ranks above the fewest that it is not made for."""

    def __add__(self, other: ProofVerdict) -> ProofVerdict:
        return ProofVerdict(
            min(filter(None, (self.fewest, other.fewest))),
            self.schedules + other.schedules,
            self.messages + other.messages,
            self.failures + other.failures,
            self.left_out + other.left_out,
        )


def list_cases(choices: Sequence[Choice], ranks: int, segments: Sequence[int] | None) -> list[Case]:
    """All of them, the largest first, so that the processes end together."""
    cases = []
    for choice in choices:
        for n in _list_made(choice, ranks):
            usual = SEGMENTS + (MORE_SEGMENTS if n <= FEWER_RANKS else ())
            counts = tuple(segments or usual)
            name = str(choice)
            cases.append(Case(name, name, n, None, counts))
            cases += [Case(name, name, n, nodes, (1,)) for nodes in _list_nodes(choice, n)]
            cases += [Case(other, name, n, None, (1,)) for other in _list_variants(choice, n)]
    return sorted(cases, key=lambda case: -case.ranks)


def _list_made(choice: Choice, ranks: int) -> list[int]:
    """The numbers of ranks that the choice is made for; raises ConfigurationError if none.

    Those of this package are made for all from the least one on.
    """
    made: list[int] = []
    for n in range(1, ranks + 1):
        if made and is_built_in(choice):
            return list(range(made[0], ranks + 1))
        try:
            choice.make(n)
        except ConfigurationError:
            if n == ranks and not made:
                raise
        else:
            made.append(n)
    return made


def _list_nodes(choice: Choice, n: int) -> list[tuple[int, ...]]:
    """Nodes of four ranks, the last with what remains, beside the halves that no nodes mean."""
    if not choice.algorithm.knows_nodes or n < 5:
        return []
    return [(4,) * (n // 4) + ((n % 4,) if n % 4 else ())]


def _list_variants(choice: Choice, n: int) -> list[str]:
    """With two servers, where an algorithm has servers, and they are not what is asked for."""
    if "servers" not in choice.algorithm.parameters or choice.parameters or n < 3:
        return []
    return [str(replace(choice, parameters={"servers": 2}))]


def check_case(case: Case) -> ProofVerdict:
    """Prove the schedule, in all its segmentations, and its halves where there are few ranks."""
    base = parse(case.choice).make(case.ranks, case.nodes)
    nodes = "" if case.nodes is None else f" on nodes of {case.nodes}"
    where = f"{case.choice}, {case.ranks} ranks{nodes}"
    try:
        # What is no message between two ranks cannot be cut into segments.
        tabulate(base)
    except ScheduleError as error:
        return ProofVerdict(case.ranks, 1, 0, (f"{where}: {error}",))
    verdict = ProofVerdict()
    failures: tuple[str, ...]
    for name, schedule in _list_schedules(base, case.segments):
        try:
            prove(schedule)
            check_programs(project(schedule))
            failures = ()
        except ScheduleError as error:
            failures = (f"{where}, {name}: {error}",)
        verdict += ProofVerdict(case.ranks, 1, sum(map(len, schedule.steps)), failures)
    return verdict


def _list_schedules(base: Schedule, segments: Sequence[int]) -> Iterator[tuple[str, Schedule]]:
    for count in segments:
        yield f"{count} segment{'s' if count > 1 else ''}", segment(base, count)
    if base.owners and base.ranks <= FEWER_RANKS:
        for half in halve(base):
            yield half.collective.value, half


def _load_algorithms(text: str) -> Path:
    """The file; if it is no plan, its algorithms are registered now."""
    return Path(text) if text.endswith(PLANS) else Path(load_file(text))


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """What is proved."""

    choices: Algorithms = ()
    """(default: all; with --load those of its files)"""
    load: Annotated[tuple[Path, ...], Argument("FILE", _load_algorithms, is_first=True)] = ()
    """Python files with algorithms of your own, and plans of other projects (.xml, .json)."""
    ranks: Annotated[int, Argument("N", at_least(1, LARGEST_SIMULATED))] = RANKS
    """All numbers of ranks up to this one."""
    segments: Ranks = ()
    """Into how many parts (default: 1 2, and 3 5 for up to 16 ranks)."""
    processes: Count = CORES
    """That prove side by side (default: one per core)."""
    output: Annotated[Outputs, writes(RECORD)] = ()
    """Write the verdicts."""

    def list_loaded(self) -> list[Path]:
        """The files with algorithms."""
        return [path for path in self.load if path.suffix not in PLANS]


READER = make_model_reader(
    "prove",
    "Prove by exact propagation, without running anything, that each algorithm is an "
    "all-reduce: every contribution once, the same additions on every rank, no conflict within a "
    "step, no deadlock; and that its halves are a reduce-scatter and an all-gather.",
    ProveOptions,
    "ring:segments=4",
)


def parse_options(arguments: Sequence[str]) -> ProveOptions:
    options = pick(ProveOptions, READER.read(arguments))
    if any(choice.segments > 1 for choice in options.choices):
        raise ConfigurationError("prove takes --segments K… instead of NAME:segments=K")
    if options.choices:
        return options
    names = [name for path in options.list_loaded() for name in load(path)]
    loaded = tuple(Choice(find(name)) for name in names)
    return replace(options, choices=loaded if options.load else list_algorithms())


def check_all(options: ProveOptions) -> dict[str, ProofVerdict]:
    cases = list_cases(options.choices, options.ranks, options.segments)
    verdicts = {str(choice): ProofVerdict() for choice in options.choices}
    for name in verdicts:
        made = {case.ranks for case in cases if case.group == name}
        missing = set(range(min(made), options.ranks + 1)) - made
        verdicts[name] = ProofVerdict(left_out=tuple(sorted(missing)))
    with show_progress(len(cases), "proof") as bar:
        for case, verdict in zip(cases, _map(cases, options), strict=True):
            verdicts[case.group] += verdict
            bar.update()
    return verdicts


def _map(cases: Sequence[Case], options: ProveOptions) -> Iterator[ProofVerdict]:
    if options.processes == 1:
        yield from map(check_case, cases)
        return
    begin = partial(_begin, options.list_loaded())
    try:
        with ProcessPoolExecutor(options.processes, initializer=begin) as pool:
            yield from pool.map(check_case, cases, chunksize=4)
    except BrokenProcessPool:
        raise MpiddpError(
            "a process of the proof was killed, perhaps for want of memory; "
            "fewer --processes or --ranks need less"
        ) from None


def _begin(paths: Sequence[Path]) -> None:
    # The symbols are small and acyclic: looking for garbage among them costs a third.
    gc.disable()
    for path in paths:
        load(path)


def main(arguments: Sequence[str]) -> None:
    """Print one line per algorithm and plan. Raises ScheduleError if one breaks its promise."""
    options = parse_options(arguments)
    check_outputs(options.output, inputs=options.load)
    with results.open_model("prove", options) as record:
        begin = time.perf_counter()
        verdicts = check_all(options) if options.choices else {}
        seconds = time.perf_counter() - begin
        for name, verdict in verdicts.items():
            record.write("proof", algorithm=name, most=options.ranks, **asdict(verdict))
        plans = prove_files([path for path in options.load if path.suffix in PLANS])
        for plan in plans:
            record.write("plan", **asdict(plan))
    if verdicts:
        print_text(*describe(verdicts, options, seconds))
    if plans:
        print_text(*describe_plans(plans))
    failures = [failure for verdict in verdicts.values() for failure in verdict.failures]
    if failures:
        print_text(*failures)
        raise ScheduleError(f"{len(failures)} schedules do not keep their promise")
    raise_for_wrong(plans)


def describe(
    verdicts: Mapping[str, ProofVerdict], options: ProveOptions, seconds: float
) -> Iterator[str]:
    width = max(map(len, verdicts))
    yield f"{'algorithm':<{width}}  {'ranks':>6}  {'schedules':>9}  {'messages':>9}  verdict"
    for name, verdict in verdicts.items():
        word = f"{len(verdict.failures)} WRONG" if verdict.failures else "proved"
        yield (
            f"{name:<{width}}  {f'{verdict.fewest}–{options.ranks}':>6}  {verdict.schedules:>9,}  "
            f"{verdict.messages:>9,}  {word}"
        )
    total = sum(verdicts.values(), ProofVerdict())
    cores = f"{options.processes} core{'s' if options.processes > 1 else ''}"
    yield (
        f"{'all':<{width}}  {'':>6}  {total.schedules:>9,}  {total.messages:>9,}  "
        f"in {seconds:.1f} s on {cores}"
    )
    for name, verdict in verdicts.items():
        if verdict.left_out:
            yield f"{name} is not made for {_list_runs(verdict.left_out)} ranks"
    if not options.segments:
        yield (
            f"segments: {_list(SEGMENTS)}; up to {FEWER_RANKS} ranks {_list(MORE_SEGMENTS)} "
            "as well, and the halves"
        )


def _list_runs(numbers: Sequence[int]) -> str:
    """``3, 5–7``."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join("–".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs)


def _list(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
