"""Which skips fail a run, and what it says about its markers; tried on made-up runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import markers

MARKERS = (
    "[pytest]\nmarkers =\n    mpi\n    slurm\n    gpu\n    browser\n    long\n    xdist_group\n"
)


@pytest.fixture
def made_up(pytester, monkeypatch):
    """Runs a made-up test file, on a machine that can have all but a GPU."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    answers = dict.fromkeys(("mpi", "slurm", "browser"), "it can")
    monkeypatch.setattr(markers, "why_required", answers.get)

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makeconftest("from markers import *")
        pytester.makeini(MARKERS)
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    return run


OUTCOMES = """
import pytest

@pytest.mark.mpi
class TestMpi:
    def test_body(self): pytest.skip("in its body")
    @pytest.mark.skip(reason="by a mark")
    def test_mark(self): pass
    @pytest.fixture
    def mpirun(self): pytest.skip("in a fixture")
    def test_fixture(self, mpirun): pass
    @pytest.mark.xfail(reason="known")
    def test_expected_failure(self): raise ValueError

@pytest.mark.slurm
def test_slurm(): pytest.skip("no slurm")
@pytest.mark.browser
def test_browser(): pytest.skip("no browser")

@pytest.mark.gpu
class TestGpu:
    def test_skipped(self): pytest.skip("no gpu")
    @pytest.fixture
    def bad(self):
        yield
        raise ValueError
    def test_teardown(self, bad): pass
    @pytest.fixture
    def worse(self): raise ValueError
    def test_setup(self, worse): pass
    def test_call(self): raise ValueError

@pytest.mark.parametrize("x", ["slurm"])
def test_parameter(x, record_property): record_property("note", "two blocks left out")
"""


def test_skips_fail_where_they_may_not_be_and_each_test_is_counted_once(made_up):
    result = made_up(OUTCOMES)
    result.assert_outcomes(passed=2, failed=4, errors=4, skipped=1, xfailed=1)
    for reason in ("in its body", "by a mark", "in a fixture", "no slurm", "no browser"):
        result.stdout.fnmatch_lines([f"*skipped, but it can: {reason}*"])
    result.stdout.fnmatch_lines([
        "mpi: 4 ran, 0 skipped", "slurm: 1 ran, 0 skipped", "gpu: 3 ran, 1 skipped",
        "    1 skipped: no gpu", "browser: 1 ran, 0 skipped", "none: 1 ran, 0 skipped",
        "two blocks left out", "*2 passed*",
    ])  # fmt: skip
    assert "2 passed" in [line for line in result.outlines if line][-1]


def test_a_file_that_is_skipped_as_a_whole_fails(made_up):
    result = made_up("import pytest\npytest.skip('all', allow_module_level=True)\n")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*skip tests one by one, not the file*all*"])


TERMINATED = """
import os, pathlib, pytest, signal, time

@pytest.fixture(scope="session")
def cluster():
    yield
    os.kill(os.getpid(), signal.SIGTERM)
    pathlib.Path("down").touch()

def test_is_terminated(cluster):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
"""


def test_a_terminated_run_takes_down_what_it_has_brought_up(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(markers.__file__).parent))
    pytester.makeconftest("from markers import *")
    pytester.makepyfile(TERMINATED)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert (pytester.path / "down").exists()


LONG = """
import pytest

@pytest.mark.long
@pytest.mark.slurm
def test_often():
    pass

@pytest.mark.slurm
def test_once():
    pass
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ((), ["test_once"]),
        (("-m", "long"), ["test_often"]),
        (("--all",), ["test_often", "test_once"]),
        (("-m", "slurm and not long"), ["test_once"]),
        (("test_what_is_long_has_to_be_asked_for.py::test_often",), ["test_often"]),
    ],
)
def test_what_is_long_has_to_be_asked_for(options, passed, made_up):
    result = made_up(LONG, "-v", *options)
    left_out = 0 if "::" in "".join(options) else 2 - len(passed)
    result.assert_outcomes(passed=len(passed), deselected=left_out)
    result.stdout.fnmatch_lines([f"*::{name} PASSED*" for name in passed])


EITHER = """
import pytest

class Row:
    def __init__(self, name):
        self.name = name

@pytest.fixture(params=[Row("openmpi"), Row("mpich"), Row("openmpi4")], ids=lambda row: row.name)
def either_launcher(request):
    return request.param

@pytest.mark.by_default("mpich")
@pytest.mark.parametrize("number", [1, 2])
def test_one(either_launcher, number): pass

@pytest.mark.by_default("openmpi")
def test_two(either_launcher): pass
"""


def test_a_test_has_the_launcher_that_it_names(made_up):
    result = made_up(EITHER, "-v")
    result.assert_outcomes(passed=3, deselected=6)
    chosen = re.findall(r"::(test_\w+)\[(?:\d-)?([a-z0-9]+)(?:-\d)?\] PASSED", result.stdout.str())
    assert set(chosen) == {("test_one", "mpich"), ("test_two", "openmpi")}
    made_up(EITHER, "--all").assert_outcomes(passed=9)
    unnamed = made_up(EITHER.replace('@pytest.mark.by_default("openmpi")', ""))
    assert "needs the marker by_default(NAME)" in unnamed.stderr.str() + unnamed.stdout.str()


GROUPS = """
import pytest

@pytest.fixture
def pool(): pass
@pytest.fixture(autouse=True)
def show(request):
    print(request.node.name, "in", request.node.get_closest_marker("xdist_group").args[0])

def test_plain(): pass
@pytest.mark.mpi
def test_launches(): pass
@pytest.mark.mpi
def test_in_a_pool(pool): pass
@pytest.mark.slurm
def test_on_a_cluster(pool): pass
"""


def test_groups_and_their_order(made_up):
    result = made_up(GROUPS, "-s")
    assert re.findall(r"test_\w+ in \w+", result.stdout.str()) == [
        "test_on_a_cluster in cluster",
        "test_in_a_pool in pools",
        "test_plain in test_groups_and_their_order",
        "test_launches in test_groups_and_their_order",
    ]


APT_CACHE = """#!/bin/sh
echo "$2:"
echo "  Installed: (none)"
case $2 in
chromium) echo "  Candidate: (none)" ;;
*) echo "  Candidate: 22.05.8" ;;
esac
"""
DEBIAN = "ID=debian\n"


@pytest.mark.parametrize(
    ("marker", "user", "release", "required"),
    [
        ("slurm", 0, DEBIAN, True),
        ("slurm", 0, 'ID=linuxmint\nID_LIKE="ubuntu debian"\n', True),
        ("slurm", 0, "ID=ubuntu\nID_LIKE=debian\n", True),
        ("slurm", 0, "ID=fedora\n", False),
        ("slurm", 0, 'ID="rocky"\nID_LIKE="rhel centos fedora"\n', False),
        ("slurm", 1000, DEBIAN, False),
        ("browser", 0, DEBIAN, False),
        ("gpu", 0, DEBIAN, False),
        ("mpi", 1000, "", True),
    ],
)
def test_who_must_run_what(marker, user, release, required, tmp_path: Path, monkeypatch):
    program, path = tmp_path / "apt-cache", tmp_path / "os-release"
    program.write_text(APT_CACHE)
    program.chmod(0o755)
    path.write_text(release)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr(markers, "OS_RELEASE", path)
    assert bool(markers.why_required.__wrapped__(marker)) is required
