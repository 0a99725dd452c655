"""Records of measurements: what is written is what is read, their tables, and statistics."""

import csv
import dataclasses
import io
import json
import math
import random
import re
import resource
import socket
from pathlib import Path

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import documents
from benchmarks.measure.checkpoint.contenders import CHECKPOINT
from benchmarks.measure.startup.tables import PHASE, START_UP
from benchmarks.measure.stragglers.contenders import TIME_TO, TRAINING
from benchmarks.measure.training_step.tables import PARTS, STEP
from benchmarks.records import schema, statistics
from benchmarks.records.collectives import NCCL_TESTS, format_csv, format_nccl_tests, format_number
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
        draw(times), quantity=draw(st.sampled_from(["all-reduce", "broadcast"])),
        contender=draw(words), ranks=draw(st.integers(4, 64)), nodes=draw(st.integers(1, 4)),
        at={"bytes": draw(st.integers(1, 1 << 40)), "type": "float32"},
        by_rank=tuple(map(summarize, draw(st.lists(times, max_size=3)))),
        details={"ran": draw(words), "wrong": 0},
    )  # fmt: skip


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
        ([{**HEAD, "schema": 2}], "schema 3, .*, found 'run' and 2: measure again"),
        ([HEAD, HEAD], "line 2: expected one record in a file, found a second"),
        ([HEAD, '{"kind": "ce'], "line 2: .*cut off, delete this last line"),
        ([HEAD, '{"kind": "cell", "quantity": "step"}'], "line 2: lacks contender$"),
        ([HEAD, {**CELL, "ranks": "2"}], "line 2: ranks: expected a whole number, found '2'$"),
        ([HEAD, {**CELL, "ranks": 1, "nodes": 2}], "expected 1 <= nodes <= ranks, found 2 and 1"),
        ([HEAD, {**CELL, "samples": []}], "line 2: samples: expected one or more"),
        ([HEAD, {**CELL, "samples": [1.0, float("nan")]}], r"samples\[1\]: expected a .*'NaN'"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path, monkeypatch, lines, expected):
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    with pytest.raises(ConfigurationError, match=expected) as caught:
        read_record(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    monkeypatch.setattr(schema, "MOST_BYTES", -1)
    with pytest.raises(ConfigurationError, match=f"{path}: "):
        read_record(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_record(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        open_record(tmp_path / "no" / "record", "step", {}, {}).__enter__()


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
    assert len(cells) == 19 and capsys.readouterr().err.count("no more is written to") == 1
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


CHAPTER = documents.launchers.ROOT / "docs" / "benchmarks.md"


def test_the_documented_record_is_one(tmp_path):
    (example,) = [block for block in documents.read_blocks(CHAPTER) if block.language == "json"]
    (tmp_path / "record").write_text(example.text)
    found = read_record(tmp_path / "record")
    (cell,) = found.cells
    assert cell.summary == summarize(cell.samples) and found.is_complete
    assert [line["kind"] for line in found.others] == ["refusal", "end"]


def test_every_field_quantity_and_kind_of_line_is_documented():
    text = CHAPTER.read_text()
    names = [field.name for kind in (Cell, Summary) for field in dataclasses.fields(kind)]
    names += [START_UP, PHASE, STEP, *PARTS, TRAINING, TIME_TO, CHECKPOINT]
    names += [prices.QUANTITY, numerics.QUANTITY]
    assert [name for name in names if f"`{name}`" not in text] == []
    sources = [path.read_text() for path in (documents.launchers.ROOT / "benchmarks").rglob("*.py")]
    kinds = {kind for text in sources for kind in re.findall(r'\.write\(\s*"(\w+)",', text)}
    assert {"cell", "end", "winners"} <= kinds
    kinds |= {"refusal", "failure", "gone", "added", "incomparable"}
    table = text.partition("### Lines")[2].partition("### Fields")[0]
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in table] == []


K, M = 1 << 10, 1 << 20


def make_timed(seconds: float = 1e-3, size: int = M, **fields) -> Cell:
    place = {"quantity": "all-reduce", "contender": "Gloo", "ranks": 4}
    at = {"bytes": size, "type": "float32", **fields.pop("at", {})}
    return make_cell([seconds] * 6, **{**place, "at": at, "details": {"wrong": 0}, **fields})


def test_a_row_is_a_cell_and_a_column_a_coordinate():
    step = make_cell([0.25, 0.75], quantity="q", contender='a, "b"\n', ranks=2, at={"model": "mlp"})
    rows = list(csv.DictReader(io.StringIO(format_csv([make_timed(), step]))))
    assert [row["contender"] for row in rows] == ["Gloo", 'a, "b"\n']
    assert [row["bytes"] for row in rows] == [str(M), ""]
    assert [row["model"] for row in rows] == ["", "mlp"]
    first, second = rows
    found = [second[name] for name in ("count", "mean", "median", "p25", "p75")]
    assert found == ["2", "0.5", "0.5", "0.375", "0.625"]
    # Of six values there is an interval, of two there is none.
    assert float(first["median_low"]) == float(first["median_high"]) == 1e-3
    assert second["median_low"] == second["median_high"] == ""


HALF = ("time", "algbw", "busbw", "#wrong")


def read_out_of_place(text: str) -> dict[int, dict[str, float]]:
    """What programs take that run nccl-tests (SuperBench, for one): columns of the first half by
    their distance from the end of the line, between the heading and the sum of errors."""
    lines = text.splitlines()
    begin = max(number for number, line in enumerate(lines) if "out-of-place" in line)
    end = max(number for number, line in enumerate(lines) if "Out of bounds values" in line)
    (heads,) = (line[1:].split() for line in lines[begin:end] if "busbw" in line)
    places = {name: heads.index(name) - len(heads) for name in HALF}
    rows = [line.split() for line in lines[begin:end] if re.match(r" *\d", line)]
    return {int(row[0]): {name: float(row[at]) for name, at in places.items()} for row in rows}


NCCL_HEAD = "# %10s  %12s  %8s  %6s  %6s" + 2 * "  %7s  %6s  %6s  %6s"
ROW = "%12d  %12d  %8s  %6s  %6d" + 2 * "  %7s  %6s  %6s  %6g"


def test_lines_are_those_of_nccl_tests():
    lines = format_nccl_tests([make_timed(123.456e-6)]).splitlines()
    assert NCCL_HEAD % ("size", "count", "type", "redop", "root", *HALF, *HALF) in lines
    half = ("123.46", "8.49", "12.74", 0)
    assert ROW % (M, M // 4, "float", "sum", -1, *half, *half) in lines


def test_readers_of_nccl_tests_read_it():
    cells = [make_timed(4e-3, 4 * M), make_timed(1e-3, M), make_timed(20e-6, 8)]
    found = read_out_of_place(format_nccl_tests(cells))
    assert list(found) == [8, M, 4 * M]
    assert found[M] == {"time": 1000, "algbw": 1.05, "busbw": 1.57, "#wrong": 0}
    assert found[8]["time"] == 20
    text = format_nccl_tests([make_timed(details={"wrong": 3}), make_timed(size=K)])
    mean = 1.5e-6 * (M + K) / 2
    assert f"# Out of bounds values : 3 FAILED\n# Avg bus bandwidth    : {mean:g} \n" in text
    assert read_out_of_place(text)[M]["#wrong"] == 3


@pytest.mark.parametrize(
    ("quantity", "count", "operator", "root", "factor"),
    [
        ("all-reduce", M // 4, "sum", -1, 1.5),
        ("reduce-scatter", M // 16, "sum", -1, 0.75),
        ("all-gather", M // 16, "none", -1, 0.75),
        ("broadcast", M // 4, "none", 0, 1),
        ("reduce", M // 4, "sum", 0, 1),
    ],
)
def test_each_collective_has_its_count_root_and_factor(quantity, count, operator, root, factor):
    text = format_nccl_tests([make_timed(1e-3, quantity=quantity)])
    (row,) = (line.split() for line in text.splitlines() if line[:1] == " ")
    assert row[1:5] == [str(count), "float", operator, str(root)]
    assert float(row[7]) == pytest.approx(1.048576 * factor, abs=0.005)
    assert text.startswith(f"# Collective test starting: {quantity.replace('-', '_')}_perf\n")
    end = f"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {1.048576 * factor:g} \n"
    assert end in text
    # Of few elements the largest share counts.
    for size, share in ((4, 1), (12, 1), (16, 2)):
        text = format_nccl_tests([make_timed(size=size, ranks=3, quantity="all-gather")])
        (row,) = (line.split() for line in text.splitlines() if line[:1] == " ")
        assert row[:2] == [str(size), str(share)]


def test_contenders_types_and_operators_have_tables_of_their_own():
    half = make_timed(at={"type": "bfloat16", "operator": "average"})
    cells = [make_timed(), make_timed(size=K), make_timed(contender="ring"), make_timed(ranks=2)]
    cells += [half, make_timed(quantity="training step")]
    text = format_nccl_tests(cells)
    assert text.count("# Collective test starting") == 4
    assert f"{M // 2:>12}  bfloat16     avg" in text
    assert len([line for line in text.splitlines() if line[:1] == " "]) == 5


@given(st.floats(1e-3, 999_999), st.sampled_from([6, 7]))
@example(0.375, 6)
def test_numbers_fit_their_columns_and_lose_no_more_than_they_must(value, width):
    text = format_number(value, width)
    assert len(text) <= width
    # Half of the last digit; the difference of two numbers is rounded, too.
    assert float(text) == pytest.approx(value, rel=1e-3, abs=0.005 + 1e-12)
    assert format_number(1_063_830, 6) == "1e+06" and format_number(12_345_678, 7) == "1.2e+07"


positive = st.floats(min_value=1e-3, max_value=1e3)
several = st.lists(positive, min_size=1, max_size=40)
values = st.floats(min_value=-1e3, max_value=1e3)


@given(several)
def test_summary_is_numpys(values):
    summary = statistics.summarize(values)
    names = ("minimum", "low", "lower_quartile", "median", "upper_quartile", "high", "maximum")
    expected = numpy.quantile(values, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
    assert [getattr(summary, name) for name in names] == pytest.approx(expected)
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(numpy.mean(values))


def _coverage(count: int, k: int) -> float:
    """Of all ways in which values can fall below or above the median, the share in which the
    k-th smallest lies below it and the k-th largest above."""
    return sum(math.comb(count, below) for below in range(k, count - k + 1)) / 2**count


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_median_interval_is_the_narrowest_that_suffices(confidence):
    for count in range(1, 15):
        enough = [k for k in range(1, count // 2 + 1) if _coverage(count, k) >= confidence]
        interval = statistics.median_interval([float(value) for value in range(count)], confidence)
        assert (interval is None) == (not enough)
        if enough:
            k = max(enough)
            assert (interval.low, interval.high) == (k - 1, count - k)
            assert interval.confidence == pytest.approx(_coverage(count, k))
    interval = statistics.median_interval([float(value) for value in range(2500)], confidence)
    k = int(interval.low) + 1
    assert interval.high == 2500 - k
    assert confidence <= _coverage(2500, k) <= confidence + 0.03


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 3), st.integers(0, 2**31))
def test_each_contender_has_a_turn_in_each_round(count, rounds, warm_up, seed):
    names = [f"contender {index}" for index in range(count)]
    turns = list(statistics.take_turns(names, rounds=rounds, seed=seed))
    assert turns == list(statistics.take_turns(names, rounds=rounds, seed=seed))
    for start in range(0, len(turns), count):
        places, found = zip(*turns[start : start + count], strict=True)
        assert places == tuple(range(count)) and sorted(found) == names
    own = [(place, at) for at, (place, name) in enumerate(turns) if name == names[0]]
    series = statistics.make_series(own, warm_up)
    assert (*series.warm_up, *series.samples) == tuple(at for _, at in own)
    assert series.positions == tuple(place for place, _ in own)[warm_up:]


def test_the_order_differs_by_round_and_by_seed():
    orders = [list(statistics.take_turns("abcd", rounds=20, seed=seed)) for seed in (1, 2)]
    assert orders[0] != orders[1]
    for each in "abcd":
        assert {place for place, name in orders[0] if name == each} == {0, 1, 2, 3}


@given(
    st.dictionaries(st.integers(1, 64), st.integers(1, 5), min_size=2, max_size=5),
    st.floats(min_value=-50, max_value=50),
    values,
)
def test_a_straight_line_has_its_slope(counts, slope, start):
    samples = {key: [start + slope * key] * count for key, count in counts.items()}
    assert statistics.slope(samples) == pytest.approx(slope, abs=1e-6)


def test_the_interval_of_a_slope_covers_it_about_as_often_as_it_says():
    generator, covered = random.Random(1), 0
    for trial in range(100):
        samples = {n: [3 * n + generator.gauss(0, 5) for _ in range(12)] for n in (4, 8, 16)}
        interval = statistics.slope_interval(samples, seed=trial, draws=200)
        covered += interval.low <= 3 <= interval.high
    assert covered >= 85


def test_one_odd_value_hardly_moves_a_slope():
    samples = {4: [1.0] * 5, 8: [2.0] * 5, 16: [4.0, 4.0, 4.0, 4.0, 400.0]}
    assert statistics.slope(samples) == pytest.approx(0.25)


def test_statistics_refuse_what_means_nothing():
    with pytest.raises(ValueError, match="at least one value"):
        statistics.summarize([])
    with pytest.raises(ValueError, match="two different keys"):
        statistics.slope({4: [1.0, 2.0]})
    assert statistics.slope_interval({4: [1.0] * 5, 8: [2.0] * 4}, seed=0) is None
