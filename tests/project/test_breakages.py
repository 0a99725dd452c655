"""The table of breakages fits the code as it stands; `breakages.py` is what runs it."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import pytest

import breakages
import launchers
import mutants

ENTRIES = breakages.load()


def test_each_breakage_changes_one_place():
    counts = {
        each.name: (launchers.ROOT / each.file).read_text(encoding="utf-8").count(each.old)
        for each in ENTRIES
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [each.name for each in ENTRIES if each.new == each.old] == []


def test_each_equivalent_mutant_is_of_a_line_that_there_is():
    rows = mutants.load_equivalents()
    lines = {
        (file, line.strip())
        for file in {file for file, *_ in rows}
        for line in (launchers.ROOT / file).read_text(encoding="utf-8").splitlines()
    }
    assert {row[:2] for row in rows} - lines == set()


def find_lost(names: Iterable[str], found: Sequence[str]) -> list[str]:
    return [name for name in names if not any(other.startswith(name) for other in found)]


@pytest.mark.timeout(900)
def test_the_tests_that_must_notice_are_default_tests(request):
    assert all(each.tests for each in ENTRIES)
    items = request.session.items
    default = [item.nodeid for item in items if not item.get_closest_marker("long")]
    lost = find_lost({name for each in ENTRIES for name in each.tests}, default)
    if not lost:
        return
    # This run has not collected all tests.
    command = (sys.executable, *breakages.PYTEST, "--collect-only", *sorted(lost))
    done = launchers.execute(*command, cwd=launchers.ROOT, timeout=800).expect(0)
    assert find_lost(lost, done.stdout.splitlines()) == []


def test_names_are_unique_and_every_folder_is_covered():
    assert max(Counter(each.name for each in ENTRIES).values()) == 1
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", each.name) for each in ENTRIES)
    files = subprocess.check_output(breakages.LIST_FILES, text=True).split("\0")
    code = [file for file in files if re.match(r"(mpiddp|benchmarks|jobs)/.*\.(py|sh)$", file)]
    folders = {str(PurePath(file).parent) for file in code}
    assert folders - {str(PurePath(each.file).parent) for each in ENTRIES} == set()
