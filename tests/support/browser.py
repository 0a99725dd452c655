"""Drives a real headless Chromium; the tests that use it are marked ``browser``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

    from mpiddp.schedules.schedule import Collective

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
DEADLINE = 20
OFFERED = range(1, 9)
"""Numbers of ranks of a page, beside the one that is asked for: larger ones take long to draw."""


def find_obstacle() -> str | None:
    """Why no browser can be started here; None if one can."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return f"{program} is missing (Debian's package {package})"
    return None if find_spec("selenium") else "selenium is missing (pip install selenium)"


@contextmanager
def start(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """A browser with a profile of its own, ended with the block."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        browser.set_page_load_timeout(DEADLINE)
        browser.set_script_timeout(DEADLINE)
        yield browser
    finally:
        browser.quit()


def resize(browser: Chrome, width: int, height: int = 900) -> None:
    """Give the page exactly so many pixels; windows have a least width, this has none."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )


def emulate(browser: Chrome, features: Mapping[str, str]) -> None:
    """Set media features, such as ``prefers-color-scheme``; those not given are as usual."""
    pairs = [{"name": name, "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": pairs})


def complaints(browser: Chrome) -> list[Any]:
    """What the console has had to say since the last call, but for what is only informative."""
    return [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]


BOXES = Path(__file__).with_name("boxes.js").read_text("utf-8")
"""Returns how many ``texts`` are seen, and ``problems``: what cannot be read of them, and why."""


@cache
def draw(
    text: str, ranks: int, nodes: Sequence[int] | None, beside: str | None,
    collective: Collective | None, **figures: Any,
) -> str:  # fmt: skip
    """The animated page; many tests open the same one."""
    from benchmarks.show.drawing import page  # Most runs need no browser, but import this file.
    from mpiddp.schedules.registry import parse
    from mpiddp.schedules.schedule import Collective

    collective = collective or Collective.ALL_REDUCE
    first, second = replace(parse(text), collective=collective), parse(beside) if beside else None
    with mock.patch.object(page, "OFFERED", OFFERED):
        return page.draw_page(first, ranks, nodes, beside=second, **figures)


PATIENCE = 60.0
"""Seconds for what an animation is to come to."""


@dataclass
class Page:
    """A page in the browser, and what a reader can do and see."""

    driver: Any
    folder: Path

    def open(
        self, text: str, ranks: int, nodes: Sequence[int] | None = None, *,
        beside: str | None = None, address: str = "",
        collective: Collective | None = None, **figures: Any,
    ) -> None:  # fmt: skip
        file = self.folder / "page.html"
        file.write_text(draw(text, ranks, nodes, beside, collective, **figures), "utf-8")
        self.visit(f"{file.as_uri()}{address}")

    def visit(self, address: str) -> None:
        """Load anew, which a browser does not do where only the part after # differs."""
        self.driver.get("about:blank")
        self.driver.get(address)
        # A busy machine's driver may come back before the page is there.
        state = "return location.href !== 'about:blank' && document.readyState === 'complete'"
        self.wait(lambda: bool(self.run(state)))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return [text.strip() for text in self.run(script, selector)]

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def choose(self, name: str, value: object) -> None:
        """As a reader does: with an input event."""
        self.run(
            """const control = document.querySelector(`[name=${arguments[0]}]`);
            control.value = arguments[1];
            control.dispatchEvent(new Event("input", { bubbles: true }));""",
            name, str(value),
        )  # fmt: skip

    def press(self, key: str, selector: str = "#nothing") -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        self.run(
            """document.activeElement.blur();
            document.querySelector(arguments[0])?.focus();""",
            selector,
        )
        ActionChains(self.driver, duration=0).send_keys(key).perform()

    def where(self) -> str:
        return self.text("#where")

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.driver.current_url
            time.sleep(0.05)

    def facts(self, panel: int = 0) -> Mapping[str, str]:
        script = """const list = document.querySelectorAll(".facts")[arguments[0]];
            const terms = [...list.querySelectorAll("dt")];
            return terms.map((term) => [term.textContent, term.nextSibling.firstChild.data])"""
        return dict(self.run(script, panel))

    def grid(self, panel: int = 0) -> list[list[str]]:
        """What the titles of the cells say."""
        script = """const grid = document.querySelectorAll(".grid")[arguments[0]];
            const rows = [...grid.querySelectorAll(".row")].slice(1);
            return rows.map((row) => [...row.querySelectorAll(".cell")].map((c) => c.title))"""
        return self.run(script, panel)
