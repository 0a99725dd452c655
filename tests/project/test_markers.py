"""Which skips fail a run, and which tests it leaves out; tried on made-up runs."""

from pathlib import Path

import pytest

import markers

MARKERS = "[pytest]\nmarkers =\n  mpi\n  slurm\n  gpu\n  browser\n  long\n  xdist_group\n"


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


EITHER = """
import pytest

class Row:
    def __init__(self, name):
        self.name = name

@pytest.fixture(params=[Row("openmpi"), Row("mpich"), Row("openmpi4")], ids=lambda row: row.name)
def either_launcher(request):
    return request.param

@pytest.mark.by_default("mpich")
def test_one(either_launcher): pass

@pytest.mark.by_default("openmpi")
def test_two(either_launcher): pass
"""


def test_a_test_has_the_launcher_that_it_names(made_up):
    result = made_up(EITHER, "-v")
    result.assert_outcomes(passed=2, deselected=4)
    result.stdout.fnmatch_lines(["*::test_one?mpich? PASSED*", "*::test_two?openmpi? PASSED*"])
    made_up(EITHER, "--all").assert_outcomes(passed=6)
    unnamed = made_up(EITHER.replace('@pytest.mark.by_default("openmpi")', ""))
    assert "needs the marker by_default(NAME)" in unnamed.stderr.str() + unnamed.stdout.str()
