"""What the test run says about its markers, and which tests it does not let be skipped.

The hooks stand here, apart from ``conftest.py``, so that a made-up test run can load them
and nothing else (``test_markers.py``).
"""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

import pytest

CLUSTER, POOLS = "cluster", "pools"
"""Groups of tests. One worker runs all tests of a group, one after the other."""
FOLLOWED = "test_readme"
"""The module in which each test builds on those before it."""
BROWSER = "browser"
SHARING = {"test_site": BROWSER}
"""Modules whose tests look at what another group's look at (the site), and that group."""

REPORTED = ("mpi", "slurm", "gpu", "browser")
STARTED = {"pool": "mpi", "slurm_cluster": "slurm", "driver": "browser"}
"""What a fixture starts, and so the marker of the tests that use it."""


def why_required(marker: str) -> str | None:
    """Why tests with ``marker`` must run on this machine; None where they may be skipped."""
    if marker == "mpi":
        return "tests marked mpi always run"
    if marker in ("slurm", "browser") and os.geteuid() == 0 and shutil.which("apt-get"):
        return f"root can install what tests marked {marker} need"
    return None


def _markers_of(report: pytest.TestReport) -> list[str]:
    # Not report.keywords: those hold names and parameters as well.
    return getattr(report, "markers", []) or ["none"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked long as well")


def pytest_configure() -> None:
    """End as by Ctrl-C when terminated: fixtures take down the clusters that they brought up.

    A shell that waits for pytest does not hand the signal on: terminate the process group.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell lets what it starts in the background ignore Ctrl-C, and programs inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(*_: object) -> NoReturn:
    # The next one must not break off what the first one began; xdist's worker sends SIGINT, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


# Before xdist writes the groups into the names of the tests.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order tests: those that take longest first, so that all workers end together."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        for name in STARTED.keys() & set(fixtures):
            # Ranks on GPUs may be left out where there is none.
            if name != "pool" or not item.get_closest_marker("gpu"):
                item.add_marker(STARTED[name])
        if "either_launcher" in fixtures and not _is_first_choice(item):
            item.add_marker(pytest.mark.long)
    _leave_out_long(config, items)
    groups = [_find_group(item) for item in items]
    for item, group in zip(items, groups, strict=True):
        item.add_marker(pytest.mark.xdist_group(group))
    launching = {
        group for item, group in zip(items, groups, strict=True) if item.get_closest_marker("mpi")
    }
    first = [CLUSTER, FOLLOWED, POOLS, "test_failure"]
    order = {group: place for place, group in enumerate(first)}
    order |= dict.fromkeys(launching - set(first), len(first))
    priorities = [order.get(group, len(first) + 1) for group in groups]
    in_pools = ["cluster_pool" in getattr(item, "fixturenames", ()) for item in items]
    places = sorted(
        range(len(items)), key=lambda at: (priorities[at], groups[at], not in_pools[at], at)
    )
    items[:] = [items[place] for place in places]


def _is_first_choice(item: pytest.Item) -> bool:
    """Whether the test runs under this launcher by default, as its marker says."""
    marker = item.get_closest_marker("by_default")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid}: either_launcher needs the marker by_default(NAME)")
    return item.callspec.params["either_launcher"].name in marker.args


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop where groups have not come into the names of tests, as under pytest 9.2 (xdist 3.8)."""
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this release of pytest hides the groups of tests from xdist")


def _leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long`` unless it is asked for, by option or by a test's name."""
    if config.getoption("all", default=False) or "long" in config.getoption("markexpr"):
        return
    if any("::" in each for each in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def _find_group(item: pytest.Item) -> str:
    """The tests that one worker runs one after the other: they share what takes long to start."""
    if item.path.stem == FOLLOWED:
        return FOLLOWED
    if item.get_closest_marker("slurm"):
        return CLUSTER
    if item.get_closest_marker("browser"):
        return BROWSER
    if "pool" in getattr(item, "fixturenames", ()):
        return POOLS
    return SHARING.get(item.path.stem, item.path.stem)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield
    report.markers = [name for name in REPORTED if item.get_closest_marker(name)]
    is_free = hasattr(report, "wasxfail") or item.get_closest_marker("wheel")
    if report.skipped and not is_free:
        for marker in _markers_of(report):
            if why := why_required(marker):
                report.outcome = "failed"
                report.longrepr = f"skipped, but {why}: {_reason_of(report)}"
                break
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: pytest.CollectReport = yield
    # A file that is skipped as a whole takes its markers with it, and nobody could count them.
    if report.outcome == "skipped":
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"{collector.nodeid}: skip tests one by one, not the file ({reason})"
    return report


def _reason_of(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran: Counter[str] = Counter()
    skipped: dict[str, Counter[str]] = {name: Counter() for name in (*REPORTED, "none")}
    notes: list[str] = []
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            notes += [str(value) for key, value in report.user_properties if key == "note"]
            for marker in _markers_of(report):
                if outcome == "skipped":
                    skipped[marker][_reason_of(report)] += 1
                elif outcome != "deselected" and report.nodeid:
                    ran[marker] += outcome != "" and _counts_once(outcome, report)
    terminalreporter.section("markers")
    for marker in (*REPORTED, "none"):
        terminalreporter.write_line(
            f"{marker}: {ran[marker]} ran, {skipped[marker].total()} skipped"
        )
        for reason, count in skipped[marker].items():
            terminalreporter.write_line(f"    {count} skipped: {reason}")
    for note in dict.fromkeys(notes):
        terminalreporter.write_line(note)


def _counts_once(outcome: str, report: pytest.TestReport) -> bool:
    """One test may have several reports, as one that passes and whose teardown fails."""
    return report.when == "call" or (outcome in ("failed", "error") and report.when == "setup")
