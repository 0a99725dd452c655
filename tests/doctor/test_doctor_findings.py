"""How findings become lines and exit codes, and the report that shows them."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.doctor.examiner import findings
from mpiddp.doctor.examiner.findings import FAIL, PASS, SKIP, WARN, Finding
from mpiddp.doctor.examiner.findings_report import FindingsReport, describe, wants_colour
from mpiddp.errors import PeerLostError
from mpiddp.launch.launcher.launcher import Launcher


def fail(code):
    return findings.failed("c", "broken", "mend it", code)


CODES = st.lists(st.sampled_from([1, 2, 3, 4]), max_size=6)


@given(CODES, st.integers(0, 3))
def test_the_exit_code_is_that_of_the_first_in_the_order(codes, others):
    rows = [fail(code) for code in codes] + [findings.warned("w", "odd", "look")] * others
    found = findings.exit_code(rows)
    if not codes:
        assert found == 0
    else:
        assert found in codes
        before = [3, 4, 2, 1][: [3, 4, 2, 1].index(found)]
        assert not set(before) & set(codes)


def test_a_code_of_no_rank_counts_as_1():
    assert findings.exit_code([fail(PeerLostError.exit_code)]) == findings.exit_code([fail(0)]) == 1
    assert findings.exit_code([fail(PeerLostError.exit_code), fail(2)]) == 2


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        ([PASS] * 14 + [WARN] * 2 + [FAIL], "14 passed, 2 warnings, 1 failure (exit code 4)"),
        ([PASS], "1 passed, 0 warnings, 0 failures (exit code 0)"),
        ([SKIP, WARN], "0 passed, 1 skipped, 1 warning, 0 failures (exit code 0)"),
    ],
)
def test_summary(statuses, line):
    rows = [Finding("c", status, "x", code=4 if status == FAIL else 0) for status in statuses]
    assert findings.summarise(rows, 2.345) == f"{line} in 2.3 s"


def test_nodes_that_agree_are_folded():
    rows = [findings.passed("c", "fine")] * 3
    assert findings.merge(["n1", "n2", "n3"], rows) == findings.passed("c", "fine")


def test_nodes_that_differ_in_what_is_good_are_all_shown():
    rows = [findings.passed("c", text) for text in ("eth0", "ib0", "eth0")]
    merged = findings.merge(["n1", "n2", "n3"], rows)
    assert (merged.status, merged.found) == (PASS, "n[1,3]: eth0; n2: ib0")


def test_only_what_is_bad_is_said_where_something_is():
    rows = [
        findings.passed("c", "fine"),
        findings.warned("c", "odd", "look"),
        findings.failed("c", "broken", "mend", 4),
        findings.warned("c", "odd", "look"),
    ]
    merged = findings.merge(["n1", "n2", "n3", "n4"], rows)
    assert merged.text == "n[2,4]: odd; n3: broken. look. mend"
    assert (merged.status, merged.code, merged.hosts) == (FAIL, 4, ("n2", "n3", "n4"))


def test_many_different_answers_are_cut_short():
    rows = [findings.warned("c", f"odd {i}", "look") for i in range(9)]
    merged = findings.merge([f"n{i}" for i in range(9)], rows)
    assert merged.found.count("odd") == findings.SHOWN
    assert merged.found.endswith("something else again: n[4-8]")


KINDS = st.sampled_from(
    [
        findings.passed("c", "fine"),
        findings.passed("c", "good"),
        findings.skipped("c", "not here"),
        findings.warned("c", "odd", "look"),
        findings.failed("c", "broken", "mend", 2),
        findings.failed("c", "lost", "find", 4),
    ]
)


@given(st.lists(KINDS, min_size=1, max_size=8))
def test_merging_loses_no_badness(rows):
    hostnames = [f"n{index}" for index in range(len(rows))]
    merged = findings.merge(hostnames, rows)
    order = [PASS, SKIP, WARN, FAIL]
    assert merged.status == max((row.status for row in rows), key=order.index)
    assert merged.code == findings.exit_code(rows)
    bad = {h for h, row in zip(hostnames, rows, strict=True) if row.status in (WARN, FAIL)}
    assert set(merged.hosts) == bad
    for row in rows:
        if row.status in (WARN, FAIL):
            assert row.found in merged.found and row.advice in merged.advice


@pytest.mark.parametrize("status", [PASS, SKIP, WARN, FAIL])
def test_a_line_has_words_with_and_without_colour(status):
    finding = Finding("links", status, "first\nsecond")
    plain = describe(finding, coloured=False)
    assert plain.startswith(f"{status}  links ") and "\033" not in plain
    assert plain.endswith("first\n      second")
    coloured = describe(finding, coloured=True)
    assert status in coloured and ("\033" in coloured) == (status != SKIP)


@pytest.mark.parametrize(
    ("terminal", "variables", "wanted"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (False, {}, False)],
)
def test_colour_is_for_terminals(terminal, variables, wanted):
    stream = SimpleNamespace(isatty=lambda: terminal)
    assert wants_colour(stream, None, variables) is wanted


@pytest.mark.parametrize("forwarded", [True, False])
def test_a_launchers_own_terminal_is_none(forwarded, monkeypatch):
    monkeypatch.setattr(
        "mpiddp.doctor.examiner.findings_report._is_terminal", lambda descriptor: forwarded
    )
    launcher = Launcher("openmpi", "mpirun", 0, (2,), frozenset())
    assert wants_colour(SimpleNamespace(isatty=lambda: True), launcher, {}) is forwarded


def test_the_file_is_whole_after_every_finding(tmp_path):
    stream, path = io.StringIO(), tmp_path / "report.json"
    report = FindingsReport(stream, path)
    report.note_place(2, ["n1"])
    report.add(findings.passed("first", "fine"))
    half = json.loads(path.read_text())
    assert (half["complete"], half["exit_code"], half["ranks"]) == (False, None, 2)
    report.add(findings.failed("second", "broken → lost", "mend", 4))
    assert report.conclude() == 4
    whole = json.loads(path.read_text())
    assert whole["complete"] is True and whole["exit_code"] == 4
    assert [row["found"] for row in whole["findings"]] == ["fine", "broken → lost"]
    assert stream.getvalue().splitlines()[-1].startswith("mpiddp.doctor: 1 passed, 0 warnings, 1 f")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
