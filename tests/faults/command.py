"""The command of ``tests/faults/run.sh``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

import attempts
import table
from attempts import ResultFile
from campaign import Campaign, read_campaign
from families import FAMILIES
from laboratory import Laboratory


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
    add("--document", type=Path, metavar="FILE", help="put the table into this document")
    options = parser.parse_args()
    options.places = campaign.choose(options.only, options.fraction)
    return options


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


def run(campaign: Campaign, options: argparse.Namespace, file: ResultFile) -> None:
    missing = attempts.find_missing(options.places, file.read())
    if not missing:
        return
    with (
        Laboratory() as laboratory,
        tqdm(total=len(missing), unit="attempt", disable=None) as bar,
    ):

        def make(place: tuple[str, int]) -> None:
            record = attempts.make_attempt(campaign, FAMILIES[place[0]], place, laboratory)
            file.append(record)
            bar.update()
            if not record.passed:
                reason = record.problem.partition("\n")[0]
                bar.write(f"{record.fault}:{record.number} has not passed: {reason}", sys.stderr)

        attempts.run_all(missing, options.jobs, make)


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
    commit = attempts.find_commit()
    file = ResultFile(attempts.RESULTS / f"{commit}.jsonl")
    run(campaign, options, file)
    records = file.read()
    rows = table.make_rows(campaign, records)
    print(table.describe(rows), end="")
    machine = attempts.describe_machine()
    print(f"\ncommit {commit}, {machine}; {file.path}", file=sys.stderr)
    if options.document is not None:
        table.put_into(options.document, commit, machine, rows)
    wanted = set(options.places)
    return int(any(not each.passed and (each.fault, each.number) in wanted for each in records))


if __name__ == "__main__":
    sys.exit(main())
