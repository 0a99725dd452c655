"""``benchmarks compare``: planted changes are found, equal runs are not; what is said of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.judge.changes import FASTER, SAME, SLOWER, UNKNOWN, Rule, judge
from benchmarks.measure.collectives.measurement import QUANTITIES
from benchmarks.measure.compare import again, comparison
from benchmarks.measure.compare.comparison import RegressionError
from benchmarks.measure.tune import tuning
from benchmarks.records import schema as records
from benchmarks.records.environment import find_commit, find_processor
from benchmarks.records.schema import Cell, open_record, read_record
from benchmarks.study import fitting as fit
from benchmarks.study import reporting as report
from mpiddp.errors import ConfigurationError
from planted_records import make_record

RULE = Rule(tolerance=0.05, error_rate=0.01)


def make_cell(samples, contender="ours", unit="s", **at) -> Cell:
    return records.make_cell(
        samples, quantity="all-reduce", contender=contender, ranks=2, at=at, unit=unit
    )


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
    for others, word in (((near, near), SAME), ((near, slow), SLOWER)):
        runs = iter(others)
        (found,) = judge(
            {old.key: (old, slow)}, RULE, lambda _, runs=runs: make_record([next(runs)]), again=2
        )
        assert len(found.runs) == 3
        assert (found.word == SLOWER) == (word == SLOWER)


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
    found = read_record(tmp_path / "verdicts.jsonl")
    assert found.is_complete and found.others[0]["verdict"] == "same"


OPTIONS = {"ranks": [2, 4], "sizes": [4096, 8192, 1 << 20], "types": ["int32", "int64"],
           "algorithms": ["auto", "ring"], "cold": True}  # fmt: skip


def test_a_command_line_is_restricted_to_the_suspects():
    words = "--ranks 2 4 --sizes 4K 8K 1M --cold --targets --algorithms=all"
    outputs = "--output x.svg --output=a.jsonl"
    ring = make_cell(TIMES, "b", bytes=8192, type="int32")
    ring = replace(ring, details={"algorithm": "ring"})
    wanted = again.find_wanted([make_cell(TIMES, "a", bytes=4096), ring])
    found = again.restrict(f"{words} {outputs}".split(), OPTIONS, wanted)
    restricted = ["--ranks", "2", "--sizes", "4096", "8192", "--types", "int32"]
    restricted += ["--algorithms", "ring"]
    assert found == words.replace(" --targets", "").split() + restricted
    read = QUANTITIES["allreduce"].parse
    plan, again_plan = (read(each).plan for each in (words.split(), found))
    changed = {"ranks": (2,), "sizes": ((4096,), (8192,)), "types": ("int32",)}
    changed["algorithms"] = ("ring",)
    assert again_plan == replace(plan, **changed, probes=False)
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
    for main, name in (
        (comparison.main, "a.jsonl"), (fit.main, "a.json"), (tuning.main, "a.json"),
        (report.main, "a.html"),
    ):  # fmt: skip
        read = write(tmp_path / name, [make_cell(TIMES)])
        before = read.read_text()
        with pytest.raises(ConfigurationError, match="is read, and would be overwritten"):
            main([str(read)] * (2 if main is comparison.main else 1) + ["--output", f"{read}"])
        assert read.read_text() == before
