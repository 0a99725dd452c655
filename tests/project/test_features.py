"""docs/about/features.md names what exists: options, commands, files, tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import examples
import launchers
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from mpiddp.launch.script.command_line import FRONT, RANKS
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.registry import DATASETS

TEXT = (launchers.ROOT / "docs" / "about" / "features.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| expected |", "| feature |"))
]
NOT_YET = "**not yet**"
TEST = re.compile(r"`tests/[\w/]+\.py: test_\w+`")
"""That it exists is checked with the other names of code in the documentation."""


def find_options() -> set[str]:
    trainer = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(Configuration)}
    return trainer | {*FRONT, *RANKS}


def test_each_row_is_shown_by_a_test_or_is_not_there_yet() -> None:
    assert len(ROWS) > 100
    for feature, how, shown in ROWS:
        assert feature and how, feature
        assert shown == NOT_YET or TEST.fullmatch(shown), feature


def test_options_commands_and_names_are_there() -> None:
    for feature, how, _ in ROWS:
        for option in re.findall(r"`(--[a-z-]+)", how):
            assert option in find_options(), feature
        for module in re.findall(r"`python -m (mpiddp[.\w]*)", how):
            assert importlib.util.find_spec(module) is not None, feature
        for name in re.findall(r"`python -m benchmarks ([\w-]+)", how):
            assert name in BENCHMARKS, feature
        for name in re.findall(r"`mpiddp\.([A-Za-z_.]+)[`(]", how):
            assert name in examples.list_names(), feature
        for path in re.findall(r"`((?:jobs|examples)/[\w./]*)`", how):
            assert (launchers.ROOT / path).exists(), feature


def test_data_sets_are_there() -> None:
    names = {name for _, how, _ in ROWS for name in re.findall(r"`--data ([\w-]+)`", how)}
    assert names and names <= DATASETS.keys()
