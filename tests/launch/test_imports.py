"""What happens while programs are imported: signals, packages that are missing, torch, caches."""

import os
import signal
import sys
import tempfile

import pytest

import launchers
from facts import messages
from mpiddp.environment import CACHES
from mpiddp.launch import caches, packages, summary

# Signals

SITE = """
import os, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        {act}

sys.meta_path.insert(0, Finder)
"""


def intervene(folder, act):
    """Variables with which Python does this before each import."""
    (folder / "sitecustomize.py").write_text(SITE.format(act=act))
    return {"PYTHONPATH": f"{folder}:{launchers.ROOT}"}


INT, TERM = signal.SIGINT, signal.SIGTERM
RANK = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("module", "at", "number", "variables", "line"),
    [
        ("mpiddp", "mpiddp.launch.script.command_line", INT, {}, True),
        ("mpiddp", "mpiddp.front.front", TERM, {}, True),
        ("mpiddp.train", "mpiddp.launch.failure.failure", INT, RANK, False),
        ("mpiddp.remote.rank", "mpiddp.launch.failure.failure", TERM, RANK, False),
    ],
)
def test_a_signal_during_an_import_is_one_line(module, at, number, variables, line, tmp_path):
    act = f"if name == {at!r}: os.kill(os.getpid(), {int(number)})"
    given = launchers.clean_environment({**variables, **intervene(tmp_path, act)})
    done = launchers.run_python("-m", module, "-n", "2", "script.py", env=given)
    said = f"mpiddp: stopped by {number.name}: exit code {128 + number}\n" if line else ""
    assert (done.returncode, done.output) == (128 + number, said)


@pytest.mark.parametrize("words", [["-c", "import program"], ["-m", "mpiddp_program"]])
def test_who_imports_mpiddp_is_interrupted_as_ever(words, tmp_path):
    text = "import signal, mpiddp; print(signal.getsignal(signal.SIGINT).__name__)"
    (tmp_path / "program.py").write_text(text)
    package = tmp_path / "mpiddp_program"
    package.mkdir()
    (package / "__init__.py").write_text("import program")
    (package / "__main__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(launchers.ROOT)])
    done = launchers.run_python(*words, env=launchers.clean_environment({"PYTHONPATH": path}))
    assert done.stdout == "default_int_handler\n"


# Packages that are missing or too old: one line, before anything is started


def hide(folder, *names):
    """Variables with which Python does not find packages of these names."""
    act = f"if name.split('.')[0] in {names!r}: raise ModuleNotFoundError(name)"
    return intervene(folder, act)


@pytest.mark.parametrize("name", packages.NEEDED)
def test_the_front_names_a_missing_package(name, tmp_path):
    (tmp_path / "script.py").touch()
    words = ("-m", "mpiddp", "-n", "2", tmp_path / "script.py")
    result = launchers.run_python(*words, env=hide(tmp_path, name))
    assert result.returncode == 2, result
    assert result.stderr == (
        f"mpiddp: {name} is not installed in {sys.prefix}: activate the environment that has "
        f"mpiddp, or run: {sys.executable} -m pip install {name}\n"
    )


def test_the_trainer_needs_more(tmp_path):
    env = hide(tmp_path, "tqdm", "xxhash")
    result = launchers.run_python("-m", "mpiddp", "-n", "2", "train", env=env)
    assert result.returncode == 2 and "tqdm, xxhash are not installed in " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.mpi
def test_a_rank_that_no_front_started_says_so_too(tmp_path):
    arguments = ["-m", "mpiddp.train", "--runs-dir", str(tmp_path / "runs")]
    result = launchers.run("openmpi", 2, arguments, env=hide(tmp_path, "xxhash")).expect(2)
    assert len([line for line in messages(result) if "xxhash is not inst" in line]) == 1
    assert "Traceback" not in result.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("version", "is_old"), [("2.8.0+cu128", True), ("2.10.0a0+git449b176", False), ("3.0", False)]
)
def test_a_torch_that_is_too_old(version, is_old, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    check = "from mpiddp.launch.packages import check_packages as check; check()"
    result = launchers.run_python("-c", check, env={"PYTHONPATH": f"{tmp_path}:{launchers.ROOT}"})
    assert (result.returncode != 0) == is_old, result
    assert (f"torch {version} in {sys.prefix} is too old" in result.stderr) == is_old


# torch, beside MPI's start

PROGRAM = """
import os, sys, threading
from mpiddp.launch.torch_import import TorchImport

before = dict(os.environ)
changed = set()

# An audit hook would be called for all that the import does.
def watch(name):
    change = getattr(os, name)
    def note(variable, *value):
        changed.add((threading.current_thread() is threading.main_thread(), variable.decode()))
        change(variable, *value)
    setattr(os, name, note)

watch("putenv")
watch("unsetenv")
importing = TorchImport()
importing.join()
assert "numpy" in sys.modules and "torch" in sys.modules
assert dict(os.environ) == before
print(sorted(changed))
"""


def test_only_the_main_thread_changes_a_variable(monkeypatch):
    monkeypatch.delenv("OPENBLAS_MAIN_FREE", raising=False)
    done = launchers.run_python("-c", PROGRAM)
    assert (done.returncode, done.stdout) == (0, "[(True, 'OPENBLAS_MAIN_FREE')]\n"), done.stderr


# Caches, and what is said of a slow import


def test_caches_leave_a_shared_home_unless_somebody_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert caches.choose({"HOME": str(tmp_path)}) == caches.choose({}) == {}
    # /proc is on no disk of this machine.
    chosen = caches.choose({"HOME": "/proc", "TRITON_CACHE_DIR": "/mine"})
    folder = tmp_path / f"mpiddp-{os.getuid()}" / "caches"
    assert chosen.keys() == CACHES.keys() - {"TRITON_CACHE_DIR"}
    assert chosen["CUDA_CACHE_PATH"] == f"{folder}/cuda"
    # Below this torch places Triton's cache, too.
    below = caches.choose({"HOME": "/proc", "TORCHINDUCTOR_CACHE_DIR": "/mine"})
    assert below.keys() == chosen.keys() - {"TORCHINDUCTOR_CACHE_DIR"}
    assert caches.find_folder({**chosen, "TRITON_CACHE_DIR": "/mine"}) == str(folder)
    assert caches.find_folder(dict.fromkeys(CACHES, "/mine/x")) == ""
    # What others can write to is not used.
    folder.parent.chmod(0o777)
    assert caches.choose({"HOME": "/proc"}) == {}


def test_a_slow_import_is_told():
    assert summary.describe_late_import(19.0, 3, 8) == []
    assert "import torch took 43 s on rank 3: " in summary.describe_late_import(43.2, 3, 8)[0]
