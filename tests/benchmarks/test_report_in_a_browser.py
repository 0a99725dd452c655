"""The report's page in a real browser: it says its figures, obeys, and fits each screen."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from benchmarks.study import reporting as command
from browser import Page
from planted_records import Planted, make_cells, make_messages, make_pairs, write_record

pytestmark = pytest.mark.browser
K = 1 << 10


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one record that has everything with curves."""
    folder = tmp_path_factory.mktemp("report")
    planted = Planted(places=((4, 4), (8, 2)), sizes=(K, 64 * K, 1 << 24), rounds=5)
    cells = chain(make_cells(planted), make_messages(), make_pairs(5, {(1, 2): 2.0}))
    record = write_record(folder / "a.jsonl", cells)
    command.main([str(record), "--output", str(folder / "a.html")])
    return folder / "a.html"


SHOWN = """return [...document.querySelectorAll("#all-reduce .chart:first-child svg .line text")]
  .map((text) => text.textContent).sort()"""


def test_six_lines_with_their_names_and_a_switch_for_the_others(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    shown = page.run(SHOWN)
    assert len(shown) == 6 and {"Gloo", "MPI_Allreduce", "mpiddp auto"} <= set(shown)
    chips = page.run(
        "return [...document.querySelectorAll('#all-reduce .chips button')].map((b) => b.innerText)"
    )
    (hidden, *_) = (name for name in chips if name not in shown)
    number = 1 + chips.index(hidden)
    page.click(f"#all-reduce .chips button:nth-child({number})")
    changed = page.run(SHOWN)
    # The one that was there longest has made room.
    assert len(changed) == 6 and hidden in changed and "Gloo" not in changed
    colours = page.run(
        """return [...document.querySelectorAll("#all-reduce .chart:first-child .line .median")]
          .map((line) => getComputedStyle(line).stroke)"""
    )
    assert len(set(colours)) == 6


def test_keys_and_pointer_give_the_figures_of_a_place(page: Page, file: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.visit(file.as_uri())
    plot = "#all-reduce .chart:first-child .plot"
    page.press(Keys.HOME, plot)
    assert page.text(f"{plot} .tip strong") == "1 KiB"
    assert len(page.texts(f"{plot} .tip tr")) == 6
    page.press(Keys.END, plot)
    assert page.text(f"{plot} .tip strong") == "16 MiB"
    page.press(Keys.ESCAPE, plot)
    assert page.run("return document.querySelector(arguments[0]).hidden", f"{plot} .tip")
    ActionChains(page.driver, duration=0).move_to_element(
        page.driver.find_element("css selector", plot)
    ).perform()
    assert "–" in page.text(f"{plot} .tip .more")
    page.click("#all-reduce .chart:first-child summary")
    rows = "#all-reduce .chart:first-child tbody tr"
    page.wait(lambda: len(page.texts(rows)) == 3)
    assert page.texts(rows)[0].startswith("1 KiB")


def test_the_map_leads_to_its_curves_and_the_list_of_places_obeys(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    assert page.run("return document.querySelector('#all-reduce select').value").startswith("8")
    page.click("#all-reduce tbody tr:first-child button")
    assert page.run("return document.querySelector('#all-reduce select').value").startswith("4")


def test_the_animated_explanation_opens_from_within_the_page(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    first, *_ = page.driver.window_handles
    button = page.driver.find_element("css selector", "#all-reduce .links button:nth-child(2)")
    name = button.text
    button.click()
    page.wait(lambda: len(page.driver.window_handles) == 2)
    page.driver.switch_to.window(page.driver.window_handles[1])
    try:
        page.wait(lambda: page.texts("h2") == [f"{name} on 4 ranks"])
        page.click("#end")
        assert "Now every rank has the whole sum." in page.text(".words")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)
