"""Models of planted machines: what was planted comes out, and what is no record is refused."""

import itertools
import math
import re
from dataclasses import astuple, replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planted_records as planted
from benchmark_runs import record_benchmark
from benchmarks.judge.fit.check import check_record, find_choice, list_reasons
from benchmarks.judge.fit.fitted import fit_records, read_fit, write_fit
from benchmarks.judge.fit.flow import flow
from benchmarks.judge.fit.segments import Point, fit_segments
from benchmarks.records.schema import read_record
from benchmarks.records.statistics import quantile, summarize
from benchmarks.study import fitting as command
from benchmarks.study import simulate as pricing
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import flat, simulate, split
from mpiddp.schedules.machine import Machine, MessageCost, Piece
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Transfer, all_reduce
from prices import FULL, build, machines

MACHINE = Machine(
    MessageCost(1e-6, 1e-10, (Piece(4096, 3e-6, 8e-11),)),
    MessageCost(2e-5, 8e-10, (Piece(65536, 2e-4, 7e-10),)),
    adding=MessageCost(2e-7, 1e-10),
)
"""A rendezvous from 4 KiB on inside nodes, from 64 KiB on between them."""
NOISE = 0.01


def fit_times(sizes, seconds):
    return fit_segments(list(map(Point, sizes, seconds)))


def is_near(found, wanted):
    return math.isclose(found, wanted, rel_tol=0.05)


def check_cost(found: MessageCost, wanted: MessageCost) -> None:
    for one, other in zip(found.lines, wanted.lines, strict=True):
        assert all(map(is_near, astuple(one), astuple(other))), (found, wanted)


@st.composite
def costs(draw):
    """A jump that noise does not hide, and lines of which both α and β matter."""
    latency, start = 10 ** draw(st.floats(-7, -4)), 10 ** draw(st.floats(3, 6.3))
    per_byte = latency / start * draw(st.floats(1, 20))
    before = latency + per_byte * start
    after = before * draw(st.floats(1.3, 3))
    slower = min(draw(st.floats(0.3, 1.5)) * per_byte, (after - 0.6 * before) / start)
    return MessageCost(latency, per_byte, (Piece(start, after - slower * start, slower),))


@settings(max_examples=25)
@given(cost=costs(), seed=st.integers(0, 1 << 30))
def test_a_planted_break_and_the_lines_beside_it_are_recovered(cost, seed):
    sizes = np.array(planted.DENSE_SIZES, dtype=float)
    noise = np.random.default_rng(seed).standard_normal(len(sizes))
    segments = fit_times(sizes, cost.seconds(sizes) * (1 + NOISE * noise))
    first, *others = segments
    pieces = tuple(Piece(each.start, each.latency, each.seconds_per_byte) for each in others)
    check_cost(MessageCost(first.latency, first.seconds_per_byte, pieces), cost)
    assert others[0].break_between[0] <= others[0].start <= others[0].break_between[1]


@settings(max_examples=15)
@given(latency=st.floats(1e-7, 1e-4), rate=st.floats(1e7, 1e11),
       seed=st.integers(0, 1 << 30), factor=st.sampled_from([1.06, 2, 4]))  # fmt: skip
def test_one_line_stays_one(latency, rate, seed, factor):
    sizes = 8 * factor ** np.arange(math.log(8 << 20, factor))
    noise = np.random.default_rng(seed).standard_normal(len(sizes))
    [line] = fit_times(sizes, (latency + sizes / rate) * (1 + NOISE * noise))
    assert line.error < 3 * NOISE and line.break_between is None
    times = line.latency + sizes * line.seconds_per_byte
    assert np.allclose(times, latency + sizes / rate, rtol=0.05)


def test_a_kink_is_found_where_the_lines_meet():
    # Additions that leave the cache: 1e-10 s for a byte, then 3e-10, without a jump.
    cost = MessageCost(1e-7, 1e-10, (Piece(1 << 20, 1e-7 - 2e-10 * (1 << 20), 3e-10),))
    sizes = np.array(planted.DENSE_SIZES, dtype=float)
    _, second = fit_times(sizes, cost.seconds(sizes))
    assert is_near(second.start, 1 << 20) and is_near(second.seconds_per_byte, 3e-10)
    # A line far below the later times would not fit.
    lines = fit_times(2.0 ** np.arange(12), [1] * 6 + [1000] * 6)
    assert [line.latency for line in lines] == pytest.approx([1, 1000])


def test_times_that_are_known_badly_weigh_little():
    sizes = 8 * 2.0 ** np.arange(16)
    times, errors = 1e-3 + sizes * 1e-7, np.where(sizes < 10000, 0.5, 0.0)
    noise = 1 + errors * np.random.default_rng(1).standard_normal(16)
    [line] = fit_segments(list(map(Point, sizes, times * np.abs(noise), errors)))
    assert is_near(line.seconds_per_byte, 1e-7)


def test_of_equal_sizes_the_least_time_counts_and_no_line_falls_or_begins_below_0():
    [line] = fit_times([8, 8, 8, 16, 16, 32, 32], [9, 1, 7, 1, 2, 9, 1])
    assert (line.start, line.latency, line.points, line.largest) == (0, pytest.approx(1), 3, 32)
    [line] = fit_times([8, 16, 32], [3.0, 2.0, 1.0])
    # The least squares of relative errors: by the sums of 1/t and of 1/t², then of their s/t.
    assert line.seconds_per_byte == 0 and line.latency == pytest.approx((11 / 6) / (49 / 36))
    [line] = fit_times([8, 16, 32], [1.0, 3.0, 7.0])
    rates = np.divide([8, 16, 32], [1, 3, 7])
    assert line.latency == 0 and line.seconds_per_byte == pytest.approx(sum(rates) / sum(rates**2))


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "messages.jsonl"
    return planted.write_record(path, planted.make_messages(MACHINE, planted.DENSE_SIZES, NOISE))


@pytest.fixture(scope="module")
def fit(messages):
    return fit_records([read_record(messages)], None, "float32")


def test_a_planted_machine_is_recovered(fit):
    machine = fit.make_machine((2, 2))
    for name in ("inside", "between", "adding"):
        check_cost(getattr(machine, name), getattr(MACHINE, name))
    assert fit.environment == planted.ENVIRONMENT


def test_only_plain_messages_of_the_contender_are_fitted(messages, fit, tmp_path):
    cells = list(read_record(messages).cells)
    slow = [replace(cell, summary=summarize([2, 3, 4, 4, 5, 6])) for cell in cells]
    others = [
        *(replace(cell, contender="Gloo") for cell in slow),
        *(replace(cell, at={**cell.at, "busy": 2}) for cell in slow),
        *(replace(cell, at={**cell.at, "direction": "both"}) for cell in slow[:2]),
        *(replace(cell, quantity="all-reduce") for cell in slow),
    ]
    others = [cell for cell in others if (cell.quantity, cell.contender) != ("reduction", "Gloo")]
    path = planted.write_record(tmp_path / "more.jsonl", cells + others)
    assert fit_records([read_record(path)], None, "float32") == fit
    gloo = fit_records([read_record(path)], "gloo", "float32")
    assert gloo.make_machine((1, 1)).between.latency == pytest.approx(4)
    # The median's interval is 4 wide: half of that is half of the median.
    assert {point[1:] for point in gloo.links["network"].points} == {(4, 0.5)}


def test_messages_that_meet_others_are_compared(messages, tmp_path):
    cells = list(read_record(messages).cells)
    both = [
        replace(cell, at={**cell.at, "direction": "both"},
                summary=replace(cell.summary, median=1.8 * cell.summary.median))
        for cell in cells
        if cell.at.get("link") == "node"
    ]  # fmt: skip
    path = planted.write_record(tmp_path / "both.jsonl", cells + both)
    ratios = fit_records([read_record(path)], None, "float32").both_ways
    assert ratios == {"node": pytest.approx(1.8, rel=0.02)}


def test_a_fit_without_a_link_prices_what_does_not_need_it(messages, tmp_path):
    cells = [cell for cell in read_record(messages).cells if cell.at.get("link") == "network"]
    path = planted.write_record(tmp_path / "network.jsonl", cells)
    fit = fit_records([read_record(path)], None, "float32")
    assert fit.make_machine((1, 1, 1)).addition == 0
    with pytest.raises(ConfigurationError, match="no messages inside a node, which 4 ranks on 2"):
        fit.make_machine((2, 2))


def test_what_is_found_is_said_drawn_and_written(messages, fit, tmp_path, capsys, monkeypatch):
    drawn = Mock(wraps=command.write_sheet)
    monkeypatch.setattr(command, "write_sheet", drawn)
    plot, output = tmp_path / "fit.svg", tmp_path / "fit.json"
    command.main([str(messages), "--output", str(output), "--output", str(plot)])
    assert read_fit(output) == fit
    text = capsys.readouterr().out
    assert "messages of MPI_Send, on EPYC 9654" in text
    assert "messages between nodes" in text and "additions" in text
    assert text.count(" change between ") == 2
    assert "messages inside a node" in plot.read_text()
    charts = list(itertools.chain(*drawn.call_args.args[1]))
    # Of messages in a node and between nodes, and of additions: times and errors.
    assert sum(bool(each.mark) for each in charts) == 3
    assert sum(len(each.lines) > 1 for each in charts) == 3
    for chart in charts:
        *fitted, measured = chart.lines
        reached = set(itertools.chain(*(line.points for line in fitted)))
        assert not fitted or {min(measured.points), max(measured.points)} <= reached
        usual = quantile([each.median for each in measured.points.values()], 0.5)
        assert not measured.is_joined and (not chart.mark or is_near(usual, chart.mark[0]))
    command.main([str(output)])
    assert capsys.readouterr().out == text


def test_a_fitted_machine_is_priced(fit, tmp_path, capsys):
    path, prices = tmp_path / "fit.json", tmp_path / "prices.jsonl"
    write_fit(path, fit)
    pricing.main(["ring", "two-level", "--fit", str(path), "--ranks", "8", "2048",
                   "--ranks-per-node", "4", "--output", str(prices)])  # fmt: skip
    cells = read_record(prices).cells
    assert len(cells) == 4 * len(pricing.SIZES)
    for cell in cells:
        [price] = parse(cell.contender).prices([cell.at["bytes"]], MACHINE, (4,) * cell.nodes)
        assert cell.samples == pytest.approx([price.seconds], rel=0.05)
    text = capsys.readouterr().out
    said = re.search(r"of MPI_Send: messages inside a node .*? and (.+?) GB/s in 2 pieces", text)
    assert is_near(float(said[1]), 1e-9 / 8e-11)


SIZES = (1 << 10, 1 << 20, 1 << 24)


def test_what_was_simulated_is_predicted_and_what_differs_is_said(fit, tmp_path, capsys):
    names = ["ring", "direct", "binomial-tree", "double-tree", "two-level"]
    cells = planted.make_all_reduces(MACHINE, names, SIZES, factors={"direct": 1.4})
    path = planted.write_record(tmp_path / "all-reduce.jsonl", cells)
    checks = check_record(fit, read_record(path))
    assert len(checks) == 15
    for check in checks:
        assert check.is_off == (check.choice.algorithm.name == "direct")
        assert check.ratio == pytest.approx(1.4 if check.is_off else 1, rel=0.03)
    write_fit(tmp_path / "fit.json", fit)
    command.main([str(tmp_path / "fit.json"), "--check", str(path)])
    text = capsys.readouterr().out
    assert text.count(" in turn ") == 15 and text.count("  1.40  off\n") == 3
    assert "12 of 15 within 15% of what the fit predicts" in text
    assert "direct (mpiddp direct), 1.40 × in 3: ranks of a node share its memory" in text


@pytest.mark.parametrize("name", ["naive-ring", "central", "ring", "pat"])
def test_what_mpiddp_runs_over_mpi_is_predicted_as_it_flows(fit, tmp_path, name, monkeypatch):
    size, nodes = 4 << 20, (1, 1, 1, 1)
    [cell] = planted.make_all_reduces(MACHINE, [name], [size], nodes=4)
    own = replace(cell, details={"ran": f"{name} over mpi", "maker": "mpiddp"})
    cells = [own, replace(own, details={"ran": name, "maker": "gloo"})]
    path = planted.write_record(tmp_path / "flow.jsonl", cells)
    fit = replace(fit, links={"network": fit.links["network"]})
    flowing, in_turn = check_record(fit, read_record(path))
    schedule, cut = parse(name).build(4), BufferCut(15 << 10, 15 << 10, True)
    ends = flow(schedule, size // 4, MACHINE, nodes, cut, 4)
    wanted = max(ends[member] for member in schedule.members)
    assert flowing.predicted == pytest.approx(wanted, rel=0.03)
    assert in_turn.predicted == pytest.approx(cell.summary.median, rel=0.03)
    gain = flowing.predicted / in_turn.predicted
    assert gain < 0.7 if name in ("naive-ring", "central") else 0.8 < gain < 1.25
    # Fewer parts stand for those of mpiddp, none of which takes a rendezvous.
    monkeypatch.setattr("benchmarks.judge.fit.check.MOST_PARTS", 32)
    assert check_record(fit, read_record(path))[0].predicted == pytest.approx(wanted, rel=0.03)


def test_halves_are_predicted_as_what_they_are(fit, tmp_path):
    [cell] = planted.make_all_reduces(MACHINE, ["ring"], [1 << 20])
    cell = replace(cell, summary=replace(cell.summary, median=1e-3))
    halves = [replace(cell, quantity=name) for name in ("reduce-scatter", "all-gather")]
    path = planted.write_record(tmp_path / "halves.jsonl", [cell, *halves])
    whole, first, second = (each.predicted for each in check_record(fit, read_record(path)))
    assert whole == pytest.approx(first + second) and first > second


def make_check(fit, **changes):
    [cell] = planted.make_all_reduces(MACHINE, ["ring"], [1 << 20], nodes=1)
    cell = replace(cell, **changes)
    choice, nodes = find_choice(cell), split(cell.ranks, cell.nodes)
    price = choice.prices([1 << 20], fit.make_machine(nodes), nodes)[0]
    return cell, price, choice


@pytest.mark.parametrize(
    ("details", "cores", "reason"),
    [
        ({"ran": "ring over shared-memory"}, 64, "its messages go by shared-memory, the fit"),
        ({"ran": "ring", "maker": "gloo"}, 64, "its messages go by Gloo"),
        ({"ran": "ring over mpi"}, 2, "4 ranks of a node share 2 cores"),
        ({"ran": "direct over mpi"}, 64, "its ranks send several messages at once"),
        ({"ran": "ring:segments=9 over mpi"}, 64, "its segments hide latency"),
    ],
)
def test_what_the_model_does_not_know_is_named(fit, details, cores, reason):
    fit = replace(fit, links={"node": fit.links["node"]})
    cell, price, choice = make_check(fit, details=details)
    reasons = list(list_reasons(fit, cell, price, choice, {"usable_hardware_threads": cores}))
    assert any(each.startswith(reason) for each in reasons), reasons


@pytest.mark.parametrize("ran", ["", "MPI_Allreduce", "central", "send, receive"])
def test_what_has_no_known_algorithm_is_not_predicted(ran):
    [cell] = planted.make_all_reduces(MACHINE, ["ring"], [1 << 20])
    found = find_choice(replace(cell, details={"ran": ran}))
    assert (found is None) == (ran != "central")
    assert find_choice(replace(cell, at={**cell.at, "busy": 1})) is None


def run_flow(schedule, machine, parts, size=12, nodes=None):
    longest = math.ceil(size / schedule.chunks / parts) or 1
    cut = BufferCut(cell=longest, message=longest, flows=True)
    return flow(schedule, size, machine, nodes or (1,) * schedule.ranks, cut)


def chain(ranks):
    return all_reduce(ranks, 1, [[Transfer(r, r + 1, 0, 1, True)] for r in range(ranks - 1)])


def test_a_chain_of_parts_takes_little_more_than_one_message_by_hand():
    # 12 bytes in 3 parts: each takes 4·2 s, then 5 s to arrive, then 4·1 s to be added.
    machine = flat(5, 2, 1)
    # Rank 1 has them at 17, 25 and 33; the third leaves from 33 to 41, and is added at 50.
    assert run_flow(chain(3), machine, 3) == [24, 41, 50]
    # In one part there is nothing to hide.
    assert run_flow(chain(3), machine, 1) == [24, 24 + 5 + 12 + 24, 2 * (24 + 5 + 12)]
    assert run_flow(build("ring", 4), flat(1, 1), 3, size=0) == [0, 0, 0, 0]


def test_parts_are_taken_in_the_order_of_steps():
    # Rank 2 hears rank 1 at once, in the second step, and needs rank 0's first, which is later.
    steps = [[Transfer(3, 0, 0, 1, True)], [Transfer(0, 2, 0, 1, True)],
             [Transfer(1, 2, 1, 2, True)], [Transfer(2, 1, 1, 2, False)]]  # fmt: skip
    ends = run_flow(all_reduce(4, 2, steps), flat(0, 1), 1, size=20)
    # 3 to 0: 10 s, 0 to 2: until 20; what came at 10 is taken then, and sent back until 30.
    assert ends == [20, 30, 30, 10]


def test_ranks_of_a_node_share_its_link():
    step = [Transfer(0, 2, 0, 1, False), Transfer(1, 3, 0, 1, False)]
    machine = Machine(MessageCost(0, 1), MessageCost(5, 2))
    assert run_flow(all_reduce(4, 1, [step]), machine, 1, nodes=(2, 2)) == [24, 48, 29, 53]
    assert run_flow(all_reduce(4, 1, [step]), machine, 1) == [24, 24, 29, 29]
    half = Machine(MessageCost(0, 1), MessageCost(5, 2), shared=1)
    assert run_flow(all_reduce(4, 1, [step]), half, 1, nodes=(2, 2)) == [24, 36, 29, 41]


def test_connections_that_meet_at_a_port_share_it_evenly():
    # Rank 0 sends 60 parts of 1 s to rank 2 and as many to rank 3, so both end together.
    step = [Transfer(0, 2, 0, 1, False), Transfer(0, 3, 0, 1, False)]
    assert run_flow(all_reduce(4, 1, [step]), flat(0, 1), 60, size=60)[2:] == [119, 120]
    # From two to one: what leaves next does so when the one before has been taken in, not earlier.
    step = [Transfer(0, 2, 0, 1, False), Transfer(1, 2, 0, 1, False)]
    assert run_flow(all_reduce(4, 1, [step]), flat(0, 1), 2, size=2) == [2, 3, 4, 0]
    # The inner nodes of two trees hear both children and the root, a third of the port each: 3/2 S.
    # Only then do they pass the sum on to both children: S more.
    ends = run_flow(build("double-tree", 4), flat(0, 1), 200, size=2000)
    assert max(ends) == pytest.approx(2.5 * 2000, rel=0.02)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=5)
@given(ranks=st.integers(2, 9), hosts=st.integers(1, 9), parts=st.integers(1, 5),
       machine=machines())  # fmt: skip
def test_every_algorithm_ends_and_sends_no_more_than_it_must(name, ranks, hosts, parts, machine):
    nodes = split(ranks, min(hosts, ranks))
    schedule = build(name, ranks, nodes if name == "two-level" else None)
    size = 12 * schedule.chunks
    ends = run_flow(schedule, machine, parts, size, nodes)
    sent = simulate(schedule, size, machine, nodes).sent
    quickest = min(machine.inside.seconds_per_byte, machine.between.seconds_per_byte)
    assert max(ends) >= sent.max() * quickest * (1 - 1e-9)


@pytest.mark.parametrize("name", [name for name in FULL if not build(name, 5).packed])
def test_in_one_part_nothing_is_clearly_slower_than_step_after_step(name):
    for ranks in (2, 5, 8):
        schedule, machine = build(name, ranks), flat(3, 2, 1)
        size = 8 * schedule.chunks
        wanted = simulate(schedule, size, machine).seconds
        # Connections take turns at a port, whatever each of them holds up.
        assert max(run_flow(schedule, machine, 1, size)) <= 1.02 * wanted


def test_records_that_cannot_be_fitted_are_refused(messages, tmp_path):
    cells = read_record(messages).cells
    few = [cell for cell in cells if cell.at["bytes"] <= 9]
    cases = {
        "ring": (planted.make_all_reduces(MACHINE, ["ring"], [8]), "expected times of messages"),
        "few": (few, "times of messages inside a node: expected 3 sizes or more, found 2"),
        "others": (
            [replace(cell, contender=name) for name in ("Gloo", "NCCL") for cell in cells[:9]],
            "--contender: expected one of those whose messages were timed, 'Gloo', 'NCCL'",
        ),
    }
    for name, (content, problem) in cases.items():
        path = planted.write_record(tmp_path / f"{name}.jsonl", content)
        with pytest.raises(ConfigurationError) as caught:
            command.main([str(path)])
        assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace('"version": 1', '"version": 9'), "version 1, found 'fit' and 9"),
        (lambda text: text[:100], "line 1: expected JSON"),
        (lambda text: text.replace('"latency": ', '"latency": -'), ": lines that no machine can"),
        (lambda text: text.replace('"network"', '"moon"'), "links: expected node or network"),
    ],
)
def test_files_that_are_no_fit_are_refused(fit, tmp_path, change, problem):
    path = tmp_path / "fit.json"
    write_fit(path, fit)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigurationError) as caught:
        command.main([str(path)])
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_fit_that_predicts_nothing_says_so(fit):
    curve = fit.links["node"]
    useless = replace(curve, segments=tuple(replace(each, error=0.9) for each in curve.segments))
    assert "warning" not in "\n".join(command.describe(fit))
    shown = "\n".join(command.describe(replace(fit, links={**fit.links, "node": useless})))
    assert "warning: messages inside a node: half of the sizes are off by 90% or more" in shown


ALGORITHMS = ("ring", "naive-ring", "halving-doubling", "binomial-tree", "one-shot", "central")


def measure(cluster, path, *words):
    """The record of a benchmark on the cluster."""
    return record_benchmark(path, *words, "--launcher", "srun", **cluster.environment())[1]


@pytest.mark.long
@pytest.mark.timeout(700)
def test_collectives_over_shaped_links_come_out_as_they_are_priced(slurm_cluster, tmp_path):
    rate = 100
    slurm_cluster.must("rate", f"{rate}mbit")
    try:
        messages = measure(
            slurm_cluster, tmp_path / "messages.jsonl", "point-to-point", "--nodes", "2",
            "--sizes", "16K", "64K", "256K", "1M", "4M", "--repetitions", "3", "--budget", "0.1",
        )  # fmt: skip
        collectives = measure(
            slurm_cluster, tmp_path / "collectives.jsonl", "allreduce", "--nodes", "4",
            "--ranks", "4", "--sizes", "1M", "--algorithms", *ALGORITHMS, "--transports", "mpi",
            "--buffers", "private", "--repetitions", "3",
        )  # fmt: skip
    finally:
        slurm_cluster.must("rate", "none")
    fit = fit_records([messages], None, "float32")
    per_byte = fit.links["network"].segments[-1].seconds_per_byte
    assert per_byte == pytest.approx(8e-6 / rate, rel=0.2)
    checks = check_record(fit, collectives)
    checks = [check for check in checks if check.cell.details["maker"] == "mpiddp"]
    # The median: a machine with other things to do is late for one or the other.
    assert 0.85 <= quantile([check.ratio for check in checks], 0.5) <= 1.15
    for one, other in itertools.permutations(checks, 2):
        if one.predicted >= 1.5 * other.predicted:
            assert one.cell.summary.median > other.cell.summary.median, (one, other)
