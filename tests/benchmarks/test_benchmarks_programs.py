"""``python -m benchmarks programs``: whole programs of torch.distributed, over both backends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmark_runs import check_drawing, record_benchmark
from benchmarks.measure.engine import CellGroup, find_speeds
from benchmarks.measure.programs import contenders, training
from benchmarks.measure.programs.worker import MAKERS
from benchmarks.records.schema import make_cell

COMPILED = "tokens-compiled"
PLAN = contenders.QUANTITY.parse([]).plan


def make(program: str, gloo: list[float], own: list[float]) -> CellGroup:
    place = {"quantity": "program", "ranks": 2, "details": {"digits": "the same"}}
    cells = [
        make_cell(times, contender=contender.name, **place)
        for contender, times in ((contenders.GLOO, gloo), (contenders.OWN, own))
    ]
    return CellGroup(ranks=2, cells=cells, facts={"program": program})


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.one_of(st.floats(0, 2 * contenders.TOLERANCE), st.just(float("nan"))),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([contenders.GLOO, contenders.OWN]),
    st.integers(0, 2),
)
def test_a_result_is_right_if_all_ranks_have_it_and_one_process_too(
    digests, error, expected, contender, calls
):
    answers = [{"digest": each, "error": error, "own_calls": calls} for each in digests]
    problem = contenders.find_problem(answers, contender, expected)
    alike = len({*digests}) == 1 and expected in (None, digests[0])
    alike &= (calls > 0) == (contender == contenders.OWN)
    assert (problem == "") == (alike and 0 <= error <= contenders.TOLERANCE)


def test_the_speed_is_that_of_rounds_and_kept_as_a_promise():
    groups = [make("tokens", [4, 8, 4] * 3, [1, 2, 1] * 3), make("barrier", [2] * 9, [3] * 9)]
    speeds = find_speeds(groups, contenders.OWN.name, contenders.GLOO.name)
    assert [each.estimate for each in speeds] == [4, pytest.approx(2 / 3)]
    rows = [line.split() for line in contenders.tabulate(groups, PLAN).splitlines()[1:]]
    assert [(row[0], row[-4]) for row in rows] == [("tokens", "4.00"), ("barrier", "0.67")]
    [target] = contenders.judge(groups, PLAN)
    assert target.met and "3 × Gloo's tokens" in str(target)
    assert not contenders.judge([make("tokens", [2.9] * 9, [1] * 9)], PLAN)[0].met


def test_a_training_updates_its_parameters_in_one_call():
    """One for each parameter takes as long as the gradients."""
    program = training.train_by_ddp(None, ranks=2, seed=1)
    with torch.profiler.profile() as profile:
        program.step()
    assert [event.name for event in profile.events()].count("aten::_fused_adamw_") == 1


@pytest.mark.mpi
def test_programs_are_checked_timed_printed_drawn_and_written(tmp_path):
    picture = tmp_path / "programs.svg"
    words = ["--ranks", "2", "--repetitions", "1", "--iterations", "3", "--output", str(picture)]
    quick = ["tokens", "ddp", "broadcast_object_list", "barrier"]
    _, found = record_benchmark(tmp_path / "a.jsonl", "programs", *words, "--programs", *quick)
    assert MAKERS.keys() == contenders.PROGRAMS.keys()
    assert {(cell.at["program"], cell.contender) for cell in found.cells} == {
        (name, contender.name) for name in quick for contender in (contenders.GLOO, contenders.OWN)
    }
    assert all(cell.details["digits"] == "the same" and cell.samples[0] > 0 for cell in found.cells)
    assert found.is_complete
    check_drawing(picture, "barrier", "mpiddp")


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "left_out", "why"),
    [
        # This is no compiler.
        (2, {COMPILED}, f"left out: {COMPILED} on 2 ranks: torch.compile failed: No working C++"),
        (3, {"tokens", COMPILED, "tokens-dtensor"}, "8 heads cannot be split over 3 ranks"),
        (4, set(), "left out"),
    ],
)
def test_all_programs_are_right_or_left_out_with_the_reason(tmp_path, ranks, left_out, why):
    words = ["--ranks", str(ranks), "--repetitions", "1", "--iterations", "2"]
    changes = {"CXX": "/none"} if ranks == 2 else {}
    printed, found = record_benchmark(tmp_path / "a.jsonl", "programs", *words, **changes)
    programs = {cell.at["program"] for cell in found.cells}
    assert programs == contenders.PROGRAMS.keys() - left_out, printed
    assert printed.count(why) == len(left_out)
