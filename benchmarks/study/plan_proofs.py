"""The verdicts of ``python -m benchmarks prove --load`` on plans of other projects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records.options import format_rows
from benchmarks.show.progress import show_progress
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.plans.loading import read_plans
from mpiddp.schedules.plans.plan import Plan
from mpiddp.schedules.plans.plan_proof import prove_plan

PROVED, UNEQUAL, WRONG, REFUSED = "proved", "proved, bits differ", "WRONG", "not read"


@dataclass(frozen=True)
class PlanVerdict:
    """What has been shown of one plan."""

    file: str
    verdict: str
    reason: str = ""
    promise: str = ""
    """Empty if the file could not be read as far as that."""
    ranks: int = 0
    operations: int = 0
    transfers: int = 0


def prove_files(paths: Sequence[Path]) -> list[PlanVerdict]:
    found: list[PlanVerdict] = []
    with show_progress(len(paths), "plans") as bar:
        for path in paths:
            found += _prove_file(path)
            bar.update()
    return found


def _prove_file(path: Path) -> Iterator[PlanVerdict]:
    try:
        plans = read_plans(path)
    except ConfigurationError as error:
        yield PlanVerdict(path.name, REFUSED, str(error).removeprefix(f"{path}: "))
    except ScheduleError as error:
        yield PlanVerdict(path.name, WRONG, str(error))
    else:
        for plan in plans:
            way = "" if len(plans) < 2 else " in place" if plan.is_in_place else " out of place"
            yield _prove(path.name + way, plan)


def _prove(name: str, plan: Plan) -> PlanVerdict:
    what = (plan.promise.value, plan.ranks, len(plan.operations))
    try:
        proof = prove_plan(plan)
    except ScheduleError as error:
        return PlanVerdict(name, WRONG, str(error), *what)
    verdict = PROVED if proof.is_bitwise_equal else UNEQUAL
    return PlanVerdict(name, verdict, "", *what, proof.transfers)


def describe_plans(verdicts: Sequence[PlanVerdict]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("plan", "collective", "ranks", "operations", "transfers", "verdict")
    ]
    for each in verdicts:
        counts = [f"{count:,}" if count else "" for count in (each.operations, each.transfers)]
        ranks = str(each.ranks or "")
        rows.append((each.file, each.promise, ranks, *counts, each.verdict))
    yield from format_rows(rows)
    if any(each.verdict == UNEQUAL for each in verdicts):
        yield "bits differ: every sum is complete, but ranks add in different orders"
    for each in verdicts if len(verdicts) > 1 else ():
        if each.reason:
            yield f"{each.file}: {each.reason}"


def raise_for_wrong(verdicts: Sequence[PlanVerdict]) -> None:
    """Raise ScheduleError if a plan is wrong, or ConfigurationError if a file is no plan."""
    for verdict, kind, what in (
        (WRONG, ScheduleError, "do not keep their promise"),
        (REFUSED, ConfigurationError, "cannot be read as plans"),
    ):
        found = [each for each in verdicts if each.verdict == verdict]
        if found:
            alone = f"{found[0].file}: {found[0].reason}"
            raise kind(
                alone if len(verdicts) == 1 else f"{len(found)} of {len(verdicts)} plans {what}"
            )
