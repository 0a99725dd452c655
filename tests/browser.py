"""Drives a real headless Chromium; the tests that use it are marked ``browser``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
DEADLINE = 20


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
