"""The terms that the animated page multiplies, and that it says what the terminal says."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.records.options import describe_seconds
from benchmarks.show.drawing.figures import Loads, describe_bound
from benchmarks.study import explain
from browser import Page
from mpiddp.schedules.cost import Machine, MessageCost, bound, flat, simulate
from mpiddp.schedules.proof import replay
from mpiddp.schedules.registry import Choice, find, names, parse
from mpiddp.schedules.schedule import MIRROR, Collective, Schedule, segment
from mpiddp.wording import describe_size

FLAT = flat(5e-6, 8e-11, 2e-11)
USUAL = Machine(MessageCost(1e-6, 8e-11), MessageCost(1e-5, 8e-10), 1e-10)
MACHINES = {
    "flat": FLAT,
    "usual": USUAL,
    "latency": Machine(MessageCost(0.0, 1e-12), MessageCost(1e-3, 1e-11), 1e-12),
    "bandwidth": Machine(MessageCost(1e-7, 1e-9), MessageCost(1e-7, 1e-7), 1e-9),
    "additions": Machine(MessageCost(0.0, 1e-12), MessageCost(0.0, 2e-12), 1e-7),
}
ITEM = 4
ROOTED = dict.fromkeys((Collective.REDUCE, Collective.BROADCAST), "gather-broadcast")


@dataclass(frozen=True)
class Setting:
    """What schedules are priced for."""

    ranks: int
    segments: int = 1
    machine: Machine = FLAT
    nodes: tuple[int, ...] | None = None

    @property
    def hosts(self) -> tuple[int, ...]:
        return self.nodes or (1,) * self.ranks


# ---- without a browser --------------------------------------------------------------------


def take(load: Sequence[int], machine: Machine, chunk: float) -> float:
    """Seconds of a load, as the page multiplies."""
    far, volume, added, near, inner = (*load, 0, 0)[:5]
    seconds = far * machine.between.latency + near * machine.inside.latency
    seconds += chunk * volume * machine.between.seconds_per_byte
    return seconds + chunk * (inner * machine.inside.seconds_per_byte + added * machine.addition)


@pytest.mark.parametrize("nodes", [None, (3, 4), (4, 4), (1, 2, 5), (2, 2, 2, 2), (6,), (1, 1, 1)])
def test_terms_times_figures_are_the_simulated_prices(nodes: tuple[int, ...] | None) -> None:
    for ranks in (1, 2, 3, 5, 8, 16) if nodes is None else (sum(nodes),):
        for name, segments in itertools.product(names(), (1, 2, 3)):
            choice = Choice(find(name))
            schedule = choice.build(ranks, nodes)
            steps = list(Loads(schedule, nodes or (1,) * ranks).describe(segments))
            cut = segment(schedule, segments)
            for machine in MACHINES.values() if nodes else (FLAT,):
                run = simulate(cut, 64 * cut.chunks, machine, nodes, item=ITEM)
                found = [max(take(load, machine, 64 * ITEM) for load in step[2:]) for step in steps]
                assert found == pytest.approx([step.seconds for step in run.steps]), name
                assert [step[0] for step in steps] == [step.messages for step in run.steps]
                assert [64 * ITEM * step[1] for step in steps] == [s.busiest for s in run.steps]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_factors_times_figures_are_the_lower_bound(machine: Machine) -> None:
    for nodes in ((1,), (1,) * 9, (3, 4), (6,), (1, 1, 1), (2,) * 8):
        for text in ("ring", "central"):
            schedule = parse(text).build(sum(nodes), nodes)
            near, far, inner, volume, added = describe_bound(schedule, nodes)
            limits = bound(1000, machine, nodes, len(schedule.members))
            # Ranks that are nodes have no links inside.
            inside = machine.inside if max(nodes) > 1 else machine.between
            latency = max(near * inside.latency, far * machine.between.latency)
            slowest = max(
                inner * inside.seconds_per_byte, volume * machine.between.seconds_per_byte
            )
            assert limits.latency == pytest.approx(latency)
            assert limits.bandwidth == pytest.approx(1000 * slowest)
            assert limits.addition == pytest.approx(1000 * added * machine.addition)


# ---- in a browser -------------------------------------------------------------------------

COMPUTE = """
const [ranks, segments, names, machine] = arguments;
return JSON.stringify(names.map((name) => {
  const whole = unpack(ranks, data.schedules[ranks][name]);
  const size = 4096 * segments * whole.ends.at(-1);
  const { schedule, states, prices, bound } = makeModel(whole, segments, { ...machine, size });
  const { ends, steps } = schedule;
  const spell = (value) => value === null ? "" : value.join("+");
  const links = countLinks(schedule, size);
  return {
    ends,
    steps: steps.map((step) => step.map((t) => [t.src, t.dst, ends[t.lo], ends[t.hi], t.reduce])),
    states: states.map((state) => state.map((row) => row.map(spell))),
    prices,
    messages: links.flat().reduce((total, link) => total + link.messages, 0),
    sent: links.map((row) => row.reduce((total, link) => total + link.bytes, 0)),
    received: links[0].map((_, dst) => links.reduce((total, row) => total + row[dst].bytes, 0)),
    bound,
  };
}));
"""


def compute(page: Page, choices: Sequence[str], setting: Setting) -> list[Any]:
    def spell(link: MessageCost) -> Mapping[str, float]:
        return {"latency": link.latency, "secondsPerByte": link.seconds_per_byte}

    machine = {
        "between": spell(setting.machine.between),
        "inside": spell(setting.machine.inside),
        "addition": setting.machine.addition,
        "nodes": setting.nodes,
    }
    return json.loads(page.run(COMPUTE, setting.ranks, setting.segments, choices, machine))


def check(found: Any, schedule: Schedule, setting: Setting) -> None:
    assert found["ends"][-1] == schedule.chunks
    assert found["steps"] == [[list(transfer) for transfer in step] for step in schedule.steps]
    states = replay(schedule, lambda rank, _: str(rank), "+".join)
    for seen, state in zip(found["states"], states, strict=True):
        assert seen == [[row[chunk] or "" for chunk in found["ends"][:-1]] for row in state]
    count = schedule.chunks * 1024
    run = simulate(schedule, count, setting.machine, setting.nodes, item=ITEM)
    for key in ("seconds", "messages", "busiest"):
        assert [step[key] for step in found["prices"]] == pytest.approx(
            [getattr(step, key) for step in run.steps]
        )
    assert found["messages"] == sum(step.messages for step in run.steps)
    assert found["sent"] == pytest.approx(run.sent)
    assert found["received"] == pytest.approx(run.received)
    members, kind = len(schedule.members), schedule.collective
    limits = bound(count * ITEM, setting.machine, setting.hosts, members, kind)
    for key in ("latency", "bandwidth", "addition", "seconds"):
        assert found["bound"][key] == pytest.approx(getattr(limits, key)), key


@pytest.mark.browser
def test_the_page_shows_the_states_and_prices_that_python_has(page: Page) -> None:
    page.open("ring", 16)
    for ranks, segments in itertools.product((1, 3, 8), (1, 3)):
        setting = Setting(ranks, segments)
        for name, found in zip(names(), compute(page, names(), setting), strict=True):
            # One rank has no steps, and no need of segments.
            choice = Choice(find(name), segments=segments if ranks > 1 else 1)
            check(found, choice.build(ranks), setting)


@pytest.mark.browser
@pytest.mark.parametrize("kind", MIRROR, ids=lambda kind: kind.value)
def test_a_page_of_another_collective_shows_that(page: Page, kind: Collective) -> None:
    page.open("binomial-tree" if kind in ROOTED else "ring", 5, collective=kind)
    assert page.text("h1") == f"{kind.value.capitalize()}, step by step"
    offered = [name for name in page.texts("[name=first] option") if name != "two-level"]
    assert {"direct", "gather-broadcast"} & set(offered) == {ROOTED.get(kind, "direct")}
    setting = Setting(5, 3)
    for name, found in zip(offered, compute(page, offered, setting), strict=True):
        check(found, Choice(find(name), {}, 3, kind).build(5), setting)
    page.click("#end")
    ends = {
        Collective.REDUCE: "the root has the whole sum",
        Collective.BROADCAST: "has all of it",
        Collective.REDUCE_SCATTER: "every owner",
        Collective.ALL_GATHER: "every rank has all",
    }
    assert ends[kind] in page.text(".words")


@pytest.mark.browser
@pytest.mark.parametrize("nodes", [(3, 4), (6,)])
def test_the_page_prices_nodes_as_python_does(page: Page, nodes: tuple[int, ...]) -> None:
    ranks = sum(nodes)
    page.open("two-level", ranks, nodes)
    for machine in MACHINES.values():
        setting = Setting(ranks, 3, machine, nodes)
        for name, found in zip(names(), compute(page, names(), setting), strict=True):
            check(found, Choice(find(name), segments=3).build(ranks, nodes), setting)


FIGURES = (
    "--bytes 4M --latency 20 --bandwidth 25 --inside-latency 2 --inside-bandwidth 200 --addition 20"
)


@pytest.mark.browser
@pytest.mark.parametrize(
    "command",
    [f"two-level --ranks 7 --nodes 3 {FIGURES}", "central --ranks 5 --bytes 1004 --latency 0",
     "double-tree --ranks 8 --nodes 8 --segments 4 --bytes 3G --bandwidth 0.01"],
)  # fmt: skip
def test_the_page_says_the_same_figures_as_the_terminal(
    page: Page, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = page.folder / "page.html"
    words = [*command.split(), "--output", str(file)]
    explain.main(words)
    options = explain.parse_options(words)
    schedule = options.choice.build(options.ranks, options.sizes)
    run = simulate(schedule, options.size // ITEM, options.machine, options.sizes, item=ITEM)
    page.driver.get(file.as_uri())
    facts, printed = page.facts(), capsys.readouterr().out
    total = describe_seconds(run.seconds)
    assert re.search(rf"modelled +{re.escape(total)}( |$)", printed, re.MULTILINE)
    assert facts["Time"] == f"0 µs of {total}"
    assert re.search(rf"lower bound +{re.escape(facts['Lower bound'])}:", printed)
    assert facts["Bytes"].split(" of ")[1] == describe_size(int(run.sent.max()))
    assert facts["Messages"] == f"0 of {sum(step.messages for step in run.steps)}"
