"""The order of summation: sums by hand, what theory expects, and the command."""

import math

import pytest
import torch

from benchmark_runs import check_drawing
from benchmarks.records.schema import read_record
from benchmarks.study import numerics, summation
from benchmarks.study.summation import DTYPES, ROUNDING, Accumulation
from mpiddp.errors import ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import Collective, Schedule, Transfer

NATIVE, STEP, THROUGHOUT = Accumulation


def _sum(name, rows, accumulation):
    """What rank 0 ends with, of a row of float16 per rank."""
    inputs = torch.tensor(rows, dtype=torch.float16)
    schedule = registry.parse(name).build(len(rows))
    return summation.all_reduce(schedule, inputs, accumulation)[0].tolist()


# Sums by hand. From 2048 on float16 has even numbers only, and a tie goes to a multiple of 4:
# 2048 + 1 = 2048, but 2048 + (1 + 1) = 2050.

ONES = [[2048.0] * 3, [1.0] * 3, [1.0] * 3]
HALVES = [[2048.0], [0.75], [0.5]]
"""The sum 2049.25 is nearer to 2050 than to 2048; each alone is lost."""


@pytest.mark.parametrize(
    ("name", "rows", "accumulation", "expected"),
    [
        # Chunk c goes once round, from rank c + 1: chunk 0 meets rank 0's 2048 last.
        ("ring", ONES, NATIVE, [2050, 2048, 2048]),
        ("ring", ONES, STEP, [2050, 2048, 2048]),
        ("ring", ONES, THROUGHOUT, [2050, 2050, 2050]),
        ("one-shot", ONES, NATIVE, [2048, 2048, 2048]),
        ("one-shot", ONES, STEP, [2050, 2050, 2050]),
        # The last rank serves, and adds nothing of its own.
        ("central", ONES, THROUGHOUT, [2048, 2048, 2048]),
        # Rounded once, at the end.
        ("naive-ring", HALVES, THROUGHOUT, [2050]),
        ("naive-ring", HALVES, NATIVE, [2048]),
    ],
)
def test_float16_values_are_rounded_where_the_schedule_says(name, rows, accumulation, expected):
    assert _sum(name, rows, accumulation) == expected


def test_the_errors_are_relative_to_the_sum_in_float64():
    schedule, inputs = registry.parse("ring").build(3), torch.tensor(ONES, dtype=torch.float16)
    error = summation.measure(schedule, inputs, NATIVE)
    # Exact are 2050 everywhere; found are 2050, 2048, 2048.
    assert error.rms == pytest.approx(math.sqrt(4 + 4) / math.sqrt(3 * 2050**2))
    assert error.largest == pytest.approx(2 / 2050)
    assert summation.measure(schedule, inputs, THROUGHOUT) == summation.Error(0, 0)
    # A sum outside the type is an infinite error.
    assert summation.measure(schedule, 30000 + 0 * inputs, THROUGHOUT).rms == math.inf


def test_ranks_that_end_with_different_bits_are_named():
    # Rank 0 has (2048 + 1) + 1 and passes it to rank 1; rank 2 has (1 + 1) + 2048, which rank 3,
    # a server, kept for it.
    steps = (
        (Transfer(0, 3, 0, 1, True), Transfer(2, 0, 0, 1, True), Transfer(1, 2, 0, 1, True)),
        (Transfer(1, 0, 0, 1, True), Transfer(3, 2, 0, 1, True)),
        (Transfer(0, 1, 0, 1, False),),
    )
    schedule = Schedule(Collective.ALL_REDUCE, 4, 1, steps, (0, 1, 2))
    inputs = torch.tensor([[2048.0], [1.0], [1.0], [0.0]], dtype=torch.float16)
    assert summation.all_reduce(schedule, inputs, NATIVE).tolist() == [[2048], [2048], [2050]]
    with pytest.raises(ScheduleError, match="ranks 0 and 2 ended with sums of different bits"):
        summation.measure(schedule, inputs, NATIVE)
    summation.measure(schedule, inputs, THROUGHOUT)


def test_zeros_of_different_sign_are_different_bits_and_nans_are_not():
    schedule = registry.parse("one-shot").build(2)
    with pytest.raises(ScheduleError, match="different bits"):
        summation.check_same_bits(schedule, torch.tensor([[0.0], [-0.0]], dtype=torch.float16))
    nans = torch.tensor([[0x7E00], [-0x200]], dtype=torch.int16).view(torch.float16)
    assert nans.isnan().all()
    summation.check_same_bits(schedule, nans)


@pytest.mark.parametrize(
    ("name", "ranks", "depth"),
    [
        ("naive-ring", 8, 7),
        ("central", 8, 6),  # the server contributes nothing
        ("recursive-doubling", 6, 3),  # two ranks fold, then four double
        ("binomial-tree", 64, 6),
        ("two-level", 8, 4),  # four in each node, then two nodes
        ("ring:segments=3", 7, 6),
    ],
)
def test_the_depth_is_that_of_the_known_tree(name, ranks, depth):
    assert summation.describe_order(registry.parse(name).build(ranks)).depth == depth


def test_the_inputs_are_those_of_the_seed_and_scaled():
    one, again, other = (summation.draw_inputs(3, 99, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(summation.draw_inputs(3, 99, 1, 4.0), 4 * one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["ring", "direct", "two-level", "double-tree"])
def test_the_measured_error_is_the_expected_one(name, dtype):
    schedule = registry.parse(name).build(16)
    inputs = summation.draw_inputs(16, 4096, seed=1).to(getattr(torch, dtype))
    order = summation.describe_order(schedule)
    assert torch.finfo(inputs.dtype).eps == numerics.EPSILONS[dtype]
    rounding = ROUNDING * numerics.EPSILONS[dtype]
    for accumulation in summation.list_accumulations(dtype):
        error = summation.measure(schedule, inputs, accumulation)
        assert error.rms == pytest.approx(order.expect(accumulation) * rounding, rel=0.12)
        assert error.rms < error.largest


SMALL = ["--ranks", "4", "2", "--elements", "12"]


def test_the_command_prints_tables_and_writes_a_record_and_a_drawing(tmp_path, capsys):
    record, drawing = tmp_path / "numerics.jsonl", tmp_path / "numerics.svg"
    numerics.main([*SMALL, "--output", str(record), "--output", str(drawing), "--seed", "3"])
    lines = capsys.readouterr().out.splitlines()
    # A type's name ends with the middle one of its three columns.
    assert lines[2].endswith("bfloat16") and lines[3][: len(lines[2])].endswith(" in step")
    for name in registry.names():
        (first, second) = (line.split() for line in lines if line.split()[:1] == [name])
        assert len(first) == len(second) == 4 + 7
    found = read_record(record)
    assert [found.options[name] for name in ("seed", "elements", "scale")] == [3, 12, 1.0]
    assert "PCG64" in found.others[0]["generator"]
    # Without what the version says of its build.
    versions = (torch.__version__, found.environment["packages"]["torch"])
    assert len({version.partition("+")[0] for version in versions}) == 1
    rows = dict.fromkeys((cell.ranks, cell.contender) for cell in found.cells)
    assert list(rows) == [(ranks, name) for ranks in (2, 4) for name in registry.names()]
    ring = [cell for cell in found.cells if (cell.ranks, cell.contender) == (4, "ring")]
    rms, largest = ring[::2], ring[1::2]
    assert (ring[0].details["inputs"], ring[0].details["depth"], len(rms)) == (4, 3, 7)
    assert [each.details["growth"] for each in rms[1:4]] == pytest.approx([1.5, 1.5, 1])
    for usual, worst in zip(rms, largest, strict=True):
        assert 0 <= usual.samples[0] <= worst.samples[0]
    check_drawing(drawing)

    chosen = ["ring:segments=2", "central", "central", "--dtype", "float16"]
    numerics.main([*chosen, *SMALL, "--error", "largest"])
    text = capsys.readouterr().out
    assert text.count("ring:segments=2 ") == text.count("central ") == 2  # one for each of --ranks
    assert "bfloat16" not in text and "one-shot" not in text and "worst element" in text


def test_an_overflow_is_shown_explained_and_no_cell_of_the_record(tmp_path, capsys):
    record, drawing = tmp_path / "a.jsonl", tmp_path / "a.png"
    options = ["ring", *SMALL, "--scale", "40000", "--dtype", "float16"]
    numerics.main([*options, "--output", str(record), "--output", str(drawing)])
    printed = capsys.readouterr().out
    assert "65504" in printed and printed.count(" nan") >= 6
    refused = [line for line in read_record(record).others if line["kind"] == "refusal"]
    assert [line["at"]["ranks"] for line in refused if line["at"]["error"] == "rms"][:1] == [2]
    assert drawing.read_bytes().startswith(b"\x89PNG")


def test_lines_in_the_same_place_are_one_and_the_others_are_not(tmp_path, monkeypatch):
    series = {"a": [1.0, 2.0], "b": [1.01, 1.99], "c": [1.0, 3.0], "d": [math.nan, 2.0]}
    assert numerics.group_alike(series) == [["a", "b"], ["c"], ["d"]]
    assert numerics.group_alike({"a": [math.nan], "b": [math.nan]}) == [["a", "b"]]
    colours = {}
    monkeypatch.setattr(numerics, "write_sheet", lambda *given: colours.update(given[2]))
    numerics.main(["ring", "naive-ring", *SMALL, "--output", f"{tmp_path}/a.svg"])
    # Each line has the colour of its first algorithm, whatever it shares in this chart.
    assert colours == {"ring": 0, "naive-ring": 1, "all": 0}
