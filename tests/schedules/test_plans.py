"""Plans: what is proved of other projects', of small ones with a fault, and of changed ones."""

import functools
import json
import random
import time
from collections import Counter, deque
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.plans import plan_proof
from mpiddp.schedules.plans.loading import read_plans
from mpiddp.schedules.plans.msccl_writer import write_xml
from mpiddp.schedules.plans.msccl_xml import read_xml
from mpiddp.schedules.plans.mscclpp_json import read_content
from mpiddp.schedules.plans.plan_proof import prove_plan
from mpiddp.schedules.registry import parse

RECORDED = Path(__file__).parents[1] / "recorded" / "plans"
RIGHT = {
    "azure_ag_hier_4_LL.xml": (48, True),
    # Each rank adds its own first.
    "msccl_tools_1step_3.xml": (18, False),
    "mscclpp_allreduce_packet.json": (8, True),
    "mscclpp_allreduce_pipeline.json": (816, True),
    "mscclpp_reduce_nvls.json": (4, True),
}
"""How many transfers there are, and whether all ranks add in the same order."""


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    (plan,) = read_plans(RECORDED / name)
    proof = prove_plan(plan)
    assert (proof.transfers, proof.is_bitwise_equal) == RIGHT[name]


def test_thread_blocks_that_share_a_copy_are_not_waited_for():
    """Each waits for the block of its own number, but reads what both have copied."""
    (plan,) = read_plans(RECORDED / "mscclpp_reduce_tbg.json")
    with pytest.raises(ScheduleError) as caught:
        prove_plan(plan)
    assert str(caught.value) == (
        "race: rank 0, thread block 1, step 6 (rres) reads part 2 of 2 of chunk 0 of rank 1's "
        "scratch, which rank 1, thread block 0, step 0 (copy) writes, and nothing orders the two"
    )

    (plan,) = read_plans(RECORDED / "msccl_tools_composed_dgx1.xml")
    with pytest.raises(ScheduleError, match="uses chunk 1 of rank 0's scratch, before anything"):
        prove_plan(plan)


def test_a_ring_of_slots_holds_a_pipeline_back():
    """Its first block may be as many rounds ahead as scratch memory has places, and no more."""
    content = json.loads((RECORDED / "mscclpp_allreduce_pipeline.json").read_text())
    assert {gpu["semaphores"][2]["init_value"] for gpu in content["gpus"]} == {32}
    for gpu in content["gpus"]:
        gpu["semaphores"][2]["init_value"] = 33
    with pytest.raises(ScheduleError, match=r"^race: .*part 1 of 34 of chunk 0 of rank"):
        prove_plan(read_content(content))


def test_a_file_is_read_once_for_each_way(tmp_path):
    text = (RECORDED / "msccl_tools_1step_3.xml").read_text()
    path = tmp_path / "both.xml"
    path.write_text(text.replace('inplace="1"', 'inplace="1" outofplace="1"'))
    in_place, out_of_place = read_plans(path)
    assert prove_plan(in_place)
    with pytest.raises(ScheduleError, match="output chunk 0 was never written"):
        prove_plan(out_of_place)


STEP = (
    '<step s="{}" type="{}" srcbuf="{}" srcoff="{}" dstbuf="{}" dstoff="{}" cnt="{}" depid="{}" '
    'deps="{}" hasdep="{}"/>'
)


def step(number, kind, source="i0", target="i0", count=1, waits=(-1, -1), hasdep=0):
    return STEP.format(
        number, kind, source[0], source[1:], target[0], target[1:], count, *waits, hasdep
    )


def make_plan(*gpus, chunks=1, scratch=2, proto="LL", coll="allreduce"):
    """A plan of two ranks; each has thread blocks, which are lists of steps."""
    text = (
        f'<algo name="small" proto="{proto}" nchannels="1" nchunksperloop="{chunks}" ngpus="2" '
        f'coll="{coll}" inplace="1">'
    )
    for rank, blocks in enumerate(gpus):
        text += f'<gpu id="{rank}" i_chunks="0" o_chunks="0" s_chunks="{scratch}">'
        for number, steps in enumerate(blocks):
            peer = 1 - rank if number == 0 else -1
            text += f'<tb id="{number}" send="{peer}" recv="{peer}" chan="0">'
            text += "".join(steps) + "</tb>"
        text += "</gpu>"
    return text + "</algo>"


EXCHANGE = [step(0, "s"), step(1, "rrc")]


HELD = pytest.mark.parametrize(("proto", "held"), [("Simple", 2), ("LL", 8)])


@HELD
def test_no_more_messages_than_a_connection_holds(proto, held):
    def make(count):
        sends = [step(at, "s", f"i{at}") for at in range(count)]
        receives = [step(count + at, "rrc", f"i{at}", f"i{at}") for at in range(count)]
        return make_plan(*([[*sends, *receives]],) * 2, chunks=count, proto=proto)

    assert find_fault(make(held)) == ""
    assert find_fault(make(held + 1)).startswith(
        f"deadlock, since a connection holds {held} messages of one chunk: rank 0, thread block 0, "
        f"step {held} "
    )


@HELD
def test_a_message_of_several_chunks_takes_as_much_room(proto, held):
    """Of large buffers the interpreter sends one chunk after the other."""

    def make(count):
        steps = [step(0, "s", count=count), step(1, "rrc", count=count)]
        return make_plan([steps], [steps], chunks=count, proto=proto)

    assert find_fault(make(held)) == ""
    fault = find_fault(make(held + 1))
    assert fault.startswith(f"deadlock, since a connection holds {held} messages of one chunk: ")
    assert fault.count(" waits for ") == 4


def test_too_many_steps_that_wait_are_refused(monkeypatch):
    monkeypatch.setattr(plan_proof, "MOST_CLOCKS", 1)
    assert "too many others wait for too long" in find_fault(make_plan([EXCHANGE], [EXCHANGE]))


def test_two_blocks_do_not_share_a_channel():
    plan = make_plan([EXCHANGE, [step(0, "s")]], [EXCHANGE])
    fault = find_fault(plan.replace('id="1" send="-1"', 'id="1" send="1"'))
    assert fault.endswith("and thread block 1 both use channel 0 from rank 0 to rank 1")


COPY = step(0, "cpy", "i0", "s0")
LATE_COPY = step(0, "cpy", "i0", "s0", waits=(0, 1))
RECEIVES_FIRST = [step(0, "rrc"), step(1, "s")]
WRONG_CHUNK = [step(0, "s", "i0"), step(1, "rrc", "i1", "i1")]


def copy_onto_itself(shift):
    """If the two overlap, the first chunk is overwritten before it is copied, or after."""
    return [
        step(0, "s", count=2), step(1, "r", "i0", "s0", 2), step(2, "cpy", "s0", f"s{shift}", 2),
        step(3, "re", f"s{shift}", "i0", 2),
    ]  # fmt: skip


def add_in_turn(first=(-1, -1), second=(0, 1)):
    """Scenario 1 of microsoft/msccl#25: the plan is right, whatever a runtime made of it."""
    receives = [step(at, "r", f"i{at}", f"s{at}", hasdep=1) for at in range(2)]
    sums = step(0, "re", "s0", "i0", waits=first), step(1, "re", "s1", "i1", 1, second, hasdep=1)
    return [[*receives, step(2, "s", "i0", "i0", 2, waits=(1, 1))], sums]


SENDERS = [step(0, "s", "i0"), step(1, "s", "i1"), step(2, "r", "i0", "i0", 2)]
TWO, FOUR = {"chunks": 2}, {"chunks": 2, "scratch": 4}
ALL_THERE = [step(0, "s", count=20), step(1, "r", count=20)]
ALL_BACK = [step(0, "rrc", count=20), step(1, "s", count=20)]
FAULTS = [
    ([RECEIVES_FIRST], [RECEIVES_FIRST], {}, "deadlock: rank 0, thread block 0, step 0 (rrc) wait"),
    ([[step(0, "rrc")]], [EXCHANGE], {}, "deadlock: rank 1, thread block 0, step 1 (rrc)"),
    ([[*EXCHANGE, step(2, "s")]], [EXCHANGE], {}, "step 2 (s): nobody on rank 1 receives it (chan"),
    ([[step(0, "s", "i1"), EXCHANGE[1]]], [EXCHANGE], {}, "chunk 1 of rank 0's input is not in"),
    ([[step(0, "s", count=2), EXCHANGE[1]]], [EXCHANGE], {}, "sends 2 chunks, rank 1, thread bloc"),
    ([[*EXCHANGE, step(2, "re")]], [EXCHANGE], {}, "step 2 (re): the contribution of ranks 0, 1 i"),
    ([[EXCHANGE[0], step(1, "r")]], [EXCHANGE], {}, "chunk 0 lacks the contribution of rank 0"),
    ([[step(1, "s"), step(0, "rrc")]], [EXCHANGE], {}, "its steps are not numbered 0 to 1"),
    ([EXCHANGE], [EXCHANGE], {}, ""),
    ([WRONG_CHUNK], [WRONG_CHUNK], TWO, "step 1 (rrc): chunk 1 is added to chunk 0"),
    # Many chunks one way are taken out as they come.
    ([ALL_THERE], [ALL_BACK], {"chunks": 20, "proto": "Simple"}, ""),
    ([copy_onto_itself(1)], [copy_onto_itself(1)], FOUR,
     "race: rank 0, thread block 0, step 2 (cpy) writes chunks 1"),
    ([copy_onto_itself(2)], [copy_onto_itself(2)], FOUR, ""),
    ([EXCHANGE, [LATE_COPY]], [EXCHANGE], {},
     ("deadlock: rank 0, thread block 1, step 0 (cpy) waits for thread block 0, step 1, which "
      "never says that it is done (hasdep=1)")),
    # A later step announces an earlier one.
    ([[*EXCHANGE, step(2, "cpy", "i0", "s1", hasdep=1)], [LATE_COPY]], [EXCHANGE], {}, ""),
    ([[EXCHANGE[0], step(1, "rrc", hasdep=1)], [COPY]], [EXCHANGE], {},
     ("race: rank 0, thread block 1, step 0 (cpy) reads chunk 0 of rank 0's input, which rank 0, "
      "thread block 0, step 1 (rrc) writes, and nothing orders the two")),
    ([SENDERS], add_in_turn((0, 0)), TWO, ""),
    ([SENDERS], add_in_turn(), TWO, "race: "),
    ([SENDERS], add_in_turn((0, 0), (0, 0)), TWO, "race: "),
    # What comes in is passed on with rank 1's own, and comes back.
    ([[step(0, "s"), step(1, "r"), step(2, "s")]], [[step(0, "rrs"), step(1, "r")]], {}, ""),
]  # fmt: skip
"""Thread blocks of two ranks, options of `make_plan`, and what is said of them."""


@pytest.mark.parametrize(("first", "second", "options", "words"), FAULTS)
def test_small_faults(first, second, options, words):
    fault = find_fault(make_plan(first, second, **options))
    assert words in fault and bool(words) == bool(fault)


UNKNOWN = [
    ('coll="allreduce"', 'coll="custom"', "coll='custom' is not known: expected allreduce,"),
    ('proto="LL"', 'proto="LL" colour="red"', "plan.xml: has a field that is not known: colour"),
    ('cnt="1"', 'cnt="1" priority="3"', "gpu[0].tb[0].step[0]: has a field that is not known: pri"),
    ('chan="0"', 'chan="0" colour="red"', "gpu[0].tb[0]: has a field that is not known: colour"),
    ('s_chunks="2"', 's_chunks="2" colour="red"', "gpu[0]: has a field that is not known: colour"),
    ('type="s"', 'type="ra"', "type='ra' of a step is not known"),
    ('chan="0"', "", "gpu[0].tb[0]: lacks chan"),
    ('srcbuf="i"', 'srcbuf="x"', "gpu[0].tb[0].step[0].srcbuf: 'x' is not known"),
    ('ngpus="2"', 'ngpus="3"', "expected one gpu element for each of 3 ranks"),
    ('proto="LL"', 'proto="Fast"', "proto='Fast' is not known: expected Simple, LL, LL128"),
]


@pytest.mark.parametrize(("old", "new", "words"), UNKNOWN)
def test_what_is_not_known_is_named(old, new, words, tmp_path):
    path = tmp_path / "plan.xml"
    text = make_plan([EXCHANGE], [EXCHANGE])
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        read_plans(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def local(kind, index=0):
    return {"type": kind, "index": index, "size": 1}


PUT = {
    "name": "put", "src_buff": [local("i")],
    "dst_buff": [{"buffer_id": 0, "index": 0, "size": 1}], "channel_ids": [0],
    "channel_type": "memory",
}  # fmt: skip
NOP = {"name": "nop"}
ADD = {
    "name": "re", "src_buff": [local("i"), local("s")], "dst_buff": [local("i")],
    "reduce_op": "sum",
}  # fmt: skip
SIGNAL, WAIT = (
    {"name": name, "channel_ids": [0], "channel_type": "memory"} for name in ("signal", "wait")
)
SUM = [PUT, NOP, SIGNAL, WAIT, NOP, ADD]


def make_content(first):
    gpus = []
    for rank, blocks in enumerate((first, SUM)):
        blocks = blocks if isinstance(blocks[0], list) else [blocks]
        gpus.append(
            {
                "id": rank, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 1,
                "threadblocks": [
                    {
                        "id": number, "ops": operations,
                        "channels": [{"channel_type": "memory", "channel_ids": [0]}],
                        "remote_buffer_refs": [
                            {"access_channel_type": "memory", "remote_buffer_ids": [0]}
                        ],
                    }
                    for number, operations in enumerate(blocks)
                ],
                "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
                "remote_buffers": [
                    {"rank": 1 - rank, "type": "s", "access_channel_types": ["memory"]}
                ],
                "semaphores": [{"init_value": 0}],
            }
        )  # fmt: skip
    return {
        "name": "small", "collective": "allreduce", "protocol": "Simple", "inplace": True,
        "gpus": gpus, "use_double_scratch_buffer": True,
    }  # fmt: skip


CASES = [
    (SUM, ""),
    ([PUT, NOP, SIGNAL, WAIT, ADD], "race: rank 0, thread block 0, step 4 (re) follows wait"),
    ([PUT, SIGNAL, WAIT, NOP, ADD], "race: rank 0, thread block 0, step 1 (signal) follows put"),
    ([PUT, NOP, WAIT, SIGNAL, NOP, ADD], "step 3 (signal) follows wait without a nop between"),
    ([PUT, NOP, WAIT, NOP, ADD], "deadlock: rank 1, thread block 0, step 3 (wait) waits for a sig"),
    ([PUT, NOP, SIGNAL, NOP, ADD], "race: rank 0, thread block 0, step 4 (re) reads chunk 0 of "),
    ([PUT, NOP, WAIT, NOP, SIGNAL, NOP, ADD], ""),
    ([SIGNAL, WAIT, NOP, ADD], "step 5 (re) uses chunk 0 of rank 1's scratch, before anything was"),
    (
        [[PUT, NOP, SIGNAL, WAIT, NOP, {"name": "sem_release", "semaphore_ids": [0]}],
         [{"name": "sem_acquire", "semaphore_ids": [0]}, NOP, ADD]],
        "",
    ),
    (
        [[PUT, NOP, SIGNAL, WAIT, NOP, {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}],
         [{"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}, ADD]],
        "",
    ),
    (
        [[*SUM, {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}]],
        "waits for 2 thread blocks, of which 1 come",
    ),
    ([[{"name": "sem_acquire", "semaphore_ids": [0]}], SUM], "waits for a signal that is never"),
]  # fmt: skip


@pytest.mark.parametrize(("operations", "words"), CASES)
def test_signals_and_what_they_order(operations, words):
    try:
        prove_plan(read_content(make_content(operations)))
    except ScheduleError as error:
        assert words
        assert words in str(error)
    else:
        assert not words


def test_a_call_does_not_overwrite_what_the_last_one_still_needs():
    """A rank that is done puts again, perhaps before its peer has added."""
    content = make_content(SUM)
    assert prove_plan(read_content(content))
    content["use_double_scratch_buffer"] = False
    with pytest.raises(ScheduleError, match=r"step 5 \(re\) reads .* if one call follows another$"):
        prove_plan(read_content(content))


def change_rank(content, **changes):
    return {"gpus": [content["gpus"][0] | changes, content["gpus"][1]]}


def change_block(content, **changes):
    return change_rank(content, threadblocks=[content["gpus"][0]["threadblocks"][0] | changes])


def change_operation(content, **changes):
    return change_block(content, ops=[*SUM[:-1], ADD | changes])


WRONG = [
    (dict, {"colour": 1}, "plan.json: has a field that is not known: colour"),
    (dict, {"collective": "sendrecv"}, "collective 'sendrecv': what it promises is not known"),
    (change_rank, {"id": 1}, "plan.json: expected one gpu for each of 2 ranks"),
    (change_rank, {"colour": 1}, "gpus[0]: has a field that is not known: colour"),
    (change_block, {"colour": 1}, "gpus[0].threadblocks[0]: has a field that is not known: colour"),
    (change_operation, {"name": "shout"}, "operation 'shout' is not known"),
    (change_operation, {"reduce_op": "min"}, "reduce_op 'min': expected sum"),
    (change_operation, {"loudness": 3}, "threadblocks[0].ops[5]: has a field that is not known: l"),
    (change_operation, {"ops": [NOP | {"loudness": 3}]}, "has a field that is not known: loudness"),
    (change_operation, {"ops": [NOP]}, "a pipeline lacks iter_context"),
]


@pytest.mark.parametrize(("where", "change", "words"), WRONG)
def test_json_that_is_not_known_is_named(where, change, words, tmp_path):
    path, content = tmp_path / "plan.json", make_content(SUM)
    changed = change if where is dict else where(content, **change)
    path.write_text(json.dumps(content | changed))
    with pytest.raises(ConfigurationError) as caught:
        read_plans(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


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


SLOTS = 8
RECEIVES, SENDS = {"r", "rcs", "rrs", "rrc", "rrcs"}, {"s", "rcs", "rrs", "rrcs"}
WRITES = {"r", "rcs", "rrc", "rrcs", "cpy", "re"}


class StuckError(Exception):
    """No thread block can go on."""


def run_all_reduce(root, seed):
    """What each rank has of each chunk in the end, in place: how often each rank's is in it.

    The oracle of the proof: it runs thread blocks in a random order, each step when its flag is up
    and its message, or a place for it, is there. It knows nothing of happens-before.
    """
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
    if kind in {"s", "rrs", "rrc", "rrcs", "cpy"} or kind == "re":
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
