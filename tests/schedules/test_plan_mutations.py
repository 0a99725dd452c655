"""Whoever changes one step of a plan is found out, on 64 ranks too."""

from __future__ import annotations

import functools
import random
import time
from xml.etree import ElementTree

import pytest

from mpiddp.schedules.plans.msccl_writer import write_xml
from mpiddp.schedules.registry import parse
from plan_runs import find_fault, is_all_reduce

PLANS = ("recursive-doubling:segments=2", "double-tree", "halving-doubling")


@functools.cache
def write(name, ranks):
    return write_xml(parse(name).build(ranks), name)


def make_tree(name, ranks):
    return ElementTree.fromstring(write(name, ranks))


def list_steps(root, *kinds):
    return [step for step in root.iter("step") if step.get("type") in kinds]


def give_wrong_peer(root, draw):
    block = draw.choice([tb for tb in root.iter("tb") if len(tb)])
    side = draw.choice(["send", "recv"])
    (own,) = [gpu.get("id") for gpu in root if block in list(gpu)]
    others = set(range(int(root.get("ngpus")))) - {int(own), int(block.get(side))}
    block.set(side, str(draw.choice(sorted(others))))


def give_wrong_chunk(root, draw):
    """Another chunk than its own, in a field that the runtime looks at."""
    whole = root.get("nchunksperloop")
    steps = list_steps(root, "s", "r", "rrc")
    step = draw.choice([step for step in steps if step.get("cnt") != whole])
    side = {"s": "src", "r": "dst"}.get(step.get("type")) or draw.choice(["src", "dst"])
    count, old = int(step.get("cnt")), int(step.get(f"{side}off"))
    most = int(root.get("nchunksperloop")) - count
    step.set(f"{side}off", str(draw.choice([each for each in range(most + 1) if each != old])))


def forget_dependency(root, draw):
    step = draw.choice([step for step in root.iter("step") if step.get("depid") != "-1"])
    step.set("depid", "-1")
    step.set("deps", "-1")


def add_twice(root, draw):
    """What comes in is added to what is there, which is part of it; or what is there to itself."""
    block = draw.choice([tb for tb in root.iter("tb") if list_steps(tb, "r", "rrc")])
    step = draw.choice(list_steps(block, "r", "rrc"))
    if step.get("type") == "r":
        step.set("type", "rrc")
        for field in ("buf", "off"):
            step.set(f"src{field}", step.get(f"dst{field}"))
        return
    fields = {**step.attrib, "s": str(len(block)), "type": "re", "depid": "-1", "deps": "-1"}
    ElementTree.SubElement(block, "step", fields | {"hasdep": "0"})


KINDS = (give_wrong_peer, give_wrong_chunk, forget_dependency, add_twice)


@pytest.mark.parametrize("kind", [give_wrong_peer, give_wrong_chunk, add_twice])
def test_changes_are_flagged_on_64_ranks_in_seconds(kind):
    for name in PLANS:
        root = make_tree(name, 64)
        kind(root, random.Random(name))
        begin = time.process_time()
        assert find_fault(root), name
        assert time.process_time() - begin < 5


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("ranks", [5, 8])
def test_what_is_not_flagged_makes_no_difference(name, ranks):
    """Against an oracle that runs plans in random orders."""
    assert find_fault(make_tree(name, ranks)) == ""
    assert is_all_reduce(make_tree(name, ranks), range(5))
    for seed in range(24):
        root, kind = make_tree(name, ranks), KINDS[seed % len(KINDS)]
        kind(root, random.Random(seed))
        if not find_fault(root):
            # A step may still wait for another by what others wait for.
            assert kind is forget_dependency and is_all_reduce(root, range(20)), (name, ranks, seed)
