"""Versions, the digest of the code, and the import of torch."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.doctor.examiner.findings import MOST_PARTS
from mpiddp.doctor.node import software


def name(rank):
    return f"rank {rank} on n{rank}"


def test_the_digest_sees_content_names_and_nothing_else(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    first = software.digest_code(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"anything")
    assert software.digest_code(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    second = software.digest_code(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    third = software.digest_code(tmp_path)
    assert len({first, second, third}) == 3
    # It sees where files end.
    found = set()
    for texts in (("ab", "c"), ("a", "bc")):
        for file, text in zip("ab", texts, strict=True):
            (tmp_path / f"{file}.py").write_text(text)
        found.add(software.digest_code(tmp_path))
    assert len(found) == 2


ROWS = st.lists(
    st.tuples(st.sampled_from(["P 1", "P 2"]), st.sampled_from(["t 1", "t 2"])),
    min_size=1,
    max_size=7,
)


@given(ROWS)
def test_exactly_those_that_differ_from_most_are_named(rows):
    finding = software.judge_versions("code", rows, name)
    counts = {row: rows.count(row) for row in rows}
    if len(counts) == 1:
        assert (finding.status, finding.found) == ("pass", ", ".join(rows[0]))
        return
    assert (finding.status, finding.code) == ("fail", 3)
    named = {rank for rank in range(len(rows)) if f"{name(rank)} has" in finding.found}
    others = set(range(len(rows))) - named
    assert named and len({rows[rank] for rank in others}) == 1
    usual = rows[min(others)]
    assert counts[usual] == max(counts.values())
    assert all(rows[rank] != usual for rank in named)


def test_what_differs_is_said_once_and_alone():
    rows = [("Python 3.11.7", "code a")] * 3 + [("Python 3.11.7", "code b")]
    finding = software.judge_versions("code", rows, name)
    assert finding.found == "rank 3 on n3 has code b; the others have Python 3.11.7, code a"
    # Code of another version may tell more, or less.
    finding = software.judge_versions("code", [("a",)] * 3 + [("a", "MPI b"), ()], name)
    assert finding.found == "rank 3 on n3 has MPI b; rank 4 on n4 has less; the others have a"
    # Many are counted.
    finding = software.judge_versions("code", [("a",)] * 30 + [("b",)] * 20, name)
    assert finding.found.count(" has b") == MOST_PARTS
    assert "; and 12 more; the others have a" in finding.found


@pytest.mark.parametrize(
    ("seconds", "size", "status", "words"),
    [
        (1.24, 1, "pass", "1.2 s"),
        (20.0, 2, "pass", "20.0 s (slowest: rank 3 on n2)"),
        (48.0, 4, "warn", "48.0 s (slowest: rank 3 on n2), more than 20 s"),
    ],
)
def test_import(seconds, size, status, words):
    finding = software.judge_import(seconds, "rank 3 on n2", size)
    assert (finding.status, finding.found) == (status, words)
    assert ("node-local disk" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", ""),
        ("raise RuntimeError('operator torchvision::nms does not exist\\nmore')",
         "RuntimeError: operator torchvision::nms does not exist"),
        ("from torch import gone", "ImportError: cannot import name 'gone' from 'torch'"),
    ],
)  # fmt: skip
def test_a_torchvision_that_does_not_fit(source, problem, monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Nothing imports the made-up one afterwards, also if this worker has not imported the real one.
    monkeypatch.setitem(sys.modules, "torchvision", None)
    del sys.modules["torchvision"]
    monkeypatch.setattr(software, "version", lambda name: "0.28.0")
    found, said = software.find_torchvision()
    assert found == "0.28.0" and said.startswith(problem) and bool(said) == bool(problem)
    finding = software.judge_torchvision(found, said)
    assert finding.status == ("warn" if problem else "pass") and problem in finding.found
    assert finding.check == software.TORCHVISION and "0.28.0" in finding.found
    assert software.judge_torchvision("", "").status == "skip"
