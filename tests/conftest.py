"""The fixtures that all tests share, and what a test run prints at its head and its foot."""

import compileall
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import browser
import launchers
import slurm
from own_algorithm import STAR
from pool import Pools

pytest_plugins = ["markers"]

# A busy machine may take any time for an example.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# With it, print writes each of its arguments by itself, and the launcher forwards lines that are
# mixed of several ranks'. Many containers set it; what a test wants at once, it flushes.
os.environ.pop("PYTHONUNBUFFERED", None)

# In many containers Python writes no bytecode. Each rank would compile what it imports again, and
# each worker would rewrite the assertions of all tests, which takes longer than to import them.
if sys.dont_write_bytecode:
    compileall.compile_dir(launchers.ROOT / "mpiddp", quiet=2)
    sys.dont_write_bytecode = False


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def pytest_report_header() -> list[str]:
    rows = [row for row in launchers.table().values() if row.mpirun is not None]
    packages = [f"{name} {_version_of(name)}" for name in ("torch", "torchvision", "mpi4py")]
    checks = os.environ.get("MPIDDP_CHECKS")
    return [
        *(f"MPI {row.name}: {row.mpirun}{' is missing' if row.missing() else ''}" for row in rows),
        ", ".join(packages),
        *([f"before the tests: {checks}"] if checks else []),
    ]


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reports of the tests' jobs, those of Slurm too, are not put into the developer's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    from mpiddp.schedules import registry  # Most tests need no algorithms.

    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))


@pytest.fixture
def star(tmp_path: Path, own_registry: None) -> Path:
    """The file of an algorithm of a user's own, which nobody has loaded yet."""
    path = tmp_path / "star.py"
    path.write_text(STAR)
    return path


def _check(row: launchers.Launcher) -> launchers.Launcher:
    if absent := row.missing():
        pytest.fail(f"{row.name}: {absent[0]} is missing; `bash tests/run.sh` installs it")
    return row


def _list_launchers(*long: str) -> list[Any]:
    """Parameters of a fixture; those of the names ``long`` are marked so."""
    return [
        pytest.param(row, marks=launchers.marks_of(row.name, *long), id=row.name)
        for row in launchers.available()
    ]


@pytest.fixture(params=_list_launchers())
def launcher(request: pytest.FixtureRequest) -> launchers.Launcher:
    """Each launcher that starts several ranks; a test that uses it is marked ``mpi``."""
    return _check(request.param)


@pytest.fixture(params=_list_launchers(*launchers.OPTIONAL))
def recent_launcher(request: pytest.FixtureRequest) -> launchers.Launcher:
    """As ``launcher``; Open MPI 4, of 2019 to 2024, only with ``--all``."""
    return _check(request.param)


@pytest.fixture(params=_list_launchers())
def either_launcher(request: pytest.FixtureRequest) -> launchers.Launcher:
    """The launcher that the test's marker ``by_default`` names; the others, too, with ``--all``."""
    return _check(request.param)


@pytest.fixture
def writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a directory that can be written; the checkout may be read-only."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[slurm.Cluster]:
    """A cluster of four nodes with four CPUs and two fake GPUs each.

    Its tests are marked ``slurm``. One that changes it (cuts a link, kills a node) mends it again.
    """
    obstacle = slurm.find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    options = [f"--nodes={slurm.NODES}", f"--cpus={slurm.CPUS}", f"--gpus={slurm.GPUS}"]
    with slurm.bring_up(*options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """Ranks that stay: ``pool("openmpi", 3).call(function, …)``. Its tests are marked ``mpi``."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def cluster_pool(slurm_cluster: slurm.Cluster) -> Iterator[Pools]:
    """As ``pool``, for launchers of the cluster. One at a time: a pool holds its nodes."""
    pools = Pools(limit=1)
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _free_nodes(request: pytest.FixtureRequest) -> None:
    """Give a test of the cluster all nodes, unless it uses a pool on them."""
    if "slurm_cluster" in request.fixturenames and "cluster_pool" not in request.fixturenames:
        request.getfixturevalue("cluster_pool").close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for the test run. Its tests are marked ``browser``."""
    if obstacle := browser.find_obstacle():
        pytest.skip(obstacle)
    with browser.start(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Iterator[browser.Page]:
    """A page to be opened; nothing may be complained of, or fetched."""
    browser.resize(driver, 1280)
    browser.emulate(driver, {})
    browser.complaints(driver)
    yield browser.Page(driver, tmp_path)
    assert browser.complaints(driver) == []
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
