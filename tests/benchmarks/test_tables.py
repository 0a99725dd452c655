"""Tables of cells: comma-separated values, and nccl-tests' columns as its readers take them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.records.collectives import format_csv, format_nccl_tests, format_number
from benchmarks.records.schema import Cell, make_cell

K, M = 1 << 10, 1 << 20


def make(seconds: float = 1e-3, size: int = M, **fields) -> Cell:
    place = {"quantity": "all-reduce", "contender": "Gloo", "ranks": 4}
    at = {"bytes": size, "type": "float32", **fields.pop("at", {})}
    return make_cell([seconds] * 6, **{**place, "at": at, "details": {"wrong": 0}, **fields})


# ---- comma-separated values -----------------------------------------------------------------


def test_a_row_is_a_cell_and_a_column_a_coordinate():
    step = make_cell(
        [0.25, 0.75], quantity="training step", contender='a, "b"\n', ranks=2, at={"model": "mlp"}
    )
    rows = list(csv.DictReader(io.StringIO(format_csv([make(), step]))))
    assert [row["contender"] for row in rows] == ["Gloo", 'a, "b"\n']
    assert [row["bytes"] for row in rows] == [str(M), ""]
    assert [row["model"] for row in rows] == ["", "mlp"]
    first, second = rows
    found = [second[name] for name in ("count", "mean", "median", "p25", "p75")]
    assert found == ["2", "0.5", "0.5", "0.375", "0.625"]
    # Of six values there is an interval, of two there is none.
    assert float(first["median_low"]) == float(first["median_high"]) == 1e-3
    assert second["median_low"] == second["median_high"] == ""


# ---- nccl-tests -------------------------------------------------------------------------------

# Formats of nccl-tests' src/util.cu, version 2.19.6: writeResultHeader, writeBenchmarkLinePreamble
# and writeBenchmarkLineBody.
HEAD = "# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %6s  %7s  %6s  %6s  %6s"
ROW = "%12d  %12d  %8s  %6s  %6d" + 2 * "  %7s  %6s  %6s  %6g"
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


def test_lines_are_those_of_nccl_tests():
    lines = format_nccl_tests([make(123.456e-6)]).splitlines()
    assert HEAD % ("size", "count", "type", "redop", "root", *HALF, *HALF) in lines
    half = ("123.46", "8.49", "12.74", 0)
    assert ROW % (M, M // 4, "float", "sum", -1, *half, *half) in lines
    assert "# Out of bounds values : 0 OK" in lines
    assert any(re.fullmatch(r"# Avg bus bandwidth    : 12\.7\d* ", line) for line in lines)
    assert lines[0] == "# Collective test starting: all_reduce_perf"


def test_readers_of_nccl_tests_read_it():
    cells = [make(4e-3, 4 * M), make(1e-3, M), make(20e-6, 8)]
    found = read_out_of_place(format_nccl_tests(cells))
    assert list(found) == [8, M, 4 * M]
    assert found[M] == {"time": 1000, "algbw": 1.05, "busbw": 1.57, "#wrong": 0}
    assert found[8]["time"] == 20
    bad = replace(make(), details={"wrong": 3})
    text = format_nccl_tests([bad, make(size=K)])
    assert "# Out of bounds values : 3 FAILED" in text
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
    text = format_nccl_tests([make(1e-3, quantity=quantity)])
    (row,) = (line.split() for line in text.splitlines() if line[:1] == " ")
    assert row[1:5] == [str(count), "float", operator, str(root)]
    assert float(row[7]) == pytest.approx(1.048576 * factor, abs=0.005)
    # Of few elements the largest share counts.
    for size, share in ((4, 1), (12, 1), (16, 2)):
        text = format_nccl_tests([make(size=size, ranks=3, quantity="all-gather")])
        (row,) = (line.split() for line in text.splitlines() if line[:1] == " ")
        assert row[:2] == [str(size), str(share)]


def test_contenders_types_and_operators_have_tables_of_their_own():
    half = make(at={"type": "bfloat16", "operator": "average"})
    cells = [make(), make(size=K), make(contender="ring"), half, make(ranks=2)]
    cells.append(make(quantity="training step"))
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
