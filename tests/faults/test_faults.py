"""The fault suite: its campaign, its records, its table, and some of its attempts."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import attempts
import command
import launchers
from attempts import Campaign, Family, Fault, Finding, Record, read_campaign
from command import FAMILIES
from laboratory import Laboratory

CAMPAIGN = read_campaign()
FAULT = Fault(name="made-up", title="", attempts=4, seconds=1, limits={"detected": 1})


# The campaign


def test_each_fault_has_its_code_and_its_choices_can_be_recorded() -> None:
    assert list(CAMPAIGN.faults) == list(FAMILIES)
    for name, fault in CAMPAIGN.faults.items():
        for number in range(fault.attempts):
            dice = (CAMPAIGN.make_dice(name, number) for _ in range(2))
            one, other = (FAMILIES[name].choose(each, number, fault.parameters) for each in dice)
            assert one == other == json.loads(json.dumps(one)), name


# Attempts and their records


def make(finding: Finding | Exception) -> Record:
    def attempt(*_: object) -> Finding:
        if isinstance(finding, Exception):
            raise finding
        return finding

    family = Family(lambda dice, number, _: {"number": number, "draw": dice.random()}, attempt)
    campaign = Campaign(3, {"made-up": FAULT})
    return attempts.make_attempt(campaign, family, ("made-up", 2), None)  # type: ignore[arg-type]


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


# The table


def test_the_chapter_and_the_list_have_all_faults(capsys: pytest.CaptureFixture[str]) -> None:
    titles = [(fault.title, name) for name, fault in CAMPAIGN.faults.items()]
    text = (launchers.ROOT / "docs" / "about" / "reliability.md").read_text("utf-8")
    (found,) = re.findall("<!-- faults: begin -->(.*)<!-- faults: end -->", text, re.DOTALL)
    command.list_faults(CAMPAIGN)
    listed = re.findall(r"^(.+)\n +--only ([\w-]+) ", capsys.readouterr().out, re.M)
    records = [make(Finding("good", 0.5)), make(OSError("bad"))]
    records = [replace(each, fault=name) for _, name in titles for each in records]
    for rows in (found, command.describe(CAMPAIGN, records)):
        assert re.findall(r"^\| (.*?) \(`([\w-]+)`\) \|", rows, re.MULTILINE) == titles == listed
    assert rows.count("| 1 | 0.50 / 0.50 s | – | good |\n") == len(titles)


# Attempts


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with Laboratory() as made:
        yield made


def find_first(fault: str, wanted: dict[str, Any]) -> int:
    found = CAMPAIGN.faults[fault]
    for number in range(found.attempts):
        dice = CAMPAIGN.make_dice(fault, number)
        choice = FAMILIES[fault].choose(dice, number, found.parameters)
        if wanted.items() <= choice.items():
            return number
    raise AssertionError(f"no attempt of {fault} has {wanted}")


def check(fault: str, wanted: dict[str, Any], laboratory: Laboratory) -> Record:
    """Make an attempt; how long things took is not judged here, where the machine is busy."""
    number = find_first(fault, wanted)
    campaign = replace(CAMPAIGN, faults={fault: replace(CAMPAIGN.faults[fault], limits={})})
    record = attempts.make_attempt(campaign, FAMILIES[fault], (fault, number), laboratory)
    assert record.passed, f"{fault}:{number} {record.choice}\n{record.problem}"
    return record


ATTEMPTS = (
    ("kill", {"launcher": "openmpi", "moment": "step", "ranks": 2}),
    ("kill", {"launcher": "mpich", "moment": "start"}),
    ("disk", {"kind": "full", "policy": "continue"}), ("disk", {"kind": "quota", "policy": "stop"}),
    ("signal", {"way": "one rank"}), ("signal", {"way": "start-up"}),
    ("still", {"way": "stopped", "victim": 0}), ("endless", {"action": "spin"}),
)  # fmt: skip
SAVE = ("save", {"point": "shards"})


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "wanted"), [SAVE, *(pytest.param(*each, marks=pytest.mark.long) for each in ATTEMPTS)]
)
def test_an_attempt_passes(fault: str, wanted: dict[str, Any], laboratory: Laboratory) -> None:
    record = check(fault, wanted, laboratory)
    if record.gone is not None:
        assert record.detected is not None and 0 < record.detected <= record.gone


CANCELS = (
    ("openmpi", ("INT", "KILL", "KILL below")), ("mpich", ("TERM", "KILL", "KILL below")),
    ("srun", ("scancel", "HUP", "KILL below")), ("hosts", ("INT", "KILL", "KILL below")),
)  # fmt: skip


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("kill", {"launcher": "srun"}),
        ("requeue", {"way": "chain"}),
        ("requeue", {"way": "priority"}),
        ("still", {"way": "link cut"}),
        ("node", {"way": "lost"}),
        ("node", {"way": "cut off, and comes back"}),
        *(("cancel", {"launcher": name, "way": way}) for name, ways in CANCELS for way in ways),
    ],
)
def test_an_attempt_on_the_cluster_passes(
    fault: str, wanted: dict[str, Any], laboratory: Laboratory
) -> None:
    check(fault, wanted, laboratory)
