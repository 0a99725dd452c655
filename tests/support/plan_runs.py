"""Runs an MSCCL plan on numbers, its thread blocks in a random order: the oracle of its proof.

It takes the XML alone, and knows nothing of happens-before: a step runs when its flag is up and its
message is there, or the peer's buffer has a place.
"""

import random
from collections import Counter, deque
from xml.etree import ElementTree

from mpiddp.errors import ScheduleError
from mpiddp.schedules.plans.msccl_xml import read_xml
from mpiddp.schedules.plans.plan_proof import prove_plan

SLOTS = 8
RECEIVES, SENDS = {"r", "rcs", "rrs", "rrc", "rrcs"}, {"s", "rcs", "rrs", "rrcs"}
READS_SOURCE = {"s", "rrs", "rrc", "rrcs", "cpy"}
WRITES = {"r", "rcs", "rrc", "rrcs", "cpy", "re"}


class StuckError(Exception):
    """No thread block can go on."""


def run_all_reduce(root, seed):
    """What each rank has of each chunk in the end, in place: how often each rank's is in it."""
    draw = random.Random(seed)
    ranks, chunks = int(root.get("ngpus")), int(root.get("nchunksperloop"))
    memory = {
        (rank, "i", chunk): Counter({(rank, chunk): 1})
        for rank in range(ranks)
        for chunk in range(chunks)
    }
    flags, queues = {}, {}
    blocks = [(int(gpu.get("id")), tb, list(tb), [0]) for gpu in root for tb in gpu]
    unfinished = [block for block in blocks if block[2]]
    while unfinished:
        draw.shuffle(unfinished)
        if not any(_take_step(block, memory, flags, queues) for block in unfinished):
            raise StuckError
        unfinished = [block for block in unfinished if block[3][0] < len(block[2])]
    return [[memory[rank, "i", chunk] for chunk in range(chunks)] for rank in range(ranks)]


def _take_step(block, memory, flags, queues):
    rank, tb, steps, place = block
    step = steps[place[0]]
    kind, count, number = step.get("type"), int(step.get("cnt")), int(step.get("s"))
    depid, deps = int(step.get("depid")), int(step.get("deps"))
    if depid >= 0 and flags.get((rank, depid), -1) < deps:
        return False
    channel = tb.get("chan")
    incoming = queues.setdefault((int(tb.get("recv")), rank, channel), deque())
    outgoing = queues.setdefault((rank, int(tb.get("send")), channel), deque())
    if (kind in RECEIVES and not incoming) or (kind in SENDS and len(outgoing) >= SLOTS):
        return False

    def find(side):
        offset, buffer = int(step.get(f"{side}off")), step.get(f"{side}buf")
        buffer = "i" if buffer == "o" else buffer
        return [(rank, buffer, offset + at) for at in range(count)]

    values = incoming.popleft() if kind in RECEIVES else [Counter()] * count
    if kind in READS_SOURCE or kind == "re":
        values = [a + memory.get(b, Counter()) for a, b in zip(values, find("src"), strict=True)]
    if kind == "re":
        values = [a + memory.get(b, Counter()) for a, b in zip(values, find("dst"), strict=True)]
    if kind in WRITES:
        memory.update(zip(find("dst"), values, strict=True))
    if kind in SENDS:
        outgoing.append(values)
    if step.get("hasdep") == "1" and kind != "nop":
        flags[rank, int(tb.get("id"))] = number
    place[0] += 1
    return True


def is_all_reduce(root, seeds):
    """Whether it ends with each contribution exactly once, in as many random orders as seeds."""
    ranks, chunks = int(root.get("ngpus")), int(root.get("nchunksperloop"))
    expected = [
        [Counter({(rank, chunk): 1 for rank in range(ranks)}) for chunk in range(chunks)]
    ] * ranks
    try:
        return all(run_all_reduce(root, seed) == expected for seed in seeds)
    except (StuckError, ValueError):
        return False


def find_fault(plan: ElementTree.Element | str) -> str:
    """What the proof says of an MSCCL plan; empty if it is proved."""
    text = plan if isinstance(plan, str) else ElementTree.tostring(plan, "unicode")
    try:
        for each in read_xml(text.encode()):
            prove_plan(each)
    except ScheduleError as error:
        return str(error)
    return ""
