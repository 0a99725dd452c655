"""The animated page: what is in it, its figures, and in a real browser that it obeys its reader."""

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import browser
from benchmarks.records.options import describe_seconds
from benchmarks.show.drawing import page as pages
from benchmarks.show.drawing.figures import Loads
from benchmarks.show.drawing.page import LARGEST, draw_page
from benchmarks.study import explain
from browser import Page
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import Machine, MessageCost, bound, flat, simulate
from mpiddp.schedules.proof import replay
from mpiddp.schedules.registry import Choice, find, names, parse
from mpiddp.schedules.schedule import MIRROR, Collective, Schedule, segment
from mpiddp.wording import describe_size

FLAT, LINK = flat(5e-6, 8e-11, 2e-11), MessageCost(0, 1e-9)


@cache
def draw_ring() -> str:
    return draw_page(parse("ring"), 4)


def read_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("text", "ranks", "nodes", "message"),
    [
        ("ring", 0, None, "ranks must be an integer >= 1, found 0"),
        ("ring", LARGEST + 1, None, r"up to 64 ranks, not 65: write an .svg"),
        ("ring", 4, (2, 3), "nodes of 2, 3 ranks are not 4 ranks"),
        ("direct:servers=5", 4, None, "1 to 4 colocated servers, not 5"),
        ("ring:segments=65", 16, None, "up to 16384 cells .* ring:segments=65 .* has 16640"),
        ("two-level:inner=one-shot", 4, None, "one-shot has no halves"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    text: str, ranks: int, nodes: Sequence[int] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as refusal:
        draw_page(parse(text), ranks, nodes)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigurationError, match="1 to 3 dedicated servers, not 4"):
        draw_page(parse("ring"), 4, beside=parse("central:servers=4"))


@pytest.mark.parametrize(
    ("machine", "size", "message"),
    [
        (Machine(LINK, LINK, 1e-9, shared=5e-10), 1, "whose link is as fast as"),
        (flat(0, 0, 1e-9), 1, "bandwidths of 0.001 to 1,000,000 Gbit/s, not inf"),
        (flat(0, 1e-9, 0), 1, "additions of 0.001 to 1,000,000 GB/s, not inf"),
        (flat(1e4, 1e-9, 1e-9), 1, r"latencies of 0 to 1,000,000 µs, not 1e\+10: use the terminal"),
        (FLAT, (1 << 40) + 1, r"buffers of 0 to 1,048,576 MiB"),
    ],
)
def test_figures_that_no_field_can_hold_are_refused(
    machine: Machine, size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        draw_page(parse("ring"), 4, machine=machine, size=size)
    options = explain.parse_options(["ring"])
    assert (options.size, options.machine) == (pages.MEBIBYTE, pages.MACHINE)


def test_every_algorithm_is_there_for_every_offered_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One with parameters wherever it can be; but none that is too large to be shown."""
    schedules = read_data(draw_page(parse("direct:servers=5,segments=2"), 9))["schedules"]
    assert sorted(map(int, schedules)) == [*range(1, 11), 12, 16]
    for ranks, entries in schedules.items():
        own = {"direct:servers=5"} if int(ranks) >= 5 else set()
        assert set(entries) == {*names()} | own, ranks
    monkeypatch.setattr(pages, "LARGEST_GRID", 100)
    schedules = read_data(draw_page(parse("ring"), 4))["schedules"]
    assert "ring" in schedules["10"] and "ring" not in schedules["12"]


def test_nodes_hold_for_the_ranks_they_were_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OFFERED", (1, 4, 6))
    data = read_data(draw_page(parse("two-level"), 8, (3, 5)))
    assert data["nodes"] == {"8": [3, 5]}
    schedules = data["schedules"]
    assert not any("halves" in each for count in "18" for each in schedules[count].values())
    assert schedules["6"]["two-level"]["halves"] == [3, 3]
    assert "halves" not in schedules["6"]["ring"]


def test_the_largest_page_is_small_enough_to_send() -> None:
    page = draw_page(parse("ring"), LARGEST, (20, 44), beside=parse("two-level:outer=one-shot"))
    assert len(page.encode()) < 1_500_000
    assert len(draw_ring().encode()) < 320_000


def test_a_page_holds_its_scripts_and_refers_to_nothing_outside_it() -> None:
    page = draw_ring()
    assert not re.search(r"https?:|\bsrc=|url\(|@import|\bfetch\(|XMLHttpRequest", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"@(title|style|script|data)@", page)
    folder = Path(pages.__file__).parent
    assert {path.name for path in folder.glob("*.js")} == set(pages.SCRIPTS)
    assert all((folder / name).read_text("utf-8") in page for name in pages.SCRIPTS)


def test_a_name_cannot_break_out_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OFFERED", (2,))
    ring = find("ring")
    strange = Choice(ring, {"</script><script>alert(1)</script>": 1})

    class Strange(Choice):
        def build(self, ranks: int, nodes: Sequence[int] | None = None) -> Schedule:
            return ring.make(ranks)

    page = draw_page(Strange(ring, strange.parameters), 2)
    assert "<script>alert" not in page
    assert str(strange) in read_data(page)["schedules"]["2"]


USUAL = Machine(MessageCost(1e-6, 8e-11), MessageCost(1e-5, 8e-10), 1e-10)
MACHINES = {
    "flat": FLAT, "usual": USUAL,
    "latency": Machine(MessageCost(0.0, 1e-12), MessageCost(1e-3, 1e-11), 1e-12),
    "bandwidth": Machine(MessageCost(1e-7, 1e-9), MessageCost(1e-7, 1e-7), 1e-9),
    "additions": Machine(MessageCost(0.0, 1e-12), MessageCost(0.0, 2e-12), 1e-7),
}  # fmt: skip
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
        "between": spell(setting.machine.between), "inside": spell(setting.machine.inside),
        "addition": setting.machine.addition, "nodes": setting.nodes,
    }  # fmt: skip
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


@pytest.mark.parametrize("nodes", [None, (3, 4)])
def test_the_page_shows_the_states_and_prices_that_python_has(
    page: Page, nodes: tuple[int, ...] | None
) -> None:
    page.open("two-level", 7, nodes)
    settings = [Setting(1), Setting(3, 3), Setting(8)]
    if nodes:
        settings = [Setting(7, 3, machine, nodes) for machine in MACHINES.values()]
    for setting in settings:
        for name, found in zip(names(), compute(page, names(), setting), strict=True):
            schedule = Choice(find(name), segments=setting.segments).build(setting.ranks, nodes)
            check(found, schedule, setting)


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
        Collective.REDUCE: "the root has the whole sum", Collective.BROADCAST: "has all of it",
        Collective.REDUCE_SCATTER: "every owner", Collective.ALL_GATHER: "every rank has all",
    }  # fmt: skip
    assert ends[kind] in page.text(".words")


FIGURES = (
    "--bytes 4M --latency 20 --bandwidth 25 --inside-latency 2 --inside-bandwidth 200 --addition 20"
)


def test_the_page_says_the_same_figures_as_the_terminal(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    file = page.folder / "page.html"
    words = [*f"two-level --ranks 7 --nodes 3 {FIGURES}".split(), "--output", str(file)]
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


def test_it_plays_to_the_end_and_says_so_and_pausing_stops_the_clock(page: Page) -> None:
    page.open("ring", 3, address="#speed=0.4")
    assert page.where() == "step 0 of 4"
    assert page.grid()[1] == ["b", "b", "b"]
    # At once: a busy machine comes back when the end is there.
    play = """document.querySelector("#play").click();
        return ["#where", "#play"].map((each) => document.querySelector(each).textContent.trim())"""
    assert page.run(play) == ["step 0 of 4", "Pause"]
    page.wait(lambda: page.where() == "step 4 of 4")
    assert page.text("#play") == "Play"
    assert "Now every rank has the whole sum." in page.text(".words")
    assert all("(the whole sum)" in title for row in page.grid() for title in row)
    assert page.run(play) == ["step 0 of 4", "Pause"]
    page.open("ring", 16, address="#speed=0.4")
    page.click("#play")
    page.wait(lambda: page.where() not in ("step 0 of 30", "step 1 of 30"))
    page.click("#play")
    assert page.text("#play") == "Play"
    before = page.run("return [clock, document.querySelector('#where').textContent]")
    time.sleep(0.3)
    assert page.run("return [clock, document.querySelector('#where').textContent]") == before
    # One rank has nothing to play.
    page.open("ring", 1)
    page.click("#play")
    assert (page.where(), page.text("#play")) == ("step 0 of 0", "Play")
    assert page.grid() == [["a (the whole sum)"]]
    assert page.text(".words").startswith("No step is needed")


def test_a_step_shows_what_is_added_in_its_order(page: Page) -> None:
    page.open("ring", 3, address="#speed=0.4")
    page.click("#next")
    page.wait(lambda: page.where() == "step 1 of 4" and page.text("#play") == "Play")
    # Rank r sends chunk r − 1 to its right neighbour, which puts its own at its place.
    assert page.grid() == [["a", "a+c", "a"], ["b", "b", "a+b"], ["b+c", "c", "c"]]
    changed = page.run(
        "return [...document.querySelectorAll('.grid .cell[data-changed]')].map((c) => c.title)"
    )
    assert changed == ["a+c", "a+b", "b+c"]
    assert page.text(".words") == "Step 1 of 4: every rank adds 1 chunk from its left neighbour."
    assert page.facts()["Messages"] == "3 of 12"
    assert page.text(".busiest") == "All 3 links in use have sent 341.3 KiB each."


def test_tokens_are_drawn_only_while_something_travels(page: Page) -> None:
    page.open("ring", 4)
    painted = """clock = arguments[0]; show();
        const canvas = document.querySelector(".memory canvas");
        if (canvas.width === 0) return 0;
        const copy = new OffscreenCanvas(canvas.width, canvas.height)
          .getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, index) => index % 4 === 3 && value > 0).length"""
    assert page.run(painted, 1) == 0
    assert page.run(painted, 1.5) > 1000
    assert page.run(painted, 2) == 0


def test_somebody_who_wants_no_motion_sees_none(page: Page) -> None:
    browser.emulate(page.driver, {"prefers-reduced-motion": "reduce"})
    page.open("ring", 2, address="#speed=0.4")
    page.click("#next")
    assert page.where() == "step 1 of 2"
    assert page.run("clock = 1.5; show(); return document.querySelector('canvas').width") == 0
    page.click("#play")
    page.wait(lambda: page.where() == "step 2 of 2")


def test_keys_slider_buttons_and_bars_reach_every_step(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open("ring", 4, address="#speed=0.4")
    page.press(Keys.END)
    assert page.where() == "step 6 of 6"
    page.press(Keys.ARROW_LEFT)
    assert page.where() == "step 5 of 6"
    page.press(Keys.HOME)
    assert page.where() == "step 0 of 6"
    page.press(Keys.ARROW_RIGHT)
    page.wait(lambda: page.where() == "step 1 of 6")
    page.press(Keys.ARROW_RIGHT, "#slider")
    page.wait(lambda: page.where() == "step 2 of 6")
    page.press(Keys.END, "#slider")
    assert page.where() == "step 6 of 6"
    page.click("#begin")
    page.press(" ")
    assert page.text("#play") == "Pause"
    page.press(" ", "#play")
    assert page.text("#play") == "Play"
    page.click("#end")
    page.click("#previous")
    assert page.where() == "step 5 of 6"
    page.click(".bars button:nth-child(3)")
    assert page.where() == "step 3 of 6"
    assert page.run("return document.querySelector('[aria-current=step]').title").startswith(
        "Step 3"
    )


def test_every_control_has_a_name(page: Page) -> None:
    page.open("ring", 4, beside="direct")
    unnamed = page.run(
        """return [...document.querySelectorAll("button, select, input")].filter((control) =>
          !(control.ariaLabel || control.textContent.trim() && control.tagName === "BUTTON"
            || control.labels?.[0]?.textContent.trim())).map((control) => control.outerHTML)"""
    )
    assert unnamed == []


def test_what_is_chosen_is_what_is_shown(page: Page) -> None:
    page.open("ring", 4)
    assert page.facts()["Steps"] == "0 of 6"
    page.choose("first", "one-shot")
    assert page.facts()["Steps"] == "0 of 1"
    assert page.text("h2") == "one-shot on 4 ranks"
    page.choose("ranks", 6)
    assert page.facts()["Messages"] == "0 of 30"
    assert len(page.grid()) == 6
    page.choose("firstSegments", 3)
    assert page.facts()["Steps"] == "0 of 3"
    assert len(page.grid()[0]) == 3
    page.choose("first", "direct")
    page.choose("firstSegments", 1)
    page.choose("ranks", 2)
    for name, value in {"latency": 1, "bandwidth": 8, "size": 1, "additions": 1}.items():
        page.choose(name, value)
    # Half of 1 MiB at 1 GB/s, twice, and once half of it added at 1 GB/s.
    assert page.facts()["Time"] == "0 µs of 1.57 ms"
    page.choose("latency", 1000)
    assert page.facts()["Time"] == "0 µs of 3.57 ms"
    assert page.facts()["Lower bound"] == "1.05 ms"
    # A field that cannot be read is named, and nothing changes.
    before = page.facts()
    page.choose("bandwidth", -1)
    assert page.text("#problem").startswith("Bandwidth (Gbit/s) must be a number from 0.001")
    assert page.facts() == before
    page.choose("bandwidth", 200)
    assert page.text("#problem") == "" and page.facts() != before
    # Parameters give way where they cannot be.
    page.open("central:servers=3", 8)
    page.choose("ranks", 2)
    assert page.text("h2") == "central on 2 ranks"


INSIDE = "return !document.querySelector('[name=insideLatency]').checkVisibility()"


def test_links_inside_nodes_have_fields_and_cannot_be_slower_than_between(page: Page) -> None:
    page.open("two-level", 6, (3, 3), machine=USUAL, size=1024, beside="ring")
    assert page.texts("h2") == ["two-level on 6 ranks of 2 nodes", "ring on 6 ranks of 2 nodes"]
    assert not page.run(INSIDE)
    assert page.texts(".node") == ["node 0", "node 1"] * 2
    assert "2 nodes of 3 ranks" in page.text("#model")
    before = page.facts()["Time"]
    page.choose("insideLatency", 0)
    assert page.facts()["Time"] != before
    assert "insideLatency=0&" in page.driver.current_url
    before = page.facts()
    page.choose("insideLatency", 10.5)
    assert page.text("#problem") == (
        "Latency inside nodes (µs) must not be above 10, the latency between nodes."
    )
    page.choose("bandwidth", 200)
    assert "Bandwidth inside nodes (Gbit/s) must not be below 200" in page.text("#problem")
    invalid = page.run(
        "return [...document.querySelectorAll('[aria-invalid=true]')].map((field) => field.name)"
    )
    assert invalid == ["insideLatency", "insideBandwidth"]
    assert page.facts() == before
    # Where there are no nodes, nothing is wrong with fields that nobody sees.
    page.choose("ranks", 5)
    assert page.text("#problem") == "" and page.facts() != before
    assert page.run(INSIDE) and "insideLatency" not in page.driver.current_url
    assert "every pair of ranks has the same link here" in page.text("#model")
    page.open("two-level", 6)
    assert page.run(INSIDE)
    assert page.texts(".node") == ["node 0", "node 1"]


def test_in_modelled_time_each_panel_goes_by_its_own_clock(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open("ring", 4)
    page.choose("second", "direct")
    assert page.texts("h2") == ["ring on 4 ranks", "direct on 4 ranks"]
    tops = page.run(
        "return [...document.querySelectorAll('.grid')].map((g) => g.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    page.run("goTo(3)")
    for mode in ("time", "steps"):
        page.choose("mode", mode)
        assert page.facts()["Steps"] == "3 of 6"
    page.choose("second", "")
    assert len(page.texts("h2")) == 1
    page.open("direct", 4, beside="gather-broadcast", address="#mode=time")
    page.press(Keys.END)
    totals = [page.facts(panel)["Time"].split(" of ")[1] for panel in (0, 1)]
    assert page.where() == f"{totals[1]} of {totals[1]}"
    page.press(Keys.HOME)
    # A quarter of the buffer is sent in a quarter of the time: direct is over first.
    page.run("goTo(timeline.stops[2])")
    assert [page.facts(panel)["Steps"] for panel in (0, 1)] == ["2 of 2", "0 of 2"]
    assert page.where().startswith(f"{totals[0]} of ")


def test_the_address_brings_a_view_back(page: Page) -> None:
    page.open("ring", 4)
    for name, value in {
        "first": "double-tree", "firstSegments": 4, "second": "central", "ranks": 5, "latency": 2.5,
        "size": 64, "speed": 0.4,
    }.items():  # fmt: skip
        page.choose(name, value)
    page.run("goTo(3)")
    address = page.driver.current_url
    shown = (page.grid(), page.grid(1), page.facts(), page.where(), page.texts("h2"))
    page.visit(address)
    assert (page.grid(), page.grid(1), page.facts(), page.where(), page.texts("h2")) == shown
    assert shown[4] == ["double-tree on 5 ranks, 4 segments", "central on 5 ranks"]


def test_an_address_that_makes_no_sense_changes_nothing(page: Page) -> None:
    page.open("ring", 4)
    shown = (page.grid(), page.facts(), page.where(), page.texts("h2"))
    page.visit(
        page.driver.current_url.partition("#")[0]
        + "#first=nothing&ranks=1000&latency=-3&size=&at=-7&mode=%00&speed=0&item=1&firstSegments=0"
    )
    assert (page.grid(), page.facts(), page.where(), page.texts("h2")) == shown
    page.visit(page.driver.current_url.partition("#")[0] + "#at=1000")
    assert page.where() == "step 6 of 6"
    # One that is typed in is followed; links that contradict each other change no link.
    page.run("location.hash = '#first=direct&ranks=3&at=1'")
    page.wait(lambda: page.text("h2") == "direct on 3 ranks")
    assert page.where() == "step 1 of 2"
    page.open("two-level", 6, (3, 3), machine=USUAL)
    shown = page.facts()
    page.visit(page.driver.current_url.partition("#")[0] + "#latency=0.5")
    assert page.facts() == shown and page.text("#problem") == ""


def test_segments_that_cannot_be_seen_are_not_offered(page: Page) -> None:
    page.open("ring", 64)
    offered = page.run(
        """return [...document.querySelector("[name=firstSegments]").options]
          .filter((option) => !option.disabled).map((option) => Number(option.value))"""
    )
    assert offered == [1, 2, 3, 4]  # 64 ranks · 64 chunks · 4 are the most cells


def test_without_javascript_the_page_says_what_is_missing(page: Page) -> None:
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.open("ring", 2)
        assert "needs JavaScript" in page.driver.find_element("css selector", ".missing").text
    finally:
        page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
