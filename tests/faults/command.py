"""The command of ``tests/faults/run.sh``."""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

import attempts
import cluster_faults as cluster
import training_faults as training
from attempts import Campaign, Family, Fault, Record, read_campaign
from benchmarks.records.environment import find_processor
from laboratory import Laboratory

FAMILIES = {
    "kill": Family(training.choose_kill, training.attempt_kill),
    "save": Family(training.choose_save, training.attempt_save),
    "disk": Family(training.choose_disk, training.attempt_disk),
    "signal": Family(training.choose_signal, training.attempt_signal),
    "requeue": Family(cluster.choose_requeue, cluster.attempt_requeue),
    "still": Family(training.choose_still, training.attempt_still),
    "endless": Family(training.choose_endless, training.attempt_endless),
    "node": Family(cluster.choose_node, cluster.attempt_node),
    "cancel": Family(cluster.choose_cancel, cluster.attempt_cancel),
}
HEADINGS = (
    "fault (name)", "attempts", "passed", "detected in, median / worst", "lost steps, worst",
    "outcome",
)  # fmt: skip


def parse(campaign: Campaign) -> argparse.Namespace:
    total = sum(fault.attempts * fault.seconds for fault in campaign.faults.values())
    parser = argparse.ArgumentParser(
        prog="tests/faults/run.sh",
        description="Break trainings in many ways, and look at what becomes of them. What was made "
        "at this commit is not made again.",
        epilog=f"All {sum(fault.attempts for fault in campaign.faults.values())} attempts take "
        f"about {total / 60:.0f} minutes on two quiet cores.",
    )
    add = parser.add_argument
    add("--only", action="append", default=[], choices=list(campaign.faults), help="repeatable")
    add("--fraction", type=float, default=1.0, metavar="F", help="this share of each's attempts")
    add("--jobs", type=int, default=1, metavar="N", help="attempts at a time")
    add("--replay", type=campaign.parse_place, metavar="FAULT:NUMBER",
        help="make this attempt alone, and keep no record")  # fmt: skip
    add("--list", action="store_true", help="show the faults, and make nothing")
    return parser.parse_args()


def list_faults(campaign: Campaign) -> None:
    for fault in campaign.faults.values():
        minutes = fault.attempts * fault.seconds / 60
        choice = f"--only {fault.name}"
        print(f"{fault.title}\n    {choice:<16}{fault.attempts:>4} attempts{minutes:>6.1f} min")


def replay(campaign: Campaign, place: tuple[str, int]) -> int:
    with Laboratory() as laboratory:
        record = attempts.make_attempt(campaign, FAMILIES[place[0]], place, laboratory)
    print(json.dumps({**vars(record), "problem": ""}, indent=1))
    print(record.problem, file=sys.stderr)
    return int(not record.passed)


def run(campaign: Campaign, missing: Sequence[tuple[str, int]], jobs: int, path: Path) -> None:
    lock = threading.Lock()
    with (
        Laboratory() as laboratory,
        tqdm(total=len(missing), unit="attempt", disable=None) as bar,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def make(place: tuple[str, int]) -> None:
            record = attempts.make_attempt(campaign, FAMILIES[place[0]], place, laboratory)
            with lock, path.open("a", encoding="utf-8") as file:
                # What was cut off before ends here.
                file.write(f"\n{json.dumps(asdict(record))}\n")
            bar.update()
            if not record.passed:
                reason = record.problem.partition("\n")[0]
                bar.write(f"{record.fault}:{record.number} has not passed: {reason}", sys.stderr)

        list(pool.map(make, missing))


def describe(campaign: Campaign, records: Sequence[Record]) -> str:
    """The table in Markdown, a row for each fault of which something was made."""
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    for fault in campaign.faults.values():
        if found := [each for each in records if each.fault == fault.name]:
            rows.append(list_cells(fault, found))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def list_cells(fault: Fault, records: Sequence[Record]) -> tuple[str, ...]:
    detected = [each.detected for each in records if each.detected is not None]
    lost = [each.lost_steps for each in records if each.lost_steps is not None]
    outcomes = Counter(each.outcome for each in records if each.passed).most_common()
    texts = [text + f" ({count})" * (len(outcomes) > 1) for text, count in outcomes]
    return (
        f"{fault.title} (`{fault.name}`)",
        f"{len(records)}" + f" of {fault.attempts}" * (len(records) < fault.attempts),
        f"{sum(each.passed for each in records)}",
        f"{statistics.median(detected):.2f} / {max(detected):.2f} s" if detected else "–",
        f"{max(lost)}" if lost else "–", "; ".join(texts) or "–",
    )  # fmt: skip


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Exit code 0: all attempts that were asked for have passed."""
    signal.signal(signal.SIGTERM, interrupt)
    campaign = read_campaign()
    options = parse(campaign)
    if options.list:
        list_faults(campaign)
        return 0
    if options.replay is not None:
        return replay(campaign, options.replay)
    path, places = attempts.find_results(), campaign.choose(options.only, options.fraction)
    made = {(each.fault, each.number) for each in attempts.read_records(path)}
    if missing := [place for place in places if place not in made]:
        run(campaign, missing, options.jobs, path)
    records = attempts.read_records(path)
    print(describe(campaign, records), end="")
    cores, release = len(os.sched_getaffinity(0)), ".".join(platform.release().split(".")[:2])
    print(f"\n{cores} cores of {find_processor()}, Linux {release}; {path}", file=sys.stderr)
    return int(any(not each.passed and (each.fault, each.number) in places for each in records))


if __name__ == "__main__":
    sys.exit(main())
