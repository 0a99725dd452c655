"""``benchmarks allreduce``: statistics, tables, promises and the drawing."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.collectives import plot as allreduce_plot
from benchmarks.collectives import report as allreduce_report
from benchmarks.collectives import targets as allreduce_targets
from benchmarks.collectives.contenders import (
    BOUND_BYTES,
    COPIES,
    LINK,
    PERSISTENT,
    PREPARED,
    RING,
    Cell,
    Contender,
)
from benchmarks.common.statistics import median_interval
from benchmarks.common.targets import Target
from groups import GLOO_ROW, MPI_ROW, OWN_RING, PRIVATE_OWN, SHARED_OWN, K, M, make_group

# ---- the report --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1001, 2500, 5000])
def test_the_interval_of_a_large_sample_covers_the_median_in_95_of_100(count):
    interval = median_interval([float(value) for value in range(count)])
    k = int(interval.low) + 1
    assert interval.high == count - k
    ways, all_ways = 1, 0
    for each in range(k):
        all_ways += ways
        ways = ways * (count - each) // (each + 1)
    below = Fraction(all_ways, 2**count)
    assert 0.95 <= float(1 - 2 * below) <= 0.96


def test_a_small_samples_interval_is_exact():
    assert median_interval([1.0, 2.0]) is None
    assert median_interval([float(value) for value in range(6)]).low == 0


def test_rates_are_those_of_nccl_tests():
    assert allreduce_report.find_rates(4, 8_000_000, 1e-3) == pytest.approx((8.0, 12.0))
    assert allreduce_report.find_rates(2, 8_000_000, 1e-3) == pytest.approx((8.0, 8.0))


def test_a_speed_is_the_median_of_the_rounds_ratios():
    own = [[1.0], [2.0], [9.0]]
    group = make_group({(PRIVATE_OWN, 8): own, (GLOO_ROW, 8): [[4.0], [4.0], [9.0]]})
    speed = group.find_speed(Cell(PRIVATE_OWN, 8), Cell(GLOO_ROW, 8))
    assert (speed.median, speed.minimum, speed.maximum) == (2.0, 1.0, 4.0)
    assert group.find_speed(Cell(PRIVATE_OWN, 8), Cell(MPI_ROW, 8)) is None


def test_the_table_shows_rates_ratios_and_wrong_elements():
    times = {
        (GLOO_ROW, M): [[8e-3] * 6],
        (MPI_ROW, M): [[4e-3] * 6],
        (PRIVATE_OWN, M): [[1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3]],
    }
    ring = Cell(Contender(RING), M)
    group = make_group(times, refusals={Cell(SHARED_OWN, M): "no room"}, wrong={ring: 12})
    lines = allreduce_report.format_table(group, M).splitlines()
    assert lines[0] == "1 MiB of float32, 6 iterations"
    row = next(line for line in lines if line.startswith("mpiddp auto") and "private" in line)
    # 2 ms: half a GB/s; the 5th of 100 lies a quarter from 1 ms to 1 ms.
    expected = "auto private 2 ms 1 ms – 3 ms 1 ms – 3 ms 0.524 0.524 4.00 2.00 0"
    assert row.split()[2:] == expected.split()
    wrong = next(line for line in lines if line.startswith("plain ring "))
    assert wrong.split()[-2:] == ["–", "12"]
    assert not any("shared" in line and line.startswith("mpiddp auto") for line in lines[2:3])
    text = allreduce_report.format_group(group)
    assert "left out: mpiddp auto, auto, shared at 1 MiB: no room" in text


def test_the_quickest_copy_is_the_memory_bound():
    seconds = dict(zip(COPIES, (0.04, 0.02, 0.03), strict=True))
    times = {(Contender(name), BOUND_BYTES): [[each] * 3] for name, each in seconds.items()}
    group = make_group(times)
    limits = allreduce_report.find_limits(group)
    assert (limits.copy_way, limits.copy.median) == (COPIES[1], 0.02)
    assert limits.peer_read is None and limits.link is None
    # 67.1 MB in 20 ms
    assert "20 ms to read and write 64 MiB" in allreduce_report.describe_limits(group)
    assert "3.36 GB/s" in allreduce_report.describe_limits(group)


def test_a_record_has_every_iteration():
    own = [[1e-3, 2e-3], [3e-3, 4e-3]]
    group = make_group({(PRIVATE_OWN, 8): own, (Contender(COPIES[0]), BOUND_BYTES): [[1.0]]})
    (described,) = allreduce_report.describe_groups([group])
    (cell,) = described["cells"]
    assert cell["nanoseconds"] == [[1_000_000, 2_000_000], [3_000_000, 4_000_000]]
    assert (cell["bytes"], cell["seconds"]["count"]) == (8, 4)
    assert cell["seconds"]["median"] == pytest.approx(2.5e-3)
    (probe,) = described["probes"].values()
    assert probe["nanoseconds"] == [[1_000_000_000]]
    json.dumps(described)


# ---- targets -----------------------------------------------------------------------------------


def judge(times, ranks=2, cores=2, nodes=None) -> dict[str, Target]:
    found = allreduce_targets.judge([make_group(times, ranks, nodes)], cores)
    return {target.text: target for target in found}


def test_two_ranks_have_the_promised_speeds():
    quick, slow = [[1.0]] * 3, [[10.0]] * 3
    times = {(GLOO_ROW, size): slow for size in (8, 256 * K, M, 64 * M)}
    times |= {(PRIVATE_OWN, size): quick for size in (8, 256 * K, M, 64 * M)}
    times |= {(MPI_ROW, size): [[1.5]] * 3 for size in (8, 256 * K, M, 64 * M)}
    times |= {(Contender(name), BOUND_BYTES): [[0.7]] for name in COPIES}
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
    times = {(Contender(RING), size): [[3e-3]] for size in (8, M)}
    times |= {(Contender(PERSISTENT), size): [[1e-3]] for size in (8, M)}
    times |= {(OWN_RING, 8): [[1.0009e-3]], (OWN_RING, M): [[1.06e-3]]}
    large, small = judge(times).values()
    assert small.met and small.found == {"8 B": pytest.approx(0.9)}
    assert not large.met and large.found == {"1 MiB": pytest.approx(1.06)}


def test_more_ranks_than_cores_are_never_slower():
    times = {(GLOO_ROW, 8): [[2.0]], (MPI_ROW, 8): [[1.0]], (PRIVATE_OWN, 8): [[1.5]]}
    gloo, mpi = judge(times, ranks=4).values()
    assert (gloo.met, mpi.met) == (True, False)
    assert "(4 ranks, 2 cores)" in mpi.text
    assert judge(times, ranks=4, cores=4) == judge(times, ranks=4, nodes=2) == {}


def test_between_nodes_latency_is_judged_or_the_use_of_a_link_that_was_timed():
    prepared = Contender(PREPARED)
    times = {(MPI_ROW, 8): [[1.0]], (PRIVATE_OWN, 8): [[1.5]], (prepared, 8): [[0.9]]}
    plain, quick = judge(times, ranks=4, nodes=4).values()
    assert (plain.met, quick.met) == (False, True)
    assert judge(times, ranks=8, nodes=4) == {}

    # 16 MB in 0.16 s: a ring of four carries 1 MiB, one and a half times, in 15.7 ms at best.
    size, best = 16_000_000, 1.5 * M / 1e8
    times = {(Contender(LINK), size): [[0.16]], (GLOO_ROW, M): [[2 * best]]}
    for slower, met in ((1.01, True), (1.03, False)):
        found = judge(times | {(PRIVATE_OWN, M): [[slower * best]]}, ranks=4, nodes=4)
        by_gloo, bound = found.values()
        large = judge({(GLOO_ROW, 16 * M): [[1.0]], (PRIVATE_OWN, 16 * M): [[slower]]}
                      | {(Contender(LINK), size): [[0.16]]}, ranks=4, nodes=4)  # fmt: skip
        assert large["mpiddp auto, auto, private: at least 0.98 × Gloo"].met is met
        assert by_gloo.met and by_gloo.found == {"1 MiB": pytest.approx(2 / slower)}
        assert bound.met is met and bound.found == {"1 MiB": pytest.approx(1 / slower)}


def test_what_was_not_measured_is_not_judged():
    assert judge({(GLOO_ROW, M): [[1.0]]}) == {}


# ---- the drawing -------------------------------------------------------------------------------


def test_a_drawing_has_a_line_for_each_contender(tmp_path):
    times = {(row, size): [[1e-3 * size]] for row in (GLOO_ROW, PRIVATE_OWN) for size in (8, K)}
    path = tmp_path / "drawing.svg"
    allreduce_plot.draw(path, [make_group(times), make_group(times, ranks=4)], "a note")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    text = path.read_text()
    for part in ("Gloo", "mpiddp auto, auto, private", "4 ranks", "bus bandwidth", "a note"):
        assert part in text
    assert "MPI_Allreduce" not in text


@given(st.lists(st.integers(3, 40), min_size=1, max_size=20, unique=True))
def test_ticks_have_room(powers):
    sizes = [1 << power for power in sorted(powers)]
    ticks = allreduce_plot.choose_ticks(sizes)
    assert ticks[0] == sizes[0] and set(ticks) <= set(sizes)
    room = allreduce_plot.TICK_SHARE * math.log2(sizes[-1] / sizes[0])
    assert all(math.log2(b / a) >= room - 1e-9 for a, b in itertools.pairwise(ticks))
    # None is left out for nothing.
    for size in set(sizes) - set(ticks):
        assert min(abs(math.log2(size / tick)) for tick in ticks) < room + 1e-9
