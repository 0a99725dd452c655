"""What a call runs: by the stated rule, a tuning table, or what a user named; what is refused."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import oracle
import tuned
from mpiddp.collectives import BOTH, MPI, SHARED, TORCH
from mpiddp.collectives.planner import (
    LATENCY_BYTES,
    MOST_PARTS,
    PART_BYTES,
    CallRequest,
    Layout,
    Planner,
    select,
)
from mpiddp.collectives.transport.node_memory import MAILBOX
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
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.proof import is_order_fixed, prove
from mpiddp.schedules.schedule import Collective
from wrong_algorithms import registered

ALL, SCATTER, GATHER = Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER
REDUCE, BROADCAST = Collective.REDUCE, Collective.BROADCAST
SHORT, LONG = LATENCY_BYTES, LATENCY_BYTES + 1


def make_layout(nodes, transports=None, absent=None) -> Layout:
    usual, count = (BOTH, MPI, TORCH), len(set(nodes))
    if count in (1, len(nodes)):
        usual = (SHARED, *usual) if count == 1 else (MPI, BOTH, TORCH)
    hosts = tuple(f"host{node}" for node in nodes)
    return Layout(0, hosts, tuple(nodes), transports or usual, absent or {})


ONE_NODE = make_layout([0, 0, 0, 0])
LONELY = make_layout([0, 1, 2, 3])
SEVERAL = make_layout([0, 1, 0, 1])
ONLY_MPI = make_layout([0, 0, 1, 1], (MPI,))


def wish(kind: Collective, **options) -> CallRequest:
    return CallRequest(kind, root=2, **options)


TWO_LEVELS = "two-level:inner=direct,outer={}".format
RULE = [
    (ONE_NODE, wish(ALL), 0, "one-shot", SHARED),
    (ONE_NODE, wish(ALL), MAILBOX, "one-shot", SHARED),
    (ONE_NODE, wish(ALL), MAILBOX + 1, "direct", SHARED),
    *((layout, wish(ALL), size, name, MPI)
      for layout in (LONELY, ONLY_MPI)
      for size, name in ((SHORT, "recursive-doubling"), (LONG, "ring"))),
    (SEVERAL, wish(ALL), SHORT, TWO_LEVELS("recursive-doubling"), BOTH),
    (SEVERAL, wish(ALL), LONG, TWO_LEVELS("ring"), BOTH),
    *((*case, transport)
      for kind in (SCATTER, GATHER)
      for *case, transport in (
          (ONE_NODE, wish(kind), 0, "direct", SHARED),
          (ONE_NODE, wish(kind), 1 << 30, "direct", SHARED),
          (LONELY, wish(kind), 0, "ring", MPI),
          (SEVERAL, wish(kind), LONG, "ring", BOTH),
      )),
    *((*case, transport)
      for kind in (REDUCE, BROADCAST)
      for *case, transport in (
          (ONE_NODE, wish(kind), SHORT, "binomial-tree", SHARED),
          (SEVERAL, wish(kind), SHORT, "binomial-tree", BOTH),
          (ONE_NODE, wish(kind), LONG, "gather-broadcast", SHARED),
          (LONELY, wish(kind), PART_BYTES, "naive-ring", MPI),
          (LONELY, wish(kind), PART_BYTES + 1, "naive-ring:segments=2", MPI),
          (LONELY, wish(kind), 10 * PART_BYTES, "naive-ring:segments=10", MPI),
          (LONELY, wish(kind), 1 << 40, f"naive-ring:segments={MOST_PARTS}", MPI),
      )),
    (SEVERAL, wish(ALL, fixed_order=True), SHORT, "one-shot", BOTH),
    (SEVERAL, wish(ALL, fixed_order=True), LONG, "direct", BOTH),
    # Messages that were asked for are messages inside nodes, too.
    (ONE_NODE, wish(ALL, transport=MPI), SHORT, "recursive-doubling", MPI),
    (SEVERAL, wish(ALL, transport=MPI), LONG, "ring", MPI),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "request_", "size", "name", "transport"), RULE)
def test_a_call_follows_the_rule(layout, request_, size, name, transport):
    assert SHORT == 32 << 10, "as documented"
    found = select(request_, size, layout, on_gpu=False)
    assert (found.name, found.transport) == (name, transport)


@pytest.mark.parametrize(
    ("layout", "size", "name"), [(ONE_NODE, SHORT, "direct"), (SEVERAL, LONG, TWO_LEVELS("ring"))]
)
def test_on_gpus_torch_carries_direct_inside_nodes_and_two_levels_between_them(layout, size, name):
    found = select(CallRequest(ALL), size, layout, on_gpu=True)
    assert (found.name, found.transport) == (name, TORCH)
    assert select(CallRequest(ALL, transport=TORCH), size, layout, on_gpu=True).transport == TORCH


@pytest.mark.parametrize("kind", list(Collective), ids=lambda kind: kind.value)
@pytest.mark.parametrize("layout", [ONE_NODE, LONELY, SEVERAL, ONLY_MPI])
@pytest.mark.parametrize("size", [SHORT, LONG, 10 * PART_BYTES])
def test_what_is_chosen_for_a_fixed_order_has_one(kind, layout, size):
    schedule = select(CallRequest(kind, fixed_order=True), size, layout, on_gpu=False).schedule
    assert kind in (GATHER, BROADCAST) or is_order_fixed(schedule)


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 0], [1, 0, 2, 0, 1, 1]])
def test_whatever_is_built_is_proved_and_keeps_its_promise(nodes):
    layout, size = make_layout(nodes), len(nodes)
    kinds, names = set(), [name + end for name in registry.names() for end in ("", ":segments=2")]
    for kind, name, root in itertools.product(Collective, names, {0, size - 1}):
        call = CallRequest(kind, name, root=root, allows_servers=True)
        try:
            selection = select(call, 0, layout, on_gpu=False)
        except ConfigurationError:
            continue
        schedule = selection.schedule
        assert selection.name == call.algorithm
        kinds.add(call.kind)
        assert schedule.collective is call.kind or size == 1
        prove(schedule)
        oracle.check(schedule, 3 * schedule.chunks + 1, seed=size)
        if call.kind in (REDUCE, BROADCAST):
            assert set(schedule.owners) == {call.root}
        if call.kind in (SCATTER, GATHER):
            # Each rank has the part that the public calls promise it.
            assert schedule.owners == tuple(range(size))
    assert kinds == set(Collective)


@pytest.mark.parametrize("nodes", [[0, 1, 0, 1], [2, 0, 1, 1, 0, 2], [1, 0, 0, 1, 1]])
@pytest.mark.parametrize("inner", ["direct", "ring"])
def test_only_the_middle_of_two_levels_leaves_a_node(nodes, inner):
    layout = make_layout(nodes)
    call = CallRequest(ALL, f"two-level:inner={inner},outer=ring")
    steps = select(call, 0, layout, on_gpu=False).schedule.steps
    crossing = [any(nodes[t.src] != nodes[t.dst] for t in step) for step in steps]
    first, last = crossing.index(True), len(crossing) - 1 - crossing[::-1].index(True)
    assert all(crossing[first : last + 1])
    assert last - first + 1 == 2 * (len(set(nodes)) - 1)
    for step in steps[first : last + 1]:
        assert all(nodes[t.src] != nodes[t.dst] for t in step)


ABSENT = make_layout([0, 1], (MPI, TORCH), {SHARED: "the ranks are on 2 nodes"})
REFUSED = [
    (CallRequest(ALL, transport=SHARED), ABSENT, False,
     ("transport shared-memory is not possible here: the ranks are on 2 nodes; possible: mpi, "
     "torch")),
    (CallRequest(ALL, transport=BOTH), ONE_NODE, True,
     f"transport {BOTH} works on CPU memory, but the tensor is on a GPU: use torch"),
    *((CallRequest(kind, name), ONE_NODE, False,
       f"{name} has no halves, so it makes no {kind.value}")
      for kind, name in ((SCATTER, "one-shot"), (BROADCAST, "two-level"))),
    *((CallRequest(kind, name), ONE_NODE, False,
       (f"{name} on 4 ranks does not give each rank one part of the buffer, in order, so it makes "
        f"no {kind.value}: ring and direct do"))
      for kind, name in ((SCATTER, "binomial-tree"), (GATHER, "double-tree"),
                         (SCATTER, "direct:servers=2"))),
    *((CallRequest(kind, name), ONE_NODE, False,
       f"{name} has no single root, so it makes no {kind.value}; binomial-tree, for example, does")
      for kind, name in ((BROADCAST, "halving-doubling"), (REDUCE, "central"))),
    (CallRequest(ALL, "central:servers=2"), ONE_NODE, False,
     ("central:servers=2 leaves out the buffers of 2 of 4 ranks, which only serve: use "
      "gather-broadcast or direct, which include them")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "layout", "on_gpu", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(call, layout, on_gpu, words):
    with pytest.raises(ConfigurationError) as found:
        select(call, 100, layout, on_gpu=on_gpu)
    assert str(found.value) == words


@pytest.mark.parametrize("kind", [ALL, SCATTER])
@pytest.mark.parametrize("nodes", [[0] * 4, [0] * 3, [0, 1, 0, 1]], ids=str)
def test_an_order_that_is_not_fixed_is_refused_with_algorithms_that_have_one(kind, nodes):
    """What is no all-reduce is offered to nobody."""
    layout = make_layout(nodes)
    with registered():
        with pytest.raises(ConfigurationError) as caught:
            select(CallRequest(kind, "ring", fixed_order=True), 100, layout, on_gpu=False)
        begin = "ring adds in an order that depends on where a buffer is cut: with fixed_order use "
        text = str(caught.value)
        assert text.startswith(begin)
        offered = text.removeprefix(begin).split(", ")
        assert "direct" in offered and ("one-shot" in offered) == (kind is ALL)
        for name in registry.names():
            request = CallRequest(kind, name, fixed_order=True)
            try:
                found = select(request, 100, layout, on_gpu=False)
            except (ConfigurationError, ScheduleError):
                assert name not in offered
            else:
                assert name in offered and is_order_fixed(found.schedule)


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


def make_tuned(
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
        (99, ("one-shot", SHARED)), (100, ("direct", SHARED)), (4001, ("ring", SHARED)),
        (1 << 20, ("ring", SHARED)), ((1 << 20) + 4, ("direct", SHARED)),
    ],
)  # fmt: skip
def test_auto_follows_the_table_where_it_has_a_range_and_the_rule_elsewhere(size, chosen, tmp_path):
    layout = make_tuned(tmp_path)
    found = select(CallRequest(ALL), size, layout, on_gpu=False)
    assert (found.name, found.transport) == chosen
    assert "is used for all-reduce of float32, CPU" in layout.tuning.text


@pytest.mark.parametrize(
    ("request_", "dtype"),
    [
        (CallRequest(ALL), torch.bfloat16), (CallRequest(BROADCAST), torch.float32),
        *((CallRequest(ALL, **wish), torch.float32)
          for wish in ({"algorithm": "one-shot"}, {"transport": SHARED}, {"fixed_order": True})),
    ],
)  # fmt: skip
def test_other_calls_follow_the_rule(request_, dtype, tmp_path):
    layout = make_tuned(tmp_path)
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
    layout = make_tuned(tmp_path, collective, device, ranges, transports=(SHARED, MPI, TORCH))
    where = rf"the tuning table .*table\.json \(SHA-256 \w+\), {collective} float32 {device}: "
    with pytest.raises(ConfigurationError, match=where + said):
        Planner(layout, SharedMemory(), None, {})


def test_a_table_of_another_layout_is_not_used_and_says_so(tmp_path):
    layout = make_tuned(tmp_path, transports=(MPI,))
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


def test_a_messenger_goes_on_in_waits_in_memory_and_is_closed_with_the_planner():
    messenger, memory = mock.Mock(), mock.Mock()
    planner = Planner(SEVERAL, SharedMemory(), memory, {MPI: lambda: messenger})
    selection = select(CallRequest(ALL), SHORT, SEVERAL, on_gpu=False)
    assert planner.ensure_messenger(selection, on_gpu=False) is messenger
    memory.help_in_waits.assert_called_once_with(messenger.progress)
    planner.close()
    messenger.close.assert_called_once_with()


def test_a_schedule_of_the_users_is_compared_by_its_first_call_alone():
    planner = Planner(SEVERAL, SharedMemory(), None, {}, agree := mock.Mock())
    with registered():
        for name in ("lopsided", "direct", "lopsided"):
            planner.select(CallRequest(ALL, name), SHORT, on_gpu=False)
    agree.assert_called_once_with(mock.ANY, "the schedule of lopsided")


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
