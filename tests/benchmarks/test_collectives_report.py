"""The measured collectives: statistics, tables and promises."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.judge.slow_links import list_slow
from benchmarks.judge.targets import Target
from benchmarks.measure.collectives import tables
from benchmarks.measure.collectives import targets as collectives_targets
from benchmarks.measure.collectives.cells import find_probe
from benchmarks.measure.trials import Refusal
from benchmarks.records import contenders
from benchmarks.records.collectives import find_rates
from measured import (
    GLOO_ROW,
    MPI_ROW,
    OWN_RING,
    PRIVATE_OWN,
    SHARED_OWN,
    K,
    M,
    make_cell,
    make_cells,
    make_group,
    make_plan,
)


def probe(name: str) -> contenders.Contender:
    return contenders.Contender(name, quantity="probe")


def test_rates_are_those_of_nccl_tests():
    assert find_rates("all-reduce", 4, 8_000_000, 1e-3) == pytest.approx((8.0, 12.0))
    assert find_rates("all-reduce", 2, 8_000_000, 1e-3) == pytest.approx((8.0, 8.0))
    for quantity in ("reduce-scatter", "all-gather"):
        assert find_rates(quantity, 4, 8_000_000, 1e-3) == pytest.approx((8.0, 6.0))
    for quantity in ("broadcast", "reduce", "point-to-point"):
        assert find_rates(quantity, 4, 8_000_000, 1e-3) == pytest.approx((8.0, 8.0))


def test_the_table_shows_what_ran_rates_ratios_and_why_it_ended():
    times = {
        (GLOO_ROW, M): [[8e-3] * 6],
        (MPI_ROW, M): [[4e-3] * 6],
        (PRIVATE_OWN, M): [[1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3]],
    }
    left_out = Refusal(
        quantity="all-reduce", contender="plain ring", at={"bytes": M}, reason="it only adds"
    )
    found = make_group(times, left_out)
    found.cells[2].details.update(ran="direct over shared-memory", stopped="budget")
    text = tables.format_run([found], make_plan())
    lines = text.splitlines()
    assert "all-reduce: 1 MiB of float32, sum, 6 iterations" in lines
    row = next(line for line in lines if line.startswith("mpiddp auto"))
    # 2 ms: half a GB/s; the 5th of 100 lies a quarter from 1 ms to 1 ms.
    expected = "auto private direct over shared-memory 2 ms 1 ms – 3 ms 1 ms – 3 ms 0.524 0"
    assert row.split()[2:] == [*expected.split(), "4.00", "2.00", "1", "budget"]
    assert "left out: plain ring, all-reduce at 1 MiB: it only adds" in text
    assert "1 of 3 rows spent their budget" in text


def test_that_nothing_of_mpiddp_was_measured_is_told():
    own, why = contenders.Contender(contenders.OWN, buffer="gpu").label, "not every rank has a GPU"
    left_out = Refusal(quantity="all-reduce", contender=own, at={"bytes": 8}, reason=why)
    for rows, told in (([GLOO_ROW], True), ([GLOO_ROW, PRIVATE_OWN], False)):
        found = make_group({(row, 8): [[1.0]] for row in rows}, left_out)
        lines = tables.format_run([found], make_plan()).splitlines()
        assert (f"nothing of mpiddp was measured: {why}" in lines) == told


def test_what_stands_out_is_told():
    late = {"slow_rank": 1, "slow_rank_reason": "comes late, by 90 µs"}
    cells = [make_cell(row, 8, [[1.0]], **late) for row in (GLOO_ROW, MPI_ROW)]
    cells.append(make_cell(PRIVATE_OWN, 8, [[1.0]], guidelines=["loses to reduce + broadcast"]))
    slow, guideline = tables.list_remarks(cells)
    assert slow == "slow rank: rank 1 comes late, by 90 µs (in 2 of 3 rows)"
    assert guideline.endswith("all-reduce at 8 B loses to reduce + broadcast")


def test_the_quickest_copy_is_the_memory_bound():
    seconds = dict(zip(contenders.COPIES, (0.04, 0.02, 0.03), strict=True))
    times = {(probe(name), contenders.BOUND_BYTES): [[each] * 3] for name, each in seconds.items()}
    cells = make_cells({**times, (probe(contenders.EMPTY), 0): [[7e-8]]})
    copy = find_probe(cells, *contenders.COPIES)
    assert (copy.contender, copy.summary.median) == (contenders.COPIES[1], 0.02)
    assert find_probe(cells, contenders.LINK) is None
    # 67.1 MB in 20 ms
    bound, nothing = tables.list_limits(cells)
    assert "20 ms to read and write 64 MiB" in bound and "3.36 GB/s" in bound
    assert nothing == "an iteration of nothing takes 0.07 µs"


PAIRS = list(itertools.permutations(range(4), 2))


def test_the_matrix_has_a_row_for_each_node_that_sends():
    row = contenders.Contender(contenders.MPI, quantity="all-pairs")
    cells = [
        replace(
            make_cell(row, M, [[1e-3 * (1 + source)]] * 3),
            ranks=4, nodes=4, at={"bytes": M, "from": source, "to": target},
        )
        for source, target in PAIRS
    ]  # fmt: skip
    lines = tables.format_matrix(cells, M).splitlines()
    assert " ".join(lines[1].split()) == "from \\ to node 0 node 1 node 2 node 3"
    assert " ".join(lines[3].split()) == "node 1 2 ms, 0.524 – 2 ms, 0.524 2 ms, 0.524"


def test_a_slow_node_or_link_is_named_and_no_other():
    by_node = {pair: (3.0 if 2 in pair else 1.0,) * 3 for pair in PAIRS}
    (line,) = list_slow(by_node)
    assert line == "slow: node 2, whose links all take 3.0 times as long as usual (1 s), or more"
    one = {pair: (2.0 if pair == (3, 1) else 1.0,) * 3 for pair in PAIRS}
    (line,) = list_slow(one)
    assert line == "slow: node 3 → node 1 takes 2.0 times as long as usual (2 s, not 1 s)"
    assert list_slow(dict.fromkeys(PAIRS, (1.0, 1.4, 9.0))) == list_slow({}) == []


def judge(times, ranks=2, cores=2, nodes=None) -> dict[str, Target]:
    found = collectives_targets.list_targets(make_cells(times, ranks, nodes), cores)
    return {target.text: target for target in found}


def test_two_ranks_have_the_promised_speeds():
    quick, slow = [[1.0]] * 6, [[10.0]] * 6
    times = {(GLOO_ROW, size): slow for size in (8, 256 * K, M, 64 * M)}
    times |= {(PRIVATE_OWN, size): quick for size in (8, 256 * K, M, 64 * M)}
    times |= {(MPI_ROW, size): [[1.5]] * 6 for size in (8, 256 * K, M, 64 * M)}
    times |= {(probe(name), contenders.BOUND_BYTES): [[0.7]] for name in contenders.COPIES}
    times |= {(SHARED_OWN, 64 * M): quick}
    found = judge(times)
    by_gloo = found["mpiddp auto, auto, private: at least 4 × Gloo"]
    assert by_gloo.found == dict.fromkeys(["256 KiB", "1 MiB", "64 MiB"], 10) and by_gloo.met
    at_all, at_most = (
        found[f"mpiddp auto, auto, private: at least {least} × MPI_Allreduce"] for least in (1, 2)
    )
    assert list(at_all.found) == ["1 MiB", "64 MiB"] and at_all.met
    assert list(at_most.found) == ["64 MiB"] and not at_most.met
    assert str(at_most).endswith(": 64 MiB 1.500: missed")
    latency = found["mpiddp auto, auto, private: at most 1.2 of MPI_Allreduce's time"]
    assert (latency.found, latency.met) == ({"8 B": pytest.approx(2 / 3)}, True)
    bound = found["mpiddp auto, auto, shared: at least 0.8 of the memory bound"]
    assert (bound.found, bound.met) == ({"64 MiB": pytest.approx(0.7)}, False)


def test_the_executor_is_measured_by_the_quicker_plain_ring():
    times = {(contenders.Contender(contenders.RING), size): [[3e-3]] * 6 for size in (8, M)}
    times |= {(contenders.Contender(contenders.PERSISTENT), size): [[1e-3]] * 6 for size in (8, M)}
    times |= {(OWN_RING, 8): [[1.0009e-3]] * 6, (OWN_RING, M): [[1.06e-3]] * 6}
    large, small = judge(times).values()
    assert small.met and small.found == {"8 B": pytest.approx(0.9)}
    assert not large.met and large.found == {"1 MiB": pytest.approx(1.06)}


def test_more_ranks_than_cores_are_never_slower():
    rows = {GLOO_ROW: 2.0, MPI_ROW: 1.0, PRIVATE_OWN: 1.5}
    times = {(row, 8): [[each]] * 6 for row, each in rows.items()}
    gloo, mpi = judge(times, ranks=4).values()
    assert (gloo.met, mpi.met) == (True, False)
    assert "(4 ranks, 2 cores)" in mpi.text
    assert judge(times, ranks=4, cores=4) == judge(times, ranks=4, nodes=2) == {}


def test_between_nodes_latency_is_judged_or_the_use_of_a_link_that_was_timed():
    prepared = contenders.Contender(contenders.PREPARED)
    rows = {MPI_ROW: 1.0, PRIVATE_OWN: 1.5, prepared: 0.9}
    times = {(row, 8): [[each]] * 6 for row, each in rows.items()}
    plain, quick = judge(times, ranks=4, nodes=4).values()
    assert (plain.met, quick.met) == (False, True)
    assert judge(times, ranks=8, nodes=4) == {}

    # 16 MB in 0.16 s: a ring of four carries 1 MiB, one and a half times, in 15.7 ms at best.
    size, best = 16_000_000, 1.5 * M / 1e8
    times = {(probe(contenders.LINK), size): [[0.16]], (GLOO_ROW, M): [[2 * best]] * 6}
    for slower, met in ((1.01, True), (1.03, False)):
        found = judge(times | {(PRIVATE_OWN, M): [[slower * best]] * 6}, ranks=4, nodes=4)
        by_gloo, bound = found.values()
        large = judge({(GLOO_ROW, 16 * M): [[1.0]] * 6, (PRIVATE_OWN, 16 * M): [[slower]] * 6}
                      | {(probe(contenders.LINK), size): [[0.16]]}, ranks=4, nodes=4)  # fmt: skip
        assert large["mpiddp auto, auto, private: at least 0.98 × Gloo"].met is met
        assert by_gloo.met and by_gloo.found == {"1 MiB": pytest.approx(2 / slower)}
        assert bound.met is met and bound.found == {"1 MiB": pytest.approx(1 / slower)}


def test_the_harness_is_judged_by_an_iteration_of_nothing_and_what_was_not_measured_is_not():
    for seconds, met in ((7e-8, True), (2e-6, False)):
        (target,) = judge({(probe(contenders.EMPTY), 0): [[seconds]]}).values()
        assert (target.met, target.found) == (met, {"": pytest.approx(1e6 * seconds)})
    assert judge({(GLOO_ROW, M): [[1.0]]}) == {}
