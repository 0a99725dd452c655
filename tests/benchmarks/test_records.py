"""Records of measurements: what is written is what is read, and what is none is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import documents
from benchmarks.measure.checkpoint.contenders import CHECKPOINT
from benchmarks.measure.startup.tables import PHASE, START_UP
from benchmarks.measure.stragglers.contenders import TIME_TO, TRAINING
from benchmarks.measure.training_step.tables import PARTS, STEP
from benchmarks.records.collectives import NCCL_TESTS
from benchmarks.records.options import RunOptions
from benchmarks.records.schema import Cell, hide, make_cell, open_record, read_record
from benchmarks.records.statistics import Summary, summarize
from benchmarks.show import results
from benchmarks.study import numerics, prices
from measured import MPIRUN
from mpiddp.errors import ConfigurationError
from mpiddp.options.outputs import RECORD, TABLE, writes

words = st.text('aé"\\\n\u2028\x85', max_size=5)
"""With what separates lines elsewhere."""
times = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=8)


@st.composite
def cells(draw) -> Cell:
    return make_cell(
        draw(times),
        quantity=draw(st.sampled_from(["all-reduce", "broadcast"])),
        contender=draw(words),
        ranks=draw(st.integers(4, 64)),
        nodes=draw(st.integers(1, 4)),
        at={"bytes": draw(st.integers(1, 1 << 40)), "type": "float32"},
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


HEAD = {"kind": "run", "schema": 3, "benchmark": "step", "environment": {}, "options": {}}
CELL = {"kind": "cell", **vars(make_cell([1.0], quantity="q", contender="c", ranks=2))}
CELL["summary"] = vars(CELL["summary"])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "line 1: expected JSON"),
        (["{}"], "line 1: lacks kind"),
        (["[1]"], "line 1: expected an object, found a list"),
        ([{"kind": "cell"}], "line 1: lacks schema"),
        ([{**HEAD, "schema": 2}], "schema 3, .*, found 'run' and 2: measure again"),
        ([HEAD, HEAD], "line 2: expected one record in a file, found a second"),
        ([HEAD, '{"kind": "ce'], "line 2: .*cut off, delete this last line"),
        ([HEAD, '{"kind": "cell", "quantity": "step"}'], "line 2: lacks contender$"),
        ([HEAD, {**CELL, "ranks": "2"}], "line 2: ranks: expected a whole number, found '2'$"),
        (
            [HEAD, {**CELL, "ranks": 1, "nodes": 2}],
            "line 2: expected 1 <= nodes <= ranks, found 2 and 1",
        ),
        ([HEAD, {**CELL, "samples": []}], "line 2: samples: expected one or more"),
        (
            [HEAD, {**CELL, "samples": [1.0, float("nan")]}],
            r"samples\[1\]: expected a number, found 'NaN'",
        ),
        ([HEAD, {**CELL, "samples": [float("-inf")]}], r"samples\[0\]: expected a number, .*-Inf"),
        ([HEAD, {**CELL, "at": [1]}], "line 2: at: expected an object, found a list"),
        ([HEAD, {**CELL, "details": []}], r"line 2: details: expected an object, found \[\]"),
        ([HEAD, {**CELL, "contender": 3}], "line 2: contender: expected a text, found 3"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, lines, expected):
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    with pytest.raises(ConfigurationError, match=expected) as caught:
        read_record(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_record(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        open_record(tmp_path / "no" / "record", "step", {}, {}).__enter__()


# ---- what a command opens --------------------------------------------------------------------

NAME = socket.gethostname()


@dataclasses.dataclass(frozen=True)
class Plan:
    ranks: tuple[int, ...] = (2, 3)
    model: Path = Path("a")


def open_output(monkeypatch, names, **options):
    read = writes(RECORD, TABLE, NCCL_TESTS).read
    options["output"] = tuple(map(read, map(str, names)))
    monkeypatch.setattr(results, "describe_environment", lambda launcher: {"cores": 2})
    monkeypatch.setattr(results, "describe_heading", lambda environment: "here")
    return results.open_output("broadcast", RunOptions(plan=Plan(), **options), MPIRUN)


def make_broadcast() -> Cell:
    at = {"bytes": 8, "type": "float32"}
    return make_cell([1.0], quantity="broadcast", contender="MPI", ranks=2, at=at)


def test_what_was_measured_before_an_interruption_is_in_every_file(tmp_path, monkeypatch):
    record, table, columns = paths = [tmp_path / f"a.{end}" for end in ("jsonl", "csv", "txt")]

    def measure() -> None:
        with open_output(monkeypatch, paths) as output:
            output.record.add(make_broadcast())
            assert read_record(record).cells == (make_broadcast(),)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    found = read_record(record)
    assert found.cells == (make_broadcast(),) and not found.is_complete
    assert found.options == {"ranks": [2, 3], "model": "a"}
    assert table.read_text().splitlines()[1].startswith("broadcast,MPI,2,1,8,float32,s,1,")
    assert "broadcast_perf" in columns.read_text()


def test_hosts_are_named_only_if_they_are_asked_for(tmp_path, monkeypatch):
    for hosts in (False, True):
        with open_output(monkeypatch, [tmp_path / "record.jsonl"], hosts=hosts) as output:
            output.record.fail("broadcast", "MPI", f"rank 1 on {NAME}: it ended", ranks=2)
        found = read_record(tmp_path / "record.jsonl")
        places = {"2": {NAME: [0, 1]}, "3": {NAME: [0, 1, 2]}} if hosts else None
        assert found.environment.get("hosts") == places
        assert found.others[0]["reason"] == f"rank 1 on {NAME if hosts else 'HOST'}: it ended"


def test_names_are_hidden_as_words():
    text = "node1.site and node11, on node1: node1-eth0"
    assert hide(text, ["node1", "node1.site"]) == "HOST and node11, on HOST: node1-eth0"
    assert hide(text, []) == text


def test_a_full_disk_ends_the_record_after_a_whole_line(tmp_path, capsys):
    """The command goes on, so that what it measures is shown."""
    path, cells = tmp_path / "record", []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def measure():
        with open_record(path, "allreduce", {}, {}) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
            for ranks in range(1, 20):
                writer.add(make_cell([1.0, 2.0], quantity="q", contender="c", ranks=ranks))
            cells.extend(writer.cells)

    try:
        with pytest.raises(ConfigurationError, match="lacks what was measured last: File too la"):
            measure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(cells) == 19
    assert capsys.readouterr().err.count("no more is written to") == 1
    found = read_record(path)
    assert 0 < len(found.cells) < 19 and not found.is_complete


def test_two_commands_do_not_write_one_file(tmp_path):
    path = tmp_path / "record"
    with open_record(path, "allreduce", {}, {}) as writer:
        writer.refuse("q", "c", "why")
        with pytest.raises(ConfigurationError, match="another command writes it"):
            open_record(path, "allreduce", {}, {}).__enter__()
    assert read_record(path).is_complete
    with open_record(path, "prove", {}, {}):
        pass
    assert read_record(path).benchmark == "prove"


# ---- what is documented ----------------------------------------------------------------------

CHAPTER = documents.launchers.ROOT / "docs" / "benchmarks.md"


def test_the_documented_record_is_one(tmp_path):
    (example,) = [block for block in documents.read_blocks(CHAPTER) if block.language == "json"]
    (tmp_path / "record").write_text(example.text)
    found = read_record(tmp_path / "record")
    (cell,) = found.cells
    assert cell.summary == summarize(cell.samples) and found.is_complete
    assert [line["kind"] for line in found.others] == ["refusal", "end"]


def test_every_field_and_quantity_is_documented():
    text = CHAPTER.read_text()
    names = [field.name for kind in (Cell, Summary) for field in dataclasses.fields(kind)]
    names += [START_UP, PHASE, STEP, *PARTS]
    names += [TRAINING, TIME_TO, CHECKPOINT]
    names += [prices.QUANTITY, numerics.QUANTITY]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_kind_of_line_is_documented():
    sources = [path.read_text() for path in (documents.launchers.ROOT / "benchmarks").rglob("*.py")]
    kinds = {kind for text in sources for kind in re.findall(r'\.write\(\s*"(\w+)",', text)}
    assert {"cell", "end", "winners"} <= kinds
    kinds |= {"refusal", "failure", "gone", "added", "incomparable"}
    table = CHAPTER.read_text().partition("### Lines")[2].partition("### Fields")[0]
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in table] == []
