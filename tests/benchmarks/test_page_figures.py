"""The animated page computes what Python does, and says what the terminal says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.models import explain
from browser import Page
from mpiddp.schedules.cost import Link, Machine, bound, flat, simulate
from mpiddp.schedules.registry import Choice, find, names, parse
from mpiddp.schedules.replay import replay
from mpiddp.schedules.schedule import Schedule

FLAT = flat(5e-6, 8e-11, 2e-11)
USUAL = Machine(Link(1e-6, 8e-11), Link(1e-5, 8e-10), 1e-10)
MACHINES = {
    "flat": FLAT,
    "usual": USUAL,
    "latency": Machine(Link(0.0, 1e-12), Link(1e-3, 1e-11), 1e-12),
    "bandwidth": Machine(Link(1e-7, 1e-9), Link(1e-7, 1e-7), 1e-9),
    "additions": Machine(Link(0.0, 1e-12), Link(0.0, 2e-12), 1e-7),
}
ITEM = 4


COMPUTE = """
const [ranks, segments, names, machine, count] = arguments;
const packed = data.schedules[ranks];
return JSON.stringify(names.map((name) => {
  const schedule = segment(unpack(ranks, packed[name]), segments);
  const size = 4 * (count ?? 1024 * schedule.chunks);
  const spell = (value) => value === null ? "" : value.join("+");
  const links = countLinks(schedule, size);
  return {
    chunks: schedule.chunks,
    steps: schedule.steps.map((step) => step.map((t) => [t.src, t.dst, t.lo, t.hi, t.reduce])),
    states: replay(schedule).map((state) => state.map((row) => row.map(spell))),
    price: price(schedule, { ...machine, size }),
    merged: price(merge(schedule), { ...machine, size }),
    messages: links.flat().reduce((total, link) => total + link.messages, 0),
    sent: links.map((row) => row.reduce((total, link) => total + link.bytes, 0)),
    received: links[0].map((_, dst) => links.reduce((total, row) => total + row[dst].bytes, 0)),
    bound: bound(schedule, { ...machine, size }),
  };
}));
"""


@dataclass(frozen=True)
class Setting:
    """What schedules are priced for."""

    ranks: int
    segments: int = 1
    machine: Machine = FLAT
    nodes: tuple[int, ...] | None = None
    count: int | None = None
    """Elements of the buffer; 1024 in each chunk if not given."""


def compute(page: Page, choices: Sequence[str], setting: Setting) -> list[Any]:
    def spell(link: Link) -> Mapping[str, float]:
        return {"latency": link.latency, "secondsPerByte": link.seconds_per_byte}

    machine = {
        "between": spell(setting.machine.between),
        "inside": spell(setting.machine.inside),
        "addition": setting.machine.addition,
        "nodes": setting.nodes,
    }
    arguments = (setting.ranks, setting.segments, choices, machine, setting.count)
    return json.loads(page.run(COMPUTE, *arguments))


def check(found: Any, schedule: Schedule, setting: Setting) -> None:
    assert found["chunks"] == schedule.chunks
    assert found["steps"] == [[list(transfer) for transfer in step] for step in schedule.steps]
    states = replay(schedule, lambda rank, _: str(rank), "+".join)
    expected = ([[value or "" for value in row] for row in state] for state in states)
    assert all(seen == state for seen, state in zip(found["states"], expected, strict=True))
    check_prices(found, schedule, setting)


def check_prices(found: Any, schedule: Schedule, setting: Setting) -> None:
    count = schedule.chunks * 1024 if setting.count is None else setting.count
    run = simulate(schedule, count, setting.machine, setting.nodes, item=ITEM)
    for prices in (found["price"], found["merged"]):
        assert [step["messages"] for step in prices] == [step.messages for step in run.steps]
        for key in ("seconds", "sent", "busiest"):
            assert [step[key] for step in prices] == pytest.approx(
                [getattr(step, key) for step in run.steps]
            )
    assert found["messages"] == sum(step.messages for step in run.steps)
    assert found["sent"] == pytest.approx(run.sent)
    assert found["received"] == pytest.approx(run.received)
    hosts = setting.nodes or (1,) * setting.ranks
    limits = bound(count * ITEM, setting.machine, hosts, len(schedule.members))
    for key in ("latency", "bandwidth", "addition", "seconds"):
        assert found["bound"][key] == pytest.approx(getattr(limits, key)), key


@pytest.mark.browser
def test_the_page_segments_replays_and_prices_as_python_does(page: Page) -> None:
    page.open("ring", 16)
    for ranks in (1, 2, 3, 5, 8, 16):
        for segments in (1, 2, 3):
            setting = Setting(ranks, segments)
            for name, found in zip(names(), compute(page, names(), setting), strict=True):
                check(found, Choice(find(name), segments=segments).build(ranks), setting)


@pytest.mark.browser
@pytest.mark.parametrize("nodes", [(3, 4), (4, 4), (1, 2, 5), (2, 2, 2, 2), (6,), (1, 1, 1)])
def test_the_page_prices_nodes_as_python_does(page: Page, nodes: tuple[int, ...]) -> None:
    ranks = sum(nodes)
    page.open("two-level", ranks, nodes)
    for machine in MACHINES.values():
        for segments in (1, 3):
            setting = Setting(ranks, segments, machine, nodes)
            for name, found in zip(names(), compute(page, names(), setting), strict=True):
                schedule = Choice(find(name), segments=segments).build(ranks, nodes)
                check_prices(found, schedule, setting)


@pytest.mark.browser
@pytest.mark.parametrize("count", [0, 1, 3, 12, 13, 1000, 262_144])
def test_chunks_hold_whole_elements_as_in_python(page: Page, count: int) -> None:
    page.open("ring", 7, (3, 4))
    setting = Setting(7, 2, USUAL, (3, 4), count)
    for name, found in zip(names(), compute(page, names(), setting), strict=True):
        check_prices(found, Choice(find(name), segments=2).build(7, (3, 4)), setting)


@pytest.mark.browser
@pytest.mark.parametrize("nodes", [None, (3, 4), (6,)])
@pytest.mark.parametrize("kind", MACHINES)
def test_the_page_begins_with_the_figures_it_is_given(
    page: Page, kind: str, nodes: tuple[int, ...] | None
) -> None:
    machine, size = MACHINES[kind], 12_345_676
    ranks = sum(nodes or (5,))
    page.open("ring", ranks, nodes, size=size, machine=machine)
    read = page.run("return readMachine()")
    inside = machine.between if nodes is None else machine.inside
    for name, link in {"between": machine.between, "inside": inside}.items():
        assert read[name]["latency"] == pytest.approx(link.latency)
        assert read[name]["secondsPerByte"] == pytest.approx(link.seconds_per_byte)
    assert read["addition"] == pytest.approx(machine.addition)
    assert read["size"] == size
    assert read["nodes"] == (nodes and list(nodes))


@pytest.mark.browser
@pytest.mark.parametrize("text", ["direct:servers=2", "two-level:inner=ring,outer=direct"])
def test_parameters_and_nodes_are_kept(page: Page, text: str) -> None:
    page.open(text, 7, (3, 4))
    setting = Setting(7, 2, USUAL, (3, 4))
    (found,) = compute(page, [text], setting)
    choice = Choice(find(text.partition(":")[0]), parse(text).parameters, 2)
    check(found, choice.build(7, (3, 4)), setting)
    assert page.run("return document.querySelector('[name=first]').value") == text


FIGURES = (
    "--bytes 4M --latency 20 --bandwidth 25 --inside-latency 2 --inside-bandwidth 200 --addition 20"
)


@pytest.mark.browser
@pytest.mark.parametrize(
    "command",
    [f"two-level --ranks 6 --nodes 2 {FIGURES}", f"ring --ranks 7 --nodes 3 {FIGURES}",
     "ring --ranks 4", "two-level --ranks 6", "central --ranks 5 --bytes 1004 --latency 0",
     "double-tree --ranks 8 --nodes 8 --segments 4 --bytes 3G --bandwidth 0.01"],
)  # fmt: skip
def test_the_page_says_the_same_figures_as_the_terminal(
    page: Page, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = page.folder / "page.html"
    words = [*command.split(), "--html", str(file)]
    explain.main(words)
    options = explain.parse_options(words)
    schedule = options.choice.build(options.ranks, options.nodes)
    run = simulate(schedule, options.size // ITEM, options.machine, options.nodes, item=ITEM)
    page.driver.get(file.as_uri())
    facts, printed = page.facts(), capsys.readouterr().out
    total = describe_seconds(run.seconds)
    assert re.search(rf"modelled +{re.escape(total)}( |$)", printed, re.MULTILINE)
    assert facts["Time"] == f"0 µs of {total}"
    assert re.search(rf"lower bound +{re.escape(facts['Lower bound'])}:", printed)
    assert facts["Bytes"].split(" of ")[1] == describe_size(int(run.sent.max()))
    assert facts["Messages"] == f"0 of {sum(step.messages for step in run.steps)}"
