"""tune: from cells whose times are planted to the table that they must give."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.judge.choosing import RULE, SizeChoice, Way, choose, list_finalists, list_ranges
from benchmarks.measure.collectives.options import CollectivesPlan
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.trials import WRONG, Refusal, WrongResultError
from benchmarks.measure.tune import nccl, tuning
from benchmarks.records import schema as records
from benchmarks.records.schema import Cell, open_record, read_record
from benchmarks.show import results
from measured import MPIRUN
from mpiddp.collectives import MPI, SHARED
from mpiddp.collectives.tuning import Range, Section, read_table
from mpiddp.errors import ConfigurationError

SECTION = Section("all-reduce", (2,), "float32", "cpu", ())
DIRECT, RING = Way("direct", SHARED), Way("ring", MPI)
ROUNDS = 12


def make_cell(
    way: Way,
    seconds: float,
    *,
    size: int = 4096,
    buffer: str = "private",
    ran: str = "",
    noise: float = 0.01,
    rounds: int = ROUNDS,
    **changes: object,
) -> Cell:
    """A cell with a planted median; the rounds of all cells drift alike."""
    draw = random.Random(repr((way, size, buffer, seconds)))
    samples = [
        seconds * (1 + 0.5 * turn / ROUNDS) * (1 + draw.uniform(-noise, noise))
        for turn in range(rounds)
    ]
    details = {"maker": "mpiddp", "algorithm": way.algorithm, "transport": way.transport,
               "buffer": buffer, "ran": ran or f"{way.algorithm} over {way.transport}"}  # fmt: skip
    details.update(changes.pop("details", {}))  # type: ignore[call-overload]
    at = {"bytes": size, "type": "float32", "operator": "sum"}
    return records.make_cell(samples, **{
        "quantity": "all-reduce", "contender": f"mpiddp {way.algorithm}", "ranks": 2, "at": at,
        "details": details, **changes,
    })  # fmt: skip


def make_rule(seconds: float, **changes: object) -> Cell:
    return make_cell(RULE, seconds, ran="one-shot over shared-memory", **changes)  # type: ignore[arg-type]


def judge(*cells: Cell) -> SizeChoice:
    """The verdict on cells of one size."""
    verdicts, left_out = choose([cells])
    assert not left_out
    ((found,),) = verdicts.values()
    return found


@given(st.floats(1.0, 3.0), st.floats(0.0, 0.3), st.integers(0, 40))
def test_what_is_not_faster_is_never_chosen(factor, noise, seed):
    """All of its rounds are at least as slow as today's, or the rounds are too few to tell."""
    size = 8 * (seed + 1)
    rule = make_rule(1e-5, size=size, noise=0.0)
    slower = make_cell(DIRECT, factor * 1e-5 * (1 + noise), size=size, noise=noise / 2)
    few = make_cell(RING, 1e-6, size=size, rounds=5)
    assert judge(rule, slower, few).chosen == RULE


def test_what_is_faster_by_chance_among_many_is_not_chosen():
    """In 13 of 15 rounds one is faster, which says something of one and nothing of twenty."""
    # In an order in which a round says nothing of the next one.
    rounds = random.Random(5).sample([*(0.85 + place / 100 for place in range(13)), 1.03, 1.05], 15)
    rule, ring = (replace(each, samples=(1.0,) * 15) for each in (make_rule(1), make_cell(RING, 1)))
    lucky = replace(make_cell(DIRECT, 1), samples=tuple(rounds))
    others = [make_cell(Way(f"ring:segments={parts}", MPI), 1) for parts in range(2, 20)]
    alike = [replace(each, samples=ring.samples) for each in others]
    assert judge(rule, ring, lucky).chosen == DIRECT
    assert judge(rule, ring, lucky, *alike).chosen == RULE


@pytest.mark.parametrize(
    ("shared", "chosen"), [(8e-6, DIRECT), (10e-6, DIRECT), (10.5e-6, RULE), (20e-6, RULE)]
)
def test_it_may_be_slower_in_no_kind_of_buffer(shared, chosen):
    found = judge(
        make_rule(10e-6), make_cell(DIRECT, 5e-6), make_rule(10e-6, buffer="shared"),
        make_cell(DIRECT, shared, buffer="shared"),
    )  # fmt: skip
    assert found.chosen == chosen


def test_what_auto_could_not_run_is_left_out_with_the_reason():
    central = make_cell(Way("central", MPI), 1e-6)
    wrong = make_cell(RING, 1e-6, details={"wrong": 3})
    unknown = make_cell(Way("theirs", MPI), 1e-6)
    busy = make_cell(DIRECT, 1e-6)
    busy = Cell(**{**vars(busy), "at": {**busy.at, "busy": 2}})
    gloo = make_cell(DIRECT, 1e-6, details={"maker": "gloo"})
    verdicts, left_out = choose([[make_rule(1e-5), central, wrong, unknown, busy, gloo]])
    assert verdicts[SECTION][0].chosen == RULE
    assert [text.partition(": ")[2][:30] for text in left_out] == [
        "its servers contribute nothing",
        "its results were wrong",
        "no algorithm is called 'theirs",
    ]
    with pytest.raises(ConfigurationError, match="nothing to choose from: expected a collective"):
        choose([[make_cell(RING, 1e-6)]])


def test_rounds_are_paired_within_a_record_only():
    """The second record's machine is ten times slower, and the ring was not measured there."""
    first = [make_rule(1e-5), make_cell(RING, 2e-5), make_cell(DIRECT, 0.9e-5)]
    second = [make_rule(1e-4), make_cell(DIRECT, 0.9e-4)]
    ((found,),) = choose([first, second])[0].values()
    assert found.timings["private"][RING].ratio.estimate == pytest.approx(2, rel=0.02)
    assert found.chosen == DIRECT


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 34), st.sampled_from([RULE, DIRECT, RING])),
        min_size=1,
        unique_by=lambda pair: pair[0],
    )
)
def test_ranges_cover_what_was_measured_and_each_size_gets_its_choice(pairs):
    pairs.sort()
    ranges = list_ranges([SizeChoice(size, "", way, {}) for size, way in pairs])
    assert (ranges[0].least, ranges[-1].most) == (pairs[0][0], pairs[-1][0])
    for one, other in pairwise(ranges):
        assert other.least == one.most + 1
        assert (one.algorithm, one.transport) != (other.algorithm, other.transport)
        before = max(size for size, _ in pairs if size <= one.most)
        after = min(size for size, _ in pairs if size > one.most)
        assert one.most == math.isqrt(before * after)
    for size, way in pairs:
        (found,) = [each for each in ranges if each.least <= size <= each.most]
        assert (found.algorithm, found.transport) == way


def test_the_fastest_two_of_each_size_are_measured_anew_beside_todays_choice():
    fast = [make_cell(Way(name, MPI), place * 1e-5) for place, name in
            enumerate(["direct", "ring", "one-shot"], start=1)]  # fmt: skip
    other = make_cell(Way("double-tree", MPI), 1e-5, size=1 << 20)
    same, near = (make_cell(Way(name, SHARED), 1e-6) for name in ("one-shot", "ring"))
    found = list_finalists([make_rule(1e-9), *fast, other, same, near])
    assert set(found) == {Way("ring", "auto"), Way("direct", MPI), Way("double-tree", MPI)}


SIZES = (64, 1024, 65536, 1 << 20)


@pytest.fixture
def record(tmp_path):
    """direct is fastest up to 1024 B, double-tree and ring beyond; today's choice is one-shot."""
    path = tmp_path / "record.jsonl"
    environment = {"date": "today", "packages": {"mpiddp": "1"}, "node": "secret"}
    with open_record(path, "allreduce", environment, {}) as writer:
        for size in SIZES:
            writer.add(make_rule(1e-5, size=size))
            fast = [Way("direct", SHARED), Way("direct", SHARED), Way("double-tree", MPI), RING]
            for place, way in enumerate(dict.fromkeys(fast)):
                is_fastest = fast[SIZES.index(size)] == way
                writer.add(make_cell(way, 0.5e-5 if is_fastest else (2 + place) * 1e-5, size=size))
    return path


def test_a_record_becomes_a_table(record, tmp_path, capsys):
    table, csv = tmp_path / "table.json", tmp_path / "nccl.conf"
    tuning.main([str(record), "--output", str(table), "--output", str(csv)])
    found = read_table(table)
    assert found.made["date"] == "today" and "secret" not in table.read_text()
    (section,) = found.sections
    assert section.ranges == (
        Range(64, 8192, "direct", SHARED),
        Range(8193, 262144, "double-tree", MPI),
        Range(262145, 1 << 20, "ring", MPI),
    )
    lines = [line for line in csv.read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        "allreduce,8193,32768,tree,ll,-1,1,2,-1,-1",
        "allreduce,32769,262144,tree,simple,-1,1,2,-1,-1",
        "allreduce,262145,1048576,ring,simple,-1,1,2,-1,-1",
    ]
    said = capsys.readouterr().out
    assert "all-reduce of float32, 2 ranks on 1 node, CPU" in said
    assert "auto in 0 of 4 cells, what was chosen in 4." in said
    assert "2.00 × (1.9" in said
    assert (
        "NCCL has no such algorithm: all-reduce on 2 ranks on 1 node, 64 to 8192 B: direct." in said
    )


def test_a_second_type_is_told_and_not_written_for_nccl(tmp_path):
    ways = {Section("all-reduce", (2,), kind, "cpu", ()): [SizeChoice(8, "ring over mpi", RULE, {})]
            for kind in ("float32", "bfloat16")}  # fmt: skip
    left_out = nccl.write_csv(tmp_path / "nccl.csv", ways)
    assert left_out == ["all-reduce of bfloat16: a line knows no type"]
    assert (tmp_path / "nccl.csv").read_text().count("\nallreduce,") == 1


def test_what_cannot_be_tuned_by_is_refused(record, tmp_path, monkeypatch, capsys):
    text = record.read_text()
    for content, said in {
        text[:-30]: "record.jsonl, line 18: expected JSON",
        text.replace('"kind"', '"collectives": {"tuning": "t"}, "kind"'): "with a tuning table",
        text.replace("all-reduce", "checkpoint"): "nothing to choose from",
    }.items():
        record.write_text(content)
        with pytest.raises(ConfigurationError, match=said):
            tuning.main([str(record), "--output", str(tmp_path / "table.json")])
        if "tuning" in said:
            tuning.main([str(record)])
            assert "auto in 0 of 4 cells" in capsys.readouterr().out
        assert not (tmp_path / "table.json").exists()
    for words, said in {
        (str(record), "--ranks", "2"): "--ranks is for a measurement",
        (str(record), "--output", "a.csv"): "--output a.csv is for a measurement",
        (str(record), "--output", str(tmp_path)): "expected a name that ends in .json",
        ("--output", "nowhere/table.json"): "there is no directory nowhere",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            tuning.main(words)
    monkeypatch.setenv("MPIDDP_TUNING", "table.json")
    with pytest.raises(ConfigurationError, match="MPIDDP_TUNING is set"):
        tuning.main(["--output", str(tmp_path / "table.json")])


def test_a_row_says_what_runs_today_what_is_best_and_what_is_chosen():
    """Of twelve rounds that drift from 10 to 14.6 µs the median is 12.3 µs."""
    verdicts, _ = choose([[make_rule(1e-5, noise=0.0), make_cell(DIRECT, 2e-5)]])
    (found,) = verdicts.values()
    text = tuning.format_section(SECTION, found)
    assert text.splitlines()[2].split() == [
        "4", "KiB", "private", "one-shot", "over", "shared-memory", "12.3", "µs", "auto", "12.3",
        "µs", "the", "same", "12.3", "µs",
    ]  # fmt: skip


def plant(monkeypatch, measure) -> None:
    monkeypatch.delenv("MPIDDP_TUNING", raising=False)
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "check_run", lambda run, ranks: None)
    monkeypatch.setattr(results, "describe_environment", lambda launcher: {"date": "today"})
    monkeypatch.setattr(results, "describe_heading", lambda environment: "")
    monkeypatch.setattr(results, "find_hosts", lambda launcher: [])


def test_what_was_measured_before_an_interruption_becomes_a_table(tmp_path, monkeypatch, capsys):
    """Everything is screened, then the finalists are measured, at the first of two sizes."""
    plans = []

    def measure(plan: CollectivesPlan, launcher: object) -> Iterator[CellGroup]:
        plans.append(plan)
        for size in plan.bytes:
            if len(plans) == 2 and size > plan.bytes[0]:
                raise KeyboardInterrupt
            cells = [make_rule(1e-5, size=size)]
            for way, seconds in ((RING, 0.9e-5), (DIRECT, 0.5e-5), (Way("double-tree", MPI), 2e-5)):
                cells.append(make_cell(way, seconds, size=size))
            yield CellGroup(ranks=2, cells=cells)

    plant(monkeypatch, measure)
    table, record = tmp_path / "table.json", tmp_path / "record.jsonl"
    files = ["--output", str(table), "--output", str(record)]
    with pytest.raises(KeyboardInterrupt):
        tuning.main(["--ranks", "2", "--sizes", "4K", "64K", *files])
    assert [plan.repetitions for plan in plans] == [3, 15]
    assert plans[1].algorithms == ("auto", "direct", "ring")
    assert plans[1].transports == ("auto", "mpi")
    (section,) = read_table(table).sections
    assert section.ranges == (Range(4096, 4096, "direct", SHARED),)
    assert len(read_record(record).cells) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:4] == [
        "screened: all-reduce on 2 ranks, 4 KiB of float32",
        "screened: all-reduce on 2 ranks, 64 KiB of float32",
        "measured: all-reduce on 2 ranks, 4 KiB of float32",
    ]
    assert lines[-1].startswith("Written: ")


def test_what_is_wrong_while_all_are_screened_is_an_error(tmp_path, monkeypatch):
    wrong = Refusal(quantity="all-reduce", contender="mpiddp pat", at={"ranks": 2, "bytes": 4096},
                    reason="its result has 3 wrong elements", kind=WRONG)  # fmt: skip

    def measure(plan: CollectivesPlan, launcher: object) -> Iterator[CellGroup]:
        refusals = [wrong] if plan.repetitions == tuning.SCREENING_ROUNDS else []
        cells = [make_rule(1e-5), make_cell(DIRECT, 0.5e-5)]
        yield CellGroup(ranks=2, cells=cells, refusals=refusals)

    plant(monkeypatch, measure)
    table = tmp_path / "table.json"
    with pytest.raises(WrongResultError, match="all-reduce, mpiddp pat, 2 ranks, 4 KiB: its"):
        tuning.main(["--ranks", "2", "--sizes", "4K", "--output", str(table)])
    assert read_table(table).sections


def test_few_ways_are_not_screened(monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda *arguments: pytest.fail("it was measured"))
    for algorithms, transports in ((("auto", "ring"), ("auto", "mpi")), (("auto",), ("auto",))):
        plan = CollectivesPlan(algorithms=algorithms, transports=transports)
        assert tuning.find_finalists(plan, MPIRUN) == (plan, ())
    plan = CollectivesPlan(algorithms=("auto", *"abc"), transports=("auto", "mpi"))
    with pytest.raises(pytest.fail.Exception):
        tuning.find_finalists(plan, MPIRUN)
