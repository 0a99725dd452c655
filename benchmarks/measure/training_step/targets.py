"""What this project promises of training steps, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.judge.targets import Target
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.training_step.synchronisations import AUTO, RANKS, StepPlan, Synchronisation
from benchmarks.measure.training_step.tables import FRAMEWORKS, find_link
from benchmarks.records.options import ITEM
from benchmarks.records.statistics import quantile
from benchmarks.records.workloads import MLP
from mpiddp.schedules.algorithms import central, direct, ring
from mpiddp.schedules.cost import flat, simulate
from mpiddp.schedules.machine import Machine
from mpiddp.training.options.groups.synchronisation import PARAMETER_SERVER

OWN, RING = Synchronisation(AUTO), Synchronisation("ring")
CENTRAL = Synchronisation(PARAMETER_SERVER)
SHARDED = Synchronisation(PARAMETER_SERVER, servers=RANKS)
LEAST_SPEED = 2.5
MOST_SHARDED = 1.1
MODEL_ERROR = 0.15


def judge(groups: Sequence[CellGroup], plan: StepPlan) -> list[Target]:
    """The targets that these groups say something about. They hold without stragglers."""
    found: list[Target] = []
    for group in groups:
        if plan.straggler is not None or group.facts["device"] == "cuda":
            continue
        if (group.nodes or 1) == 1:
            found += _judge_one_node(group, plan)
        else:
            found += _judge_nodes(group)
    return found


def _judge_one_node(group: CellGroup, plan: StepPlan) -> Iterator[Target]:
    speed, model = group.divide(FRAMEWORKS.name, OWN.name), group.facts["model"]
    if speed is None or group.ranks not in (2, 4):
        return
    where = f"{model} on {group.ranks} ranks, {OWN.name}"
    least = 1.0
    if model == MLP:
        if group.ranks != 2 or plan.batch_size != 8:
            return
        least = LEAST_SPEED
    text = f"{where}: at least {least:g} × the framework's steps per second"
    yield Target(text, {"": speed}, at_least=least)


def _judge_nodes(group: CellGroup) -> Iterator[Target]:
    """One rank on each node, if a link was timed."""
    link = find_link(group)
    if link is None or group.ranks != group.nodes or group.find(RING.name) is None:
        return
    where = f"{group.facts['model']} on {group.nodes} nodes, links of {link.megabits:.3g} Mbit/s"
    # How many times faster the ring is.
    sharded = group.divide(SHARDED.name, RING.name)
    if sharded is not None:
        text = f"{where}, sharded synchronous server: at most {MOST_SHARDED:g} of the ring's time"
        yield Target(text, {"": sharded}, at_most=MOST_SHARDED)
    for own in (CENTRAL, replace(CENTRAL, placement="dedicated")):
        speed = group.divide(own.name, RING.name)
        if speed is None:
            continue
        predicted = predict_slowdown(group, own, flat(link.latency, link.seconds_per_byte))
        text = (
            f"{where}, {own.name}: {speed.estimate:.2f} of the ring's time, {predicted:.2f} by the "
            f"cost model; their ratio within {MODEL_ERROR:g} of 1"
        )
        least, most = 1 - MODEL_ERROR, 1 + MODEL_ERROR
        ratio = replace(speed, ratios=speed.ratios / predicted)
        yield Target(text, {"": ratio}, at_least=least, at_most=most)


def predict_slowdown(group: CellGroup, own: Synchronisation, machine: Machine) -> float:
    """The same by the cost model: the ring's own compute and update, and what messages take.

    Each rank counts as one node, with the link that was timed; additions are left out.
    """
    ranks, servers = group.ranks, own.count_servers(group.ranks)
    served = central(ranks, servers) if own.placement == "dedicated" else direct(ranks, servers)
    elements = find_notes(group, own)["elements"]
    push_and_pull = simulate(served, elements, machine, item=ITEM).seconds
    buckets = [bucket["elements"] for bucket in find_notes(group, RING)["buckets"]]
    rings = sum(simulate(ring(ranks), count, machine, item=ITEM).seconds for count in buckets)
    parts = (group.find_samples(RING.name, part=part) for part in ("compute", "update"))
    rest = sum(quantile(values, 0.5) for values in parts)
    return (rest + push_and_pull) / (rest + rings)


def find_notes(group: CellGroup, contender: Synchronisation) -> Mapping[str, Any]:
    """What a contender's ranks said of its step."""
    cell = group.find(contender.name)
    assert cell is not None
    notes: Mapping[str, Any] = cell.details["notes"]
    return notes
