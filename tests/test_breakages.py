"""The table of breakages fits the code as it stands; `breakages.py` is what runs it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePath

import breakages
import launchers

ENTRIES = breakages.load()
FOLDERS = {
    "mpiddp", "mpiddp/launch", "mpiddp/collectives", "mpiddp/collectives/transport",
    "mpiddp/collectives/drawing", "mpiddp/sync", "mpiddp/training", "mpiddp/doctor", "benchmarks",
    "benchmarks/allreduce", "benchmarks/training_step", "jobs", "jobs/cluster",
}  # fmt: skip


def test_each_breakage_changes_one_place():
    counts = {
        each.name: (launchers.ROOT / each.file).read_text(encoding="utf-8").count(each.old)
        for each in ENTRIES
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [each.name for each in ENTRIES if each.new == each.old] == []


def test_the_tests_that_must_notice_exist():
    lost = []
    for name in {name for each in ENTRIES for name in each.tests}:
        file, _, function = name.partition("[")[0].partition("::")
        path = launchers.ROOT / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not text or not re.search(rf"^def {function}\(" if function else "", text, re.MULTILINE):
            lost.append(name)
    assert lost == []
    assert all(each.tests for each in ENTRIES)


def test_names_are_unique_and_every_folder_is_covered():
    assert max(Counter(each.name for each in ENTRIES).values()) == 1
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", each.name) for each in ENTRIES)
    assert len(ENTRIES) >= 60
    assert {str(PurePath(each.file).parent) for each in ENTRIES} >= FOLDERS
    assert any(each.file.startswith("benchmarks/startup") for each in ENTRIES)
