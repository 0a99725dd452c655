"""What interfaces count, beside what ranks say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from test_metrics import ROW

from mpiddp.training.rank_costs import RankCosts, add_costs
from mpiddp.training.records.network import Counters, Network, NetworkMeter, describe, read_counters
from mpiddp.training.step.stages import Costs


def test_infiniband_counts_in_four_octets(tmp_path: Path) -> None:
    for device, text in (("mlx5_0", "25"), ("mlx5_1", "N/A (no counter)")):
        folder = tmp_path / device / "ports" / "1" / "counters"
        folder.mkdir(parents=True)
        (folder / "port_xmit_data").write_text(f"{text}\n")
        (folder / "port_rcv_data").write_text("50\n")
    found = dict(read_counters(tmp_path))
    assert found.pop("mlx5_0/1") == (100, 200)
    # This machine has a loopback interface, and perhaps others.
    assert "lo" in found and not any(name.startswith("mlx5_1") for name in found)


def test_what_came_before_is_not_counted() -> None:
    counters: list[Counters] = [
        {"eth0": (100, 50), "eth1": (5, 5)},
        {"eth0": (150, 60), "eth2": (7, 7)},
    ]
    meter = NetworkMeter(True, lambda: counters.pop(0))
    # Ten steps of the epoch, each of eight bytes, were taken by an earlier attempt.
    meter.begin(steps=10)
    found = meter.measure(sent_bytes=240, steps=30)
    assert found.counted_bytes == 160
    assert found.interfaces == {"eth0": {"sent_bytes": 50, "received_bytes": 10}}
    other = NetworkMeter(False, read_counters)
    other.begin(0)
    assert other.measure(0, 0).interfaces == {}


def test_ranks_are_joined_by_their_node() -> None:
    counts = {"eth0": {"sent_bytes": 9_000_000, "received_bytes": 7_000_000}}
    networks = [("a", 5_000_000, counts), ("b", 1, counts), ("a", 3_000_000, {})]
    ranks = [
        RankCosts(host, Costs(steps=1), 1, None, Network(counted, interfaces))
        for host, counted, interfaces in networks
    ]
    first, second = add_costs(ROW, ranks).network or ()
    assert second == {"host": "b", "counted_bytes": 1, "interfaces": counts}
    line = "Network of a: 8.0 MB counted; eth0 sent 9.0 MB and received 7.0 MB"
    assert describe(first) == line
    assert add_costs(ROW, [replace(ranks[0], network=None)]).network is None
