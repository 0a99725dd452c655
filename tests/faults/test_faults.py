"""The fault suite: its campaign, its records, its table, and some of its attempts."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attempts
import command
import launchers
import table
import trainings
from attempts import Family, Finding, Record, ResultFile
from campaign import Campaign, CampaignError, Fault, read_campaign
from families import FAMILIES, storage
from laboratory import Laboratory, Training
from pool import Pools

CAMPAIGN = read_campaign()
FAULT = Fault(
    name="made-up", title="something", attempts=4, seconds=1, parameters={}, limits={"detected": 1}
)
MADE_UP = Campaign(3, {"made-up": FAULT, "other": replace(FAULT, name="other", attempts=10)})
RECORD = Record(
    "good", 0.5, None, 3, fault="made-up", number=0, choice={}, passed=True, problem="",
    seconds=2.0, load=1.0,
)  # fmt: skip


# The campaign


def test_each_fault_has_its_code_and_its_choices_can_be_recorded() -> None:
    assert list(CAMPAIGN.faults) == list(FAMILIES)
    for name, fault in CAMPAIGN.faults.items():
        for number in range(fault.attempts):
            draws = [
                FAMILIES[name].choose(CAMPAIGN.make_dice(name, number), number, fault.parameters)
                for _ in range(2)
            ]
            assert draws[0] == draws[1] == json.loads(json.dumps(draws[0])), name


def test_attempts_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    # The same numbers in each version of Python, and on each machine.
    assert CAMPAIGN.make_dice("kill", 0).random() == random.Random("17:kill:0").random()
    assert MADE_UP.choose(["made-up"], 0.3) == [("made-up", 0), ("made-up", 1)]
    assert len(MADE_UP.choose([], 1)) == 14
    assert MADE_UP.parse_replay("other:9") == ("other", 9)
    for wrong in ("other:10", "other:-1", "other:", "none:1", "other"):
        with pytest.raises(CampaignError):
            MADE_UP.parse_replay(wrong)
    for words in ("--only none", "--fraction nan", "--fraction 0", "--replay kill:99", "--jobs 0"):
        with pytest.raises(SystemExit) as caught:
            command.parse(CAMPAIGN, words.split())
        assert caught.value.code == 2
        assert words.split()[1].partition(":")[0] in capsys.readouterr().err


# Attempts and their records


def make(finding: Finding | Exception, fault: Fault = FAULT) -> Record:
    def attempt(*_: object) -> Finding:
        if isinstance(finding, Exception):
            raise finding
        return finding

    family = Family(lambda dice, number, _: {"number": number, "draw": dice.random()}, attempt)
    campaign = Campaign(3, {fault.name: fault})
    return attempts.make_attempt(campaign, family, (fault.name, 2), None)  # type: ignore[arg-type]


def test_an_attempt_is_recorded_whatever_becomes_of_it() -> None:
    good = make(Finding("good", 0.9, None, 3))
    assert (good.passed, good.problem, good.outcome, good.lost_steps) == (True, "", "good", 3)
    assert good.choice == {"number": 2, "draw": random.Random("3:made-up:2").random()}
    bad = make(AssertionError("the job hangs"))
    assert not bad.passed and bad.problem.startswith("AssertionError: the job hangs\n")
    assert "raise finding" in bad.problem
    late = make(Finding("good", 1.5))
    assert not late.passed and late.problem == "detected: expected at most 1, found 1.5"
    assert late.detected == 1.5


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "folder" / "commit.jsonl")
    wanted = [("made-up", number) for number in range(4)]
    made: list[int] = []

    def attempt(place: tuple[str, int]) -> None:
        made.append(place[1])
        if place[1] == 2 and made.count(2) == 1:
            raise KeyboardInterrupt
        file.append(replace(RECORD, number=place[1]))

    for _ in range(2):
        missing = attempts.find_missing(wanted, file.read())
        with contextlib.suppress(KeyboardInterrupt):
            attempts.run_all(missing, 1, attempt)
        # What was being written then.
        with file.path.open("a") as stream:
            stream.write('{"fault": "made-up", "num')
    assert sorted(made) == [0, 1, 2, 2, 3]
    assert sorted(record.number for record in file.read()) == [0, 1, 2, 3]
    assert attempts.find_missing(wanted, file.read()) == []


def test_records_are_of_one_commit(tmp_path: Path) -> None:
    assert attempts.find_commit(tmp_path) == "no-commit"
    file = tmp_path / "mpiddp" / "a.py"
    file.parent.mkdir()
    file.touch()
    git = "git -c user.name=a -c user.email=a@example.org"
    make = f"{git} init -q && {git} add . && {git} commit -qm 1"
    subprocess.run(make, shell=True, cwd=tmp_path, check=True)
    names = [attempts.find_commit(tmp_path)]
    for path, text in ((file, "3"), (file, "4"), (file.with_name("new.py"), "")):
        path.write_text(text)
        names.append(attempts.find_commit(tmp_path))
    assert len(set(names)) == 4
    assert all(name.startswith(f"{names[0]}-changed-") for name in names[1:])


# The table


def test_the_table_sums_up() -> None:
    records = [
        RECORD,
        replace(RECORD, number=1, detected=1.5, lost_steps=7, load=4.0),
        replace(RECORD, number=2, passed=False, detected=None, outcome="failed", lost_steps=None),
        replace(RECORD, number=3, detected=0.7, outcome="other", load=9.0),
        replace(RECORD, fault="gone since"),
    ]
    rows = table.make_rows(MADE_UP, records)
    assert [(row.fault, row.made) for row in rows] == [("made-up", 4), ("other", 0)]
    text = table.describe(rows)
    assert [row.load for row in rows] == [2.5, None]
    (line,) = text.splitlines()[2:]
    assert line == ("| something (`made-up`) | 4 | 3 | 0.70 / 1.50 s | 7 | good (2); other (1) |")
    (few,) = table.make_rows(replace(MADE_UP, faults={"made-up": FAULT}), records[:1])
    assert "| 1 of 4 | 1 | 0.50 / 0.50 s | 3 | good |" in table.describe([few])


def test_the_table_is_put_into_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    rows = table.make_rows(MADE_UP, [RECORD])
    for _ in range(2):
        table.put_into(path, "abc", "a machine", rows)
    first, *lines, last = path.read_text().splitlines()
    assert (first, last) == ("before", "after")
    assert "1 of 14 attempts at commit `abc`, 0 minutes in all, on" in lines
    assert "\n".join(lines).count(table.describe(rows)) == 1
    path.write_text("nothing")
    with pytest.raises(ValueError, match="expected <!-- faults"):
        table.put_into(path, "abc", "a machine", rows)


def test_the_chapter_and_the_list_have_all_faults(capsys: pytest.CaptureFixture[str]) -> None:
    titles = [(fault.title, name) for name, fault in CAMPAIGN.faults.items()]
    text = (launchers.ROOT / "docs" / "about" / "reliability.md").read_text("utf-8")
    (found,) = re.findall(f"{table.BEGIN}(.*){table.END}", text, re.DOTALL)
    assert re.findall(r"^\| (.*?) \(`([\w-]+)`\) \|", found, re.MULTILINE) == titles
    # The script itself is run by the tests of the documentation.
    command.list_faults(CAMPAIGN)
    assert re.findall(r"^(.+)\n +--only ([\w-]+) ", capsys.readouterr().out, re.M) == titles


# Attempts


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with Laboratory() as made:
        yield made


def find_first(fault: str, wanted: dict[str, Any]) -> int:
    """The first attempt with these choices."""
    found = CAMPAIGN.find(fault)
    for number in range(found.attempts):
        dice = CAMPAIGN.make_dice(fault, number)
        choice = FAMILIES[fault].choose(dice, number, found.parameters)
        if wanted.items() <= choice.items():
            return number
    raise AssertionError(f"no attempt of {fault} has {wanted}")


def check(fault: str, number: int, laboratory: Laboratory) -> Record:
    """Make an attempt; how long things took is not judged here, where the machine is busy."""
    campaign = replace(CAMPAIGN, faults={fault: replace(CAMPAIGN.find(fault), limits={})})
    record = attempts.make_attempt(campaign, FAMILIES[fault], (fault, number), laboratory)
    assert record.passed, f"{fault}:{number} {record.choice}\n{record.problem}"
    return record


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("kill", {"launcher": "openmpi", "moment": "step", "ranks": 2}),
        ("kill", {"launcher": "mpich", "moment": "start"}),
        ("cut", {"way": "ddp"}),
        ("cut", {"way": "fsdp"}),
        ("disk", {"kind": "full", "policy": "continue"}),
        ("disk", {"kind": "quota", "policy": "stop"}),
        ("signal", {"way": "one rank"}),
        ("signal", {"way": "start-up"}),
        ("still", {"way": "stopped", "victim": 0}),
        ("endless", {"action": "spin"}),
        ("program", {"kind": "nan"}),
        ("program", {"kind": "crash"}),
        ("program", {"kind": "sample"}),
        ("world", {}),
        ("stranger", {"way": "garbage"}),
        ("stranger", {"way": "hostile list"}),
    ],
)
def test_an_attempt_passes(fault: str, wanted: dict[str, Any], laboratory: Laboratory) -> None:
    number = find_first(fault, wanted)
    record = check(fault, number, laboratory)
    if record.gone is not None:
        assert record.detected is not None and 0 < record.detected <= record.gone


@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_an_attempt_passes_with_one_launch(pool: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(training: Training) -> str:
        ranks = pool("openmpi", training.ranks)
        return ranks.call(trainings.run, training.words, cwd=training.folder, timeout=400).printed

    # Only the job that is killed is launched. Ranks that stay make the runs that come to their end.
    monkeypatch.setattr(Training, "finish", finish)
    with Laboratory() as laboratory:
        test_an_attempt_passes("save", {"point": "shards"}, laboratory)


CANCELS = (
    ("openmpi", ("INT", "KILL", "KILL below")),
    ("mpich", ("TERM", "KILL", "KILL below")),
    ("srun", ("scancel", "HUP", "KILL below")),
    ("hosts", ("INT", "KILL", "KILL below")),
)


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("kill", {"launcher": "srun"}),
        ("requeue", {"way": "chain"}),
        ("still", {"way": "link cut"}),
        ("node", {"way": "cut off, and comes back"}),
        *(("cancel", {"launcher": name, "way": way}) for name, ways in CANCELS for way in ways),
    ],
)
def test_an_attempt_on_the_cluster_passes(
    fault: str, wanted: dict[str, Any], laboratory: Laboratory
) -> None:
    check(fault, find_first(fault, wanted), laboratory)


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_checkpoints_rot(laboratory: Laboratory) -> None:
    for kind in storage.KINDS:
        check("damage", find_first("damage", {"kind": kind, "trains": False}), laboratory)
