"""What interfaces count, beside what ranks say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from test_metrics import ROW

from mpiddp.training.records.network import (
    Counters,
    Network,
    NetworkMeter,
    describe,
    join_nodes,
    read_counters,
)
from mpiddp.training.records.trackers import list_values

COUNTS = {"eth0": {"sent_bytes": 9_000_000, "received_bytes": 7_000_000}}


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
        {"eth0": (1, 1)},
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
    ranks = [Network("a", 5_000_000, COUNTS), Network("b", 1, COUNTS), Network("a", 3_000_000)]
    nodes = join_nodes(ranks)
    assert [(each["host"], each["counted_bytes"]) for each in nodes] == [("a", 8_000_000), ("b", 1)]
    assert describe(nodes[:1]) == (
        "Network of a: 8.0 MB counted; eth0 sent 9.0 MB and received 7.0 MB"
    )
    assert describe(nodes).endswith(
        "2 nodes: 8.0 MB counted; eth0 sent 18.0 MB and received 14.0 MB"
    )
    values = list_values(replace(ROW, network=nodes))
    assert values["network/eth0/sent_bytes"] == 18_000_000 and "network" not in values
