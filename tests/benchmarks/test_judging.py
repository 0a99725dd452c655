"""Is A slower than B: ratios, intervals, rounds that are alike; and what ``compare`` says of it."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.judge import ratios
from benchmarks.judge.changes import FASTER, SAME, SLOWER, UNKNOWN, Rule, judge
from benchmarks.judge.choosing import choose
from benchmarks.judge.correlation import find_coefficient, find_widening
from benchmarks.judge.targets import Target
from benchmarks.judge.winners import make_groups, name_places
from benchmarks.measure.collectives.measurement import QUANTITIES
from benchmarks.measure.compare import again, comparison
from benchmarks.measure.compare.comparison import RegressionError
from benchmarks.measure.tune import tuning
from benchmarks.records import schema as records
from benchmarks.records.environment import find_commit, find_processor
from benchmarks.records.material import Measured
from benchmarks.records.schema import Cell, open_record, read_record
from benchmarks.records.statistics import median_interval
from benchmarks.study import fitting as fit
from benchmarks.study import reporting as report
from mpiddp.errors import ConfigurationError
from planted_records import Noise, make_record

RULE = Rule(tolerance=0.05, error_rate=0.01)


def make_cell(samples, contender="ours", unit="s", **at) -> Cell:
    return records.make_cell(
        samples, quantity="all-reduce", contender=contender, ranks=2, at=at, unit=unit
    )


few = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@given(few, few, st.sampled_from([0.5, 1.0, 1.25]))
def test_a_probability_counts_all_orders_of_the_values(olds, news, ratio):
    """As enumerated: of all ways to choose the new ones among the values, as many pairs above."""
    pairs = [(new, ratio * old) for new in news for old in olds]
    above = sum((new > old) + (new == old) / 2 for new, old in pairs)
    size, ways = len(olds) + len(news), 0
    for chosen in itertools.combinations(range(size), len(news)):
        others = [place for place in range(size) if place not in chosen]
        ways += sum(a > b for a in chosen for b in others) >= math.floor(above)
    expected = ways / math.comb(size, len(news))
    found = replace(ratios.compare_runs(olds, [news], 0.0), widening=1.0)
    assert found.find_probability(ratio) == pytest.approx(expected)


def test_many_pairs_have_the_normal_distribution():
    exact = ratios.tail(50, 50, 1600)
    assert ratios.tail(50, 51, 1632) == pytest.approx(exact, rel=0.1)
    # Up to 2500 they are counted: of so many and one, that one is the greatest.
    assert ratios.tail(2500, 1, 2500) == pytest.approx(1 / 2501)


def test_three_values_have_a_ratio_and_no_interval():
    found = ratios.compare_runs([1.0, 2.0, 3.0], [[2.0, 4.0, 6.0]], 0.0)
    assert found.estimate == 2 and found.interval is None


def test_probabilities_of_a_family_are_those_of_holm():
    """The example of Holm's procedure: 0.01, 0.04, 0.03 and 0.005 for four tests."""
    found = ratios.adjust({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40), st.sampled_from([0.9, 0.95, 0.99]))
def test_rounds_that_are_independent_have_the_interval_of_their_median(values, confidence):
    found = replace(ratios.compare_rounds([1.0] * len(values), values, 0.0), widening=1.0)
    interval, expected = found.find_interval(confidence), median_interval(values, confidence)
    assert (interval is None) == (expected is None)
    if interval is not None and expected is not None:
        assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("coefficient", "rounds"), [(0.0, 10), (0.3, 20), (0.7, 8), (0.7, 60)])
def test_the_coefficient_of_many_series_is_found(coefficient, rounds):
    noise = Noise(alike=0.1, coefficient=coefficient)
    series = numpy.exp(noise.draw(numpy.random.default_rng(1), 400, rounds)).tolist()
    found = find_coefficient([series])
    assert coefficient - 0.05 <= found <= coefficient + 0.15


@pytest.mark.parametrize("coefficient", [0.3, 0.7])
def test_intervals_are_as_much_wider_as_means_differ_more(coefficient):
    """Of ten rounds each: the spread of t-values, by that of independent rounds."""
    generator = numpy.random.default_rng(2)

    def spread(noise: Noise) -> float:
        found = noise.draw(generator, 20_000, 10)
        return float(numpy.std(found.mean(1)) / math.sqrt(numpy.var(found, axis=1, ddof=1).mean()))

    alike = Noise(alike=0.1, coefficient=coefficient)
    expected = spread(alike) / spread(Noise(independent=0.1))
    # The spread of ten that are alike is less known, which widens it by another third or so.
    restless = [[1.0, 1.1] * 5]
    assert expected <= find_widening(restless, coefficient) <= 1.4 * expected


def test_what_cannot_be_told_from_the_rounds_is_not_judged():
    rising = [1 + 0.01 * place for place in range(10)]
    assert find_widening([rising], 0.0) == math.inf
    assert find_coefficient([[[1.0, 2.0]]]) == 1 and find_widening([[1.0, 2.0]], 1.0) == math.inf
    found = ratios.compare_runs(rising, [[2 * value for value in rising]], 0.0)
    assert found.interval is None and found.find_probability(1.0) > 0.3
    # A round that was disturbed hides no drift.
    assert find_coefficient([[[*rising[:5], 100.0, *rising[5:]]]]) == 1
    # Counts and prices have no noise.
    assert find_coefficient([[[5.0] * 6]]) == 0 and find_widening([[5.0] * 6], 0.0) == 1


def make_pairs(noise: Noise, seed: int, cells=24, rounds=10, factor=1.0):
    """Cells of two runs; the second one's first cell takes so many times longer."""
    generator = numpy.random.default_rng(seed)
    old, new = (numpy.exp(noise.draw(generator, cells, rounds)) for _ in range(2))
    new[0] *= factor
    return {
        (place,): tuple(make_cell(run[place].tolist(), f"cell {place}") for run in (old, new))
        for place in range(cells)
    }


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(Noise(alike=0.1), id="each cell its own states"),
        pytest.param(Noise(0.03, neighbour=1.3, is_shared=True), id="a neighbour of all cells"),
    ],
)
def test_equal_records_whose_rounds_are_alike_give_no_alarm(noise):
    verdicts = [judge(make_pairs(noise, trial), RULE) for trial in range(100)]
    # Of 100 pairs, at one in a hundred: six or more have a probability of 0.05 %.
    assert sum(any(each.word == SLOWER for each in found) for found in verdicts) <= 5


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(Noise(0.02), id="quiet"),
        pytest.param(Noise(0.02, neighbour=1.3, stays=2), id="beside a busy process"),
    ],
)
def test_a_tenth_slower_is_found_and_equal_cells_are_not(noise):
    """In 50 pairs of records of 24 cells, 23 of which are equal; slow ones are measured again."""
    found = alarms = 0
    for trial in range(50):
        seeds = iter((1000 + trial, 2000 + trial))

        def measure(_, seeds=seeds):
            pairs = make_pairs(noise, next(seeds), rounds=20, factor=1.1)
            return make_record([new for _, new in pairs.values()])

        pairs = make_pairs(noise, trial, rounds=20, factor=1.1)
        verdicts = judge({old.key: (old, new) for old, new in pairs.values()}, RULE, measure, 2)
        named = {each.new.contender for each in verdicts if each.word == SLOWER}
        found, alarms = found + ("cell 0" in named), alarms + bool(named - {"cell 0"})
    assert found >= 47 and alarms <= 1


def test_a_record_whose_rounds_are_alike_is_not_said_to_be_the_same():
    words = [each.word for each in judge(make_pairs(Noise(alike=0.1), 4), RULE)]
    assert words.count(UNKNOWN) >= 14


def ask_all(seed: int, seconds: float) -> set[str]:
    """Who says that a ring which takes so long is faster than today's choice, which takes 1."""
    generator = numpy.random.default_rng(seed)
    today, ring = (
        records.make_cell(
            (each * generator.lognormal(0, 0.1, 12)).tolist(), quantity="all-reduce", ranks=2,
            contender=f"mpiddp {name}", at={"bytes": 64, "type": "float32", "operator": "sum"},
            details={"maker": "mpiddp", "algorithm": name, "transport": "auto",
                     "ran": f"{ran} over mpi", "buffer": "private"},
        )
        for name, ran, each in (("auto", "direct", 1.0), ("ring", "ring", seconds))
    )  # fmt: skip
    ((table,),) = choose([[today, ring]])[0].values()
    (group,) = make_groups([Measured(each, 0, each.contender) for each in (today, ring)])
    (page,) = group.verdicts.values()
    pair = (today.samples, ring.samples)
    ratio = ratios.compare_rounds(*pair, ratios.find_common([pair]))
    says = {
        "table": table.chosen.algorithm == "ring",
        "page": page.is_settled and page.winner.cell is ring,
        "target": bool(Target("time", {"": ratio}, at_most=1.0).met),
        "miss": Target("time", {"": ratio}, at_least=1.0).met is False,
    }
    return {name for name, is_said in says.items() if is_said}


def test_all_that_ask_get_one_answer_and_equal_contenders_hardly_ever_a_wrong_one():
    wrong = [ask_all(seed, 1.0) for seed in range(100)]
    found = [ask_all(seed, 0.7) for seed in range(50)]
    everyone = {"table", "page", "target", "miss"}
    assert all(each in (set(), everyone) for each in wrong + found)
    # Of 100 at 0.025: eight or more have a probability of 0.4 %.
    assert sum(map(bool, wrong)) <= 7 and sum(map(bool, found)) >= 34


def test_a_place_with_nothing_of_its_own_keeps_where_it_was_measured():
    plain = replace(make_cell([1.0], "a"), at={"bytes": 64, "type": "float32"})
    busy = replace(plain, at={**plain.at, "busy": 2})
    names, common = name_places(make_groups([Measured(each, 0, "a") for each in (plain, busy)]))
    assert names == ["2 ranks on 1 node", "2 ranks on 1 node, beside 2 busy processes"]
    assert common == ["float32"]


def test_a_promise_with_two_bounds_is_kept_only_within_both():
    values = [0.80, 0.80, 0.80, 1.01, 1.02, 1.05, 1.1, 1.1, 1.1]
    ratio = replace(ratios.compare_rounds([1.0] * 9, values, 0.0), widening=1.0)
    assert ratio.interval is not None and ratio.interval.low == 0.80
    assert Target("model", {"": ratio}, at_least=0.85, at_most=1.15).met is None
    assert Target("model", {"": ratio}, at_least=0.75, at_most=1.15).met


def test_a_promise_is_judged_at_each_place_where_the_rounds_tell():
    rounds = {"quick": [1.1, 1.2, 1.3] * 4, "like": [0.9, 1.2, 1.3] * 4, "few": [1.2] * 3}
    found = {name: ratios.compare_rounds([1.0] * 12, each, 0.0) for name, each in rounds.items()}
    target = Target("speed", found, at_least=1.0)
    unknown = "cannot be judged from these rounds"
    said = f"speed: quick 1.200, like 1.200 ({unknown}), few 1.200 ({unknown}): {unknown}"
    assert str(target) == said
    assert target.met is None and replace(target, measured={"quick": 1.2}).met
    # A number stands for itself.
    assert replace(target, measured={"like": 1.2, "never": None}).met is False
    assert replace(target, at_most=1.25, measured={"quick": found["quick"]}).met is None
    slow = {place: each.turned for place, each in found.items()}
    assert [replace(target, measured=slow).judge(each) for each in slow] == [False, None, None]


def judge_two(olds, news, **changes):
    old, new = make_cell(olds, **changes), make_cell(news, **changes)
    return judge({old.key: (old, new)}, RULE)[0]


PLACES = (3, 8, 0, 6, 1, 9, 4, 2, 7, 5)
"""In no order: rounds that rise or fall together would say less."""
TIMES = [1 + 0.01 * place for place in PLACES]


def test_a_rate_is_turned_round():
    half = [value / 2 for value in TIMES]
    assert judge_two(TIMES, half).word == FASTER
    lower = judge_two(TIMES, half, unit="samples/s")
    assert lower.word == SLOWER and lower.ratio.estimate == 0.5 and lower.slowdown == 2


def test_a_change_within_the_tolerance_does_not_count_and_what_cannot_be_told_is_said():
    assert judge_two([1.0], [1.0]).word == judge_two(TIMES, TIMES).word == SAME
    wild = [1.0, 3.0, 9.0, 27.0, 1.0, 3.0, 9.0, 27.0]
    assert judge_two([1.0], [1.1]).word == judge_two(wild, wild).word == UNKNOWN
    assert judge_two(TIMES, [1.04 * value for value in TIMES]).word != SLOWER
    exact = [1 + 1e-4 * place for place in PLACES]
    assert judge_two(exact, [1.04 * value for value in exact]).word == SAME
    assert judge_two(exact, [1.06 * value for value in exact]).word == SLOWER


def test_the_median_of_the_runs_decides():
    """One slow run of three is no regression, two are one; even if all differ clearly."""
    exact = [1 + 1e-4 * place for place in PLACES]
    old, near, slow = (make_cell([f * value for value in exact]) for f in (1, 1.04, 1.5))
    for others, is_slower in (((near, near), False), ((near, slow), True)):
        runs = iter(others)
        (found,) = judge(
            {old.key: (old, slow)}, RULE, lambda _, runs=runs: make_record([next(runs)]), again=2
        )
        assert len(found.runs) == 3 and (found.word == SLOWER) == is_slower


def write(path: Path, cells, benchmark="allreduce", **environment) -> Path:
    place = {"processor": find_processor(), "commit": find_commit(), "packages": {"torch": "1"}}
    with open_record(path, benchmark, {**place, **environment}, OPTIONS) as record:
        for cell in cells:
            record.add(cell)
    return path


def scale(factor: float):
    return [factor * value for value in TIMES]


def test_the_table_names_what_changed(tmp_path, capsys):
    at = {"bytes": 4096, "type": "float32"}
    olds = [make_cell(TIMES, "ring", **at), make_cell(TIMES, "gone")]
    news = [make_cell(scale(1.5), "ring", **at), make_cell(TIMES, "added")]
    old = write(tmp_path / "old", olds, cores=2)
    new = write(tmp_path / "new", news, cores=4, packages={"torch": "2"})
    out = tmp_path / "verdicts.jsonl"
    with pytest.raises(RegressionError, match="1 cell of 1 became slower") as caught:
        comparison.main([str(old), str(new), "--again", "0", "--output", str(out)])
    assert caught.value.exit_code == 1
    shown = capsys.readouterr()
    assert "all-reduce, ring, 2 ranks, 4 KiB, float32" in shown.out and "1.500" in shown.out
    assert "only in OLD:\n  all-reduce, gone, 2 ranks" in shown.out
    assert "only in NEW:\n  all-reduce, added, 2 ranks" in shown.out
    assert "error rate 0.01 over all cells" in shown.out
    assert "warning: cores was 2, is now 4" in shown.err
    assert "warning: torch was 1, is now 2" in shown.err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "verdict", "gone", "added", "end"]
    assert lines[1]["verdict"] == "slower" and lines[1]["ratio"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("olds", "news", "benchmark", "expected"),
    [
        (["a"], ["a"], "checkpoint", "is a record of allreduce, .* one of checkpoint"),
        (["a"], ["b"], "allreduce", "have no cell in common"),
        (["a", "a"], ["a"], "allreduce", "old has all-reduce a 2 1 twice"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path, olds, news, benchmark, expected):
    old = write(tmp_path / "old", [make_cell(TIMES, name) for name in olds])
    new = write(tmp_path / "new", [make_cell(TIMES, name) for name in news], benchmark)
    with pytest.raises(ConfigurationError, match=expected):
        comparison.main([str(old), str(new)])


def test_counts_of_nothing_are_not_compared(tmp_path, capsys):
    cells = [make_cell([0.0], "counted"), make_cell(TIMES, "timed")]
    old, new = write(tmp_path / "old", cells), write(tmp_path / "new", cells)
    comparison.main([str(old), str(new), "--output", str(tmp_path / "verdicts.jsonl")])
    printed = capsys.readouterr().out
    assert "not compared, for values of 0 or another unit:\n  all-reduce, counted" in printed
    assert "1 cell: 0 slower, 0 faster, 0 unknown, 1 same" in printed
    # What has not changed is shown on request.
    comparison.main([str(old), str(new), "--all"])
    assert "timed" not in printed and "timed" in capsys.readouterr().out
    found = read_record(tmp_path / "verdicts.jsonl")
    assert found.is_complete and found.others[0]["verdict"] == "same"


OPTIONS = {"ranks": [2, 4], "sizes": [4096, 8192, 1 << 20], "types": ["int32", "int64"],
           "algorithms": ["auto", "ring"], "cold": True}  # fmt: skip


def test_a_command_line_is_restricted_to_the_suspects():
    words = "--ranks 2 4 --sizes 4K 8K 1M --cold --targets --algorithms=all"
    outputs = "--output x.svg --output=a.jsonl"
    ring = replace(make_cell(TIMES, "b", bytes=8192, type="int32"), details={"algorithm": "ring"})
    wanted = again.find_wanted([make_cell(TIMES, "a", bytes=4096), ring])
    found = again.restrict(f"{words} {outputs}".split(), OPTIONS, wanted)
    restricted = " --ranks 2 --sizes 4096 8192 --types int32 --algorithms ring"
    assert found == (words.replace(" --targets", "") + restricted).split()
    read = QUANTITIES["allreduce"].parse
    plan, again_plan = (read(each).plan for each in (words.split(), found))
    changed = {"ranks": (2,), "sizes": ((4096,), (8192,)), "types": ("int32",)}
    assert again_plan == replace(plan, **changed, algorithms=("ring",), probes=False)
    # An option of usual values; and point-to-point has no --ranks.
    assert again.restrict([], {"sizes": []}, {"sizes": ["8"]}) == ["--sizes", "8"]
    assert again.restrict([], {"ranks": [2]}, {"ranks": ["2"]}) == []


def test_suspects_are_measured_by_the_records_command(tmp_path, monkeypatch, capsys):
    """Slower in the record, not in two more runs: no regression."""
    ran = []

    def run(words):
        ran.append(words)
        write(Path(words[-1]), [make_cell(TIMES, "ring", bytes=4096)])
        return 0, ""

    monkeypatch.setattr(again, "_run", run)
    line = "python -m benchmarks allreduce --sizes 4K 1M --output new.jsonl"
    cells = [make_cell(TIMES, "ring", bytes=count) for count in (4096, 1 << 20)]
    old = write(tmp_path / "old", cells)
    slow = make_cell(scale(1.4), "ring", bytes=4096)
    new = write(tmp_path / "new", [slow, cells[1]], command=line)
    comparison.main([str(old), str(new)])
    assert len(ran) == 2 and ran[0][1:-1] == [
        *("-m", "benchmarks", "allreduce", "--sizes", "4K", "1M"),
        *("--ranks", "2", "--sizes", "4096", "--output"),
    ]
    assert "1.40 1.00 1.00" in capsys.readouterr().out


def test_a_run_that_is_interrupted_is_told_to_end_its_ranks(monkeypatch):
    monkeypatch.setattr(again, "subprocess", fake := MagicMock())
    process = fake.Popen.return_value.__enter__.return_value
    process.communicate.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        again._run([])
    assert [each[0] for each in process.method_calls] == ["communicate", "terminate", "wait"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"processor": "another"}, "its processor was another, here it is"),
        ({"commit": "0" * 12}, "its commit was 000000000000, here it is"),
        ({}, "does not hold the command line"),
        ({"command": "python -m benchmarks allreduce --sizes 3"}, "ended with exit code 2"),
    ],
)
def test_what_cannot_be_measured_again_is_said(tmp_path, capfd, environment, expected):
    old = write(tmp_path / "old", [make_cell(TIMES)])
    new = write(tmp_path / "new", [make_cell(scale(2))], **environment)
    with pytest.raises(RegressionError):
        comparison.main([str(old), str(new), "--again", "1"])
    shown = capfd.readouterr().err
    assert "cannot be measured again here, its one run decides" in shown and expected in shown


def test_a_record_that_is_read_is_not_overwritten(tmp_path):
    ends = {comparison: "jsonl", fit: "json", tuning: "json", report: "html"}
    for command, end in ends.items():
        read = write(tmp_path / f"a.{end}", [make_cell(TIMES)])
        before = read.read_text()
        with pytest.raises(ConfigurationError, match="is read, and would be overwritten"):
            command.main(["--output", *[str(read)] * (3 if command is comparison else 2)])
        assert read.read_text() == before
