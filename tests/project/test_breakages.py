"""The table of breakages fits the code as it stands; `breakages.py` is what runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import PurePath

import breakages
import launchers

ENTRIES = breakages.load()


def test_each_breakage_changes_one_place():
    counts = {
        each.name: (launchers.ROOT / each.file).read_text(encoding="utf-8").count(each.old)
        for each in ENTRIES
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [each.name for each in ENTRIES if each.new == each.old] == []


def test_the_tests_that_must_notice_are_default_tests():
    named = {name for each in ENTRIES for name in each.tests}
    command = [sys.executable, *breakages.PYTEST, "--collect-only", *sorted(named)]
    done = subprocess.run(command, cwd=launchers.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.splitlines()
    lost = [name for name in named if not any(line.startswith(name) for line in found)]
    assert lost == [] and all(each.tests for each in ENTRIES)


def test_names_are_unique_and_every_folder_is_covered():
    assert max(Counter(each.name for each in ENTRIES).values()) == 1
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", each.name) for each in ENTRIES)
    files = subprocess.check_output(breakages.LIST_FILES, text=True).split("\0")
    code = [file for file in files if re.match(r"(mpiddp|benchmarks|jobs)/.*\.(py|sh)$", file)]
    folders = {str(PurePath(file).parent) for file in code}
    assert folders - {str(PurePath(each.file).parent) for each in ENTRIES} == set()
