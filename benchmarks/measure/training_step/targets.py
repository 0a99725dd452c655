"""What this project promises of training steps, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.judge.targets import Target
from benchmarks.measure.training_step.contenders import AUTO, RANKS, Contender
from benchmarks.measure.training_step.measurement import Group, TimedLink
from benchmarks.measure.training_step.report import FRAMEWORKS, Parts, summarize_parts
from benchmarks.records.options import ITEM
from benchmarks.records.workloads import MLP, Workload
from mpiddp.schedules.algorithms import central, direct, ring
from mpiddp.schedules.cost import flat, simulate
from mpiddp.training.options.groups.synchronisation import PARAMETER_SERVER

OWN, RING = Contender(AUTO), Contender("ring")
CENTRAL = Contender(PARAMETER_SERVER)
SHARDED = Contender(PARAMETER_SERVER, servers=RANKS)
LEAST_SPEED = 2.5
MOST_SHARDED = 1.1
MODEL_ERROR = 0.15


def judge(groups: Sequence[Group]) -> list[Target]:
    """The targets that these groups say something about. They hold without stragglers."""
    found: list[Target] = []
    for group in groups:
        if group.plan.straggler is not None or group.framework.get("device") == "cuda":
            continue
        found += _judge_one_node(group) if (group.nodes or 1) == 1 else _judge_nodes(group)
    return found


def _judge_one_node(group: Group) -> Iterator[Target]:
    speed = group.find_speed(OWN, FRAMEWORKS)
    if speed is None or group.ranks not in (2, 4):
        return
    where = f"{group.workload} on {group.ranks} ranks, {OWN.name}"
    least = 1.0
    if group.workload == Workload(MLP):
        if group.ranks != 2 or group.plan.batch_size != 8:
            return
        least = LEAST_SPEED
    text = f"{where}: at least {least:g} × the framework's steps per second"
    yield Target(text, {"": speed}, at_least=least)


def _judge_nodes(group: Group) -> Iterator[Target]:
    """One rank on each node, if a link was timed."""
    around = summarize_parts(group, RING)
    if group.link is None or group.ranks != group.nodes or around is None:
        return
    rate = f"{group.link.megabits:.3g} Mbit/s"
    where = f"{group.workload} on {group.nodes} nodes, links of {rate}"
    # How many times faster the ring is.
    sharded = group.find_speed(RING, SHARDED)
    if sharded is not None:
        text = f"{where}, sharded synchronous server: at most {MOST_SHARDED:g} of the ring's time"
        yield Target(text, {"": sharded}, at_most=MOST_SHARDED)
    for own in (CENTRAL, replace(CENTRAL, placement="dedicated")):
        speed = group.find_speed(RING, own)
        if speed is None:
            continue
        slowdown = speed.estimate
        predicted = predict_slowdown(group, own, around, group.link)
        text = (
            f"{where}, {own.name}: {slowdown:.2f} of the ring's time, {predicted:.2f} by the cost "
            f"model; their ratio within {MODEL_ERROR:g} of 1"
        )
        least, most = 1 - MODEL_ERROR, 1 + MODEL_ERROR
        ratio = replace(speed, ratios=speed.ratios / predicted)
        yield Target(text, {"": ratio}, at_least=least, at_most=most)


def predict_slowdown(group: Group, own: Contender, around: Parts, link: TimedLink) -> float:
    """The same by the cost model: the ring's own compute and update, and what messages take.

    Each rank counts as one node, with the link that was timed; additions are left out.
    """
    machine = flat(link.latency, link.seconds_per_byte)
    ranks, servers = group.ranks, own.count_servers(group.ranks)
    dedicated = own.placement == "dedicated"
    served = central(ranks, servers) if dedicated else direct(ranks, servers)
    elements = group.notes[own]["elements"]
    push_and_pull = simulate(served, elements, machine, item=ITEM).seconds
    buckets = [bucket["elements"] for bucket in group.notes[RING]["buckets"]]
    rings = sum(simulate(ring(ranks), count, machine, item=ITEM).seconds for count in buckets)
    rest = around.compute + around.update
    return (rest + push_and_pull) / (rest + rings)
