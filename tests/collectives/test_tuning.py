"""Tuning tables: what is written is read, what fits is followed, and what is none is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tuned
from mpiddp.collectives import BOTH, MPI, SHARED, TORCH
from mpiddp.collectives.planner import CallRequest, Layout, Planner, select
from mpiddp.collectives.transport.shared_memory import SharedMemory
from mpiddp.collectives.tuning import (
    NO_TABLE,
    Range,
    Reading,
    Section,
    check_readings,
    fit_table,
    read_table,
    write_table,
)
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective

ALL = Collective.ALL_REDUCE
RANGES = (Range(8, 99, "auto"), Range(100, 4000, "direct", SHARED), Range(4001, 1 << 20, "ring"))


def write(path: Path, **changes: object) -> Path:
    """A table for two ranks on one node, with other values of its first section."""
    section = {"collective": "all-reduce", "nodes": [2], "type": "float32", "device": "cpu"}
    ranges = [{"least": 8, "most": 4000, "algorithm": "direct", "transport": SHARED}]
    head = {"kind": "mpiddp tuning table", "schema": 1, "made": {}}
    content = {**head, "sections": [{**section, "ranges": ranges}]}
    for name, value in changes.items():
        place = next(each for each in (content, content["sections"][0], ranges[0]) if name in each)
        place[name] = value
    path.write_text(json.dumps(content))
    return path


WRONG = {
    "algorithm": (
        "rong",
        r"ranges\[0\]: no algorithm is called 'rong' \(did you mean ring\?\); there are .*ring",
    ),
    "transport": ("pigeon", r"ranges\[0\]: no transport is called 'pigeon'; there are auto, "),
    "schema": (2, r"table.json: expected .* schema 1, found .* and 2; make one with: .*tune"),
    "kind": ("else", r"table.json: expected kind 'mpiddp tuning table' .*, found 'else'"),
    "sections": ([{}], r"table.json: sections\[0\]: lacks collective"),
    "made": (None, r"table.json: made: expected an object, found None"),
    "collective": ("gossip", r"table.json: sections\[0\]: no collective is called 'gossip'"),
    "nodes": ([0], r"sections\[0\]: nodes: expected the ranks of each, found \(0,\)"),
    "device": ("abacus", r"sections\[0\]: device: expected cpu or gpu, found 'abacus'"),
    "least": (5000, r"ranges\[0\]: expected 0 <= least <= most, in bytes, found \(5000, 4000\)"),
    "most": ("all", r"ranges\[0\].most: expected a whole number, found 'all'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_table_is_said_in_one_line(name, tmp_path):
    value, said = WRONG[name]
    with pytest.raises(ConfigurationError, match=said):
        read_table(write(tmp_path / "table.json", **{name: value}))


def test_overlapping_ranges_and_doubled_sections_are_refused(tmp_path):
    path = write(tmp_path / "table.json")
    (section,) = read_table(path).sections
    with pytest.raises(ConfigurationError, match=r"do not overlap, found one up to 99 B"):
        replace(section, ranges=(Range(8, 99, "ring"), Range(99, 200, "direct")))
    write_table(path, {}, [section, replace(section, ranges=())])
    with pytest.raises(ConfigurationError, match="two sections for all-reduce float32 cpu"):
        read_table(path)


@pytest.mark.parametrize(
    ("cut", "more"),
    [(0, b""), (60, b""), (-3, b""), (None, b"\xff"), (0, '{"kind": 1}'.encode("utf-16"))],
)
def test_a_table_that_is_truncated_or_in_another_encoding_is_refused(cut, more, tmp_path):
    path = write(tmp_path / "table.json")
    path.write_bytes(path.read_bytes()[:cut] + more)
    with pytest.raises(ConfigurationError, match=r"table\.json: expected JSON: .*; make one with"):
        read_table(path)


def test_ranks_with_different_tables_are_named():
    check_readings([Reading("a" * 64)] * 3)
    readings = [Reading(each * 64) for each in ("a", "a", "", "b", "a", "b")]
    with pytest.raises(ConfigurationError, match=r"the same table .* not ranks 2-3,5: none"):
        check_readings(readings)


def make_layout(
    tmp_path: Path, collective="all-reduce", device="cpu", ranges=RANGES,
    *, transports=(SHARED, BOTH, MPI, TORCH),
) -> Layout:  # fmt: skip
    """Two ranks on one node, with these ranges for float32."""
    path = tmp_path / "table.json"
    write_table(path, {}, [Section(collective, (2,), "float32", device, ranges)])
    tuning = fit_table(read_table(path), (2,), transports)
    return Layout(0, ("here",) * 2, (0, 0), transports, tuning=tuning)


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (99, ("one-shot", SHARED)),
        (100, ("direct", SHARED)),
        (4001, ("ring", SHARED)),
        (1 << 20, ("ring", SHARED)),
        ((1 << 20) + 4, ("direct", SHARED)),
    ],
)
def test_auto_follows_the_table_where_it_has_a_range_and_the_rule_elsewhere(size, chosen, tmp_path):
    layout = make_layout(tmp_path)
    found = select(CallRequest(ALL), size, layout, on_gpu=False)
    assert (found.name, found.transport) == chosen
    assert "is used for all-reduce of float32, CPU" in layout.tuning.text


@pytest.mark.parametrize(
    ("request_", "dtype"),
    [
        (CallRequest(ALL), torch.bfloat16),
        (CallRequest(ALL, algorithm="one-shot"), torch.float32),
        (CallRequest(ALL, transport=SHARED), torch.float32),
        (CallRequest(ALL, fixed_order=True), torch.float32),
        (CallRequest(Collective.BROADCAST), torch.float32),
    ],
)
def test_other_calls_follow_the_rule(request_, dtype, tmp_path):
    layout = make_layout(tmp_path)
    for size in (200, 5000):
        own, rule = (
            select(request_, size, each, dtype, on_gpu=False)
            for each in (layout, replace(layout, tuning=NO_TABLE))
        )
        assert (own.name, own.transport) == (rule.name, rule.transport)


@pytest.mark.parametrize(
    ("collective", "device", "algorithm", "transport", "said"),
    [
        ("all-reduce", "cpu", "central", SHARED, "central leaves out the buffers of 1 of 2 ranks"),
        ("broadcast", "cpu", "ring", "auto", "ring has no single root, so it makes no broadcast"),
        ("all-gather", "cpu", "ring:segments=2", MPI, "ring:segments=2 on 2 ranks does not give"),
        ("all-reduce", "gpu", "ring", MPI, "transport mpi works on CPU memory"),
    ],
)
def test_a_table_that_names_what_cannot_be_is_refused_before_the_first_call(
    collective, device, algorithm, transport, said, tmp_path
):
    ranges = (RANGES[0], Range(100, 4000, algorithm, transport))
    layout = make_layout(tmp_path, collective, device, ranges, transports=(SHARED, MPI, TORCH))
    where = rf"the tuning table .*table\.json \(SHA-256 \w+\), {collective} float32 {device}: "
    with pytest.raises(ConfigurationError, match=where + said):
        Planner(layout, SharedMemory(), None, {})


def test_a_table_of_another_layout_is_not_used_and_says_so(tmp_path):
    layout = make_layout(tmp_path, transports=(MPI,))
    found = select(CallRequest(ALL), 200, layout, on_gpu=False)
    assert (found.name, found.transport) == ("recursive-doubling", MPI)
    assert "without its ranges over shared-memory: not possible here" in layout.tuning.text
    table = read_table(write(tmp_path / "table.json", nodes=[2, 2]))
    tuning = fit_table(table, (4,), (SHARED,))
    assert tuning.ranges == {}
    assert tuning.text.endswith(
        "is not used: it is for 4 ranks on 2 nodes, and here are 4 ranks on 1 node"
    )
    assert "4 ranks on 2 nodes (1, 3)" in fit_table(table, (3, 1), ()).text


@pytest.mark.mpi
def test_ranks_run_what_the_table_says(pool, tmp_path):
    path = write(tmp_path / "table.json")
    direct = "all-reduce (direct over shared-memory)"
    for found in pool("openmpi", 2).call(tuned.run, path, (25, 1000)).values:
        assert found["ran"] == [direct, direct]
        assert found["tuning"].startswith(f"{path} (SHA-256 ")
    write(path, nodes=[1, 1])
    result = pool("openmpi", 2).call(tuned.run, path, ())
    assert all(
        "is not used: it is for 2 ranks on 2 nodes" in each["tuning"] for each in result.values
    )
    assert [each.count("is not used") for each in result.stderr] == [1, 0]


@pytest.mark.mpi
def test_ranks_without_the_same_table_hear_so_in_one_line(pool, tmp_path):
    table = write(tmp_path / "table.json")
    cut = tmp_path / "cut.json"
    cut.write_text(table.read_text()[:80])
    (tmp_path / "copy.json").write_text(table.read_text())
    cases = {
        (table, None): r"MPIDDP_TUNING must name the same table on all ranks: rank 0 has one with "
        r"SHA-256 \w{12}, but not rank 1: none",
        (table, cut): r"the tuning table .*cut\.json: expected JSON: .* \(on rank 1\)",
        (cut, cut): r"the tuning table .*cut\.json: expected JSON: .*FILE\.json",
        (table, tmp_path / "copy.json"): "nothing was said",
    }
    for paths, said in cases.items():
        given_ = [None if each is None else str(each) for each in paths]
        for found in pool("openmpi", 2).call(tuned.differ, given_).values:
            assert re.fullmatch(said, found), (paths, found)
