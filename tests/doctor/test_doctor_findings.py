"""How findings become lines and exit codes, and the report that shows them."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.doctor.examiner import findings
from mpiddp.doctor.examiner.findings import FAIL, PASS, SKIP, WARN, Finding
from mpiddp.doctor.examiner.findings_report import describe, wants_colour
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


GOOD, ODD = findings.passed("c", "fine"), findings.warned("c", "odd", "look")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([GOOD] * 3, "fine"),
        ([findings.passed("c", text) for text in ("a", "b", "a")], "n[0,2]: a; n1: b"),
        # Where something is bad, only that is said.
        ([GOOD, ODD, fail(4), ODD], "n[1,3]: odd; n2: broken. look. mend it"),
        ([findings.passed("c", f"{i}") for i in range(4)], "n0: 0; n1: 1; n2: 2; n3: 3"),
        ([findings.passed("c", f"{i}") for i in range(6)],
         "n0: 0; n1: 1; n2: 2; n3: 3; something else again: n[4-5]"),
    ],
)  # fmt: skip
def test_nodes_are_folded(rows, text):
    merged = findings.merge([f"n{i}" for i in range(len(rows))], rows)
    worst = fail(4) if fail(4) in rows else rows[0]
    assert (merged.text, merged.status, merged.code) == (text, worst.status, worst.code)
    assert merged.hosts == (("n1", "n2", "n3") if worst.code else ())


def test_some_are_told_and_the_rest_is_counted():
    assert findings.join_some("abcdefgh") == "a; b; c; d; e; f; g; h"
    assert findings.join_some("abcdefghij") == "a; b; c; d; e; f; g; h; and 2 more"


@pytest.mark.parametrize("status", [PASS, SKIP, WARN, FAIL])
def test_a_line_has_words_with_and_without_colour(status):
    finding = Finding("links", status, "first\nsecond")
    plain = describe(finding, coloured=False)
    assert plain.startswith(f"{status}  links ") and "\033" not in plain
    assert plain.endswith("first\n      second")
    coloured = describe(finding, coloured=True)
    assert status in coloured and ("\033" in coloured) == (status != SKIP)


@pytest.mark.parametrize(
    ("is_terminal", "is_forwarded", "variables", "wanted"),
    [
        (True, None, {}, True),
        (True, None, {"NO_COLOR": "1"}, False),
        (False, None, {}, False),
        (True, True, {}, True),
        # A launcher's own terminal is none.
        (True, False, {}, False),
    ],
)
def test_colour_is_for_terminals(is_terminal, is_forwarded, variables, wanted, monkeypatch):
    name = "mpiddp.doctor.examiner.findings_report._is_terminal"
    monkeypatch.setattr(name, lambda descriptor: is_forwarded)
    launcher = Launcher("openmpi", "mpirun", 0, (2,), frozenset())
    stream = SimpleNamespace(isatty=lambda: is_terminal)
    found = wants_colour(stream, None if is_forwarded is None else launcher, variables)
    assert found is wanted
