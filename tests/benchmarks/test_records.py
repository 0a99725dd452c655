"""Records of measurements: what is written is what is read, and what is none is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.records import Cell, open_record, read_record
from benchmarks.common.statistics import summarize
from mpiddp.errors import ConfigurationError

words = st.text('aé"\\\n\u2028\x85', max_size=5)
"""With what separates lines elsewhere."""
times = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=8)


@st.composite
def cells(draw) -> Cell:
    samples = draw(times)
    return Cell(
        quantity=draw(st.sampled_from(["all-reduce", "broadcast"])),
        contender=draw(words),
        ranks=draw(st.integers(1, 64)),
        nodes=draw(st.integers(1, 4)),
        at={"bytes": draw(st.integers(1, 1 << 40)), "type": "float32"},
        samples=tuple(samples),
        summary=summarize(samples),
        by_rank=tuple(map(summarize, draw(st.lists(times, max_size=3)))),
        details={"ran": draw(words), "wrong": 0},
    )


@given(st.lists(cells(), max_size=3))
def test_a_record_is_read_as_it_was_written(tmp_path_factory, measured):
    path = tmp_path_factory.mktemp("record") / "record.jsonl"
    with open_record(path, "allreduce", {"cores": 2}, {"ranks": [2, 4]}) as record:
        for cell in measured:
            record.add(cell)
        record.refuse("all-reduce", "mpiddp double-tree", "3 ranks", bytes=8)
    found = read_record(path)
    assert found.cells == tuple(measured)
    assert (found.benchmark, found.environment) == ("allreduce", {"cores": 2})
    assert [line["kind"] for line in found.others] == ["refusal", "end"]
    assert found.is_complete


def test_what_was_measured_before_a_failure_is_kept(tmp_path):
    path = tmp_path / "record.jsonl"
    cell = Cell(quantity="step", contender="ours", ranks=2, samples=(1.0,), summary=summarize([1]))

    def measure() -> None:
        with open_record(path, "step", {}, {}) as record:
            record.add(cell)
            assert read_record(path).cells == (cell,)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    found = read_record(path)
    assert found.cells == (cell,) and not found.is_complete


HEAD = {"kind": "run", "schema": 3, "benchmark": "step", "environment": {}, "options": {}}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "line 1: expected a JSON object"),
        (["{}"], "line 1: expected a JSON object with 'kind'"),
        (["[1]"], "line 1: expected a JSON object with 'kind'"),
        ([json.dumps({"kind": "cell"})], "is no record"),
        ([json.dumps({**HEAD, "schema": 2})], "has schema 2, expected 3"),
        ([json.dumps(HEAD), '{"kind": "ce'], "line 2: .*truncated"),
        ([json.dumps(HEAD), '{"kind": "cell", "quantity": "step"}'], "lacks what a record"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, lines, expected):
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigurationError, match=expected):
        read_record(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_record(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        open_record(tmp_path / "no" / "record", "step", {}, {}).__enter__()
