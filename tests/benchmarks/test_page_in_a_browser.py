"""The animated page in a real browser: it obeys its reader."""

from __future__ import annotations

import time

import pytest

import browser
from browser import Page
from mpiddp.schedules.cost import Machine, MessageCost
from mpiddp.schedules.registry import parse

pytestmark = pytest.mark.browser
USUAL = Machine(MessageCost(1e-6, 8e-11), MessageCost(1e-5, 8e-10), 1e-10)


def test_tokens_that_would_meet_travel_side_by_side(page: Page) -> None:
    page.open("one-shot", 6)
    places = page.run("return assignLanes(unpack(6, data.schedules[6]['one-shot']).steps[0])")
    step = parse("one-shot").build(6).steps[0]
    assert {place["lanes"] for place in places} == {len({place["lane"] for place in places})}
    for one, here in zip(step, places, strict=True):
        for other, there in zip(step, places, strict=True):
            if one is not other and here["lane"] == there["lane"]:
                for way in (0, 0.25, 0.5, 0.75, 1):
                    at = [t.src + (t.dst - t.src) * way for t in (one, other)]
                    assert (at[0] - at[1]) * (one.src - other.src) > 0


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


def test_a_page_is_never_wider_than_the_screen(page: Page) -> None:
    browser.resize(page.driver, 360)
    page.open("ring:segments=4", 16, beside="one-shot")
    for width in (360, 800, 1100):
        browser.resize(page.driver, width)
        assert page.run("return document.documentElement.scrollWidth") <= width
        page.click("#end")
        assert page.run("return document.documentElement.scrollWidth") <= width


def test_without_javascript_the_page_says_what_is_missing(page: Page) -> None:
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.open("ring", 2)
        assert "needs JavaScript" in page.driver.find_element("css selector", ".missing").text
    finally:
        page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
