"""Plans and schedules: what is written for others and read back is the same, bit for bit."""

import functools
import itertools
import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.plans.conversion import make_schedule
from mpiddp.schedules.plans.loading import read_plans
from mpiddp.schedules.plans.msccl_writer import write_xml
from mpiddp.schedules.plans.msccl_xml import read_xml
from mpiddp.schedules.plans.mscclpp_json import read_content
from mpiddp.schedules.plans.mscclpp_writer import write_json
from mpiddp.schedules.plans.plan import Buffer, Operation, Plan, Promise, Span
from mpiddp.schedules.plans.plan_proof import prove_plan
from mpiddp.schedules.proof import finish
from mpiddp.schedules.schedule import Collective, Transfer, all_reduce

RECORDED = Path(__file__).parents[1] / "recorded" / "plans"
FORMATS = {
    "msccl-xml": lambda schedule: next(read_xml(write_xml(schedule, "a").encode())),
    "mscclpp-json": lambda schedule: read_content(json.loads(write_json(schedule, "a"))),
}
NAMES = [name for name in registry.names() if name != "central"]


def list_messages(schedule):
    """Every chunk's messages, without the steps."""
    return Counter(
        (src, dst, chunk, reduce)
        for step in schedule.steps
        for src, dst, lo, hi, reduce in step
        for chunk in range(lo, hi)
    )


def list_sums(schedule):
    """How each rank's sum of each chunk was added up; two operands may be swapped."""

    def add(values):
        return functools.reduce(lambda left, right: tuple(sorted((left, right), key=repr)), values)

    return finish(schedule, lambda rank, _: rank, add)


def find_same(schedule, form):
    """What comes back of a schedule that was written; it is proved as a plan on the way."""
    plan = FORMATS[form](schedule)
    assert prove_plan(plan).is_bitwise_equal
    waits = Counter(
        (each.rank, each.block, cause) for each in plan.operations for cause in each.after
    )
    assert set(waits.values()) <= {1}
    back = make_schedule(plan)
    assert list_messages(back) == list_messages(schedule)
    assert list_sums(back) == list_sums(schedule)
    assert len(back.steps) <= len(schedule.steps)
    return back


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [*NAMES, "ring:segments=3"])
def test_what_is_written_and_read_back_is_the_same(name, form):
    for ranks in (1, 2, 3, 5, 8):
        find_same(registry.parse(name).build(ranks), form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["ring", "direct", "gather-broadcast"])
def test_where_each_step_waits_for_the_last_the_steps_are_the_same(name, form):
    schedule = registry.parse(name).build(6)
    back = find_same(schedule, form)
    assert [set(step) for step in back.steps] == [set(step) for step in schedule.steps]
    assert back.owners == schedule.owners


def test_a_server_that_contributes_nothing_has_no_place_in_others():
    schedule = registry.parse("central").build(3)
    for write in (write_xml, write_json):
        with pytest.raises(ConfigurationError, match="rank 2 of this one only serves"):
            write(schedule, "central")
    reduce = registry.parse("gather-broadcast").build_half(Collective.REDUCE, 3)
    with pytest.raises(ConfigurationError, match="only an all-reduce is exported, not reduce"):
        write_xml(reduce, "reduce")


def test_messages_of_many_chunks_are_split():
    """The interpreter takes fewer than 72 chunks at once."""
    schedule = registry.parse("naive-ring:segments=1").build(3)
    wide = all_reduce(
        3, 150, [[Transfer(s, d, 0, 150, r) for s, d, _, _, r in step] for step in schedule.steps]
    )
    root = ElementTree.fromstring(write_xml(wide, "wide"))
    assert max(int(step.get("cnt")) for step in root.iter("step")) == 64
    find_same(wide, "msccl-xml")
    # What is added to neighbours at once, too.
    pairs = itertools.permutations(range(3), 2)
    wide = all_reduce(3, 150, [[Transfer(*pair, 0, 150, True) for pair in pairs]])
    steps = ElementTree.fromstring(write_xml(wide, "wide"))[0].iter("step")
    added = [each.get("cnt") for each in steps if each.get("type") == "re"]
    assert added == ["64"] * 4 + ["22"] * 2


@pytest.mark.parametrize("name", ["halving-doubling", "swing"])
def test_ranks_that_exchange_more_than_a_connection_holds_take_turns(name):
    """All at once would be a deadlock, where the interpreter takes single chunks."""
    schedule = registry.parse(name).build(8)
    root = ElementTree.fromstring(write_xml(schedule, name))
    assert max(int(step.get("cnt")) for step in root.iter("step")) == 2
    find_same(schedule, "msccl-xml")


def test_no_channel_has_more_peers_than_the_runtime_takes():
    root = ElementTree.fromstring(write_xml(registry.parse("one-shot").build(40), "wide"))
    assert root.get("nchannels") == "2"
    for gpu in root:
        peers = Counter(block.get("chan") for block in gpu)
        assert peers.total() == 39
        assert max(peers.values()) <= 32


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [("ring:segments=80", 3, "found 2 of up to 320"), ("one-shot", 130, "found 129 of up")],
)
def test_what_is_too_large_for_the_runtime_is_refused(name, ranks, words):
    with pytest.raises(ConfigurationError, match=words):
        write_xml(registry.parse(name).build(ranks), name)


def test_collectives_of_others():
    (plan,) = read_plans(RECORDED / "azure_ag_hier_4_LL.xml")
    schedule = make_schedule(plan)
    assert schedule.collective is Collective.ALL_GATHER
    assert schedule.owners == tuple(chunk // 4 for chunk in range(16))
    # Reads and writes of other ranks become messages.
    (plan,) = read_plans(RECORDED / "mscclpp_reduce_nvls.json")
    schedule = make_schedule(plan)
    assert schedule.collective is Collective.ALL_REDUCE
    assert list_sums(schedule)[0][0] == (0, 1)


def test_an_all_reduce_of_others_adds_in_the_order_of_the_ranks():
    """One step, after which all have the same bits; the plan's own do not."""
    (plan,) = read_plans(RECORDED / "msccl_tools_1step_3.xml")
    assert not prove_plan(plan).is_bitwise_equal
    schedule = make_schedule(plan)
    one_shot = registry.parse("one-shot").build(3)
    (step,), (expected,) = schedule.steps, one_shot.steps
    assert {each[:2] for each in step} == {each[:2] for each in expected}
    assert {each[2:] for each in step} == {(0, schedule.chunks, True)}


def test_an_all_to_all_is_no_schedule():
    own = Span(0, Buffer.INPUT, 0, 1)
    copy = Operation(0, 0, 0, "cpy", (own,), (Span(0, Buffer.OUTPUT, 0, 1),))
    plan = Plan("swap", Promise.ALL_TO_ALL, 1, 1, False, ((1, 1, 0),), (copy,))
    assert prove_plan(plan).transfers == 0
    with pytest.raises(ConfigurationError, match="swap: no schedule makes an all-to-all"):
        make_schedule(plan)
