"""What is installed: the package alone, with its data, its licences and its requirements."""

import configparser
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from pip._vendor.packaging.specifiers import SpecifierSet

import copies
import launchers
import mpiddp

CHECKOUT = "mpiddp/checkout"
"""Where an installation has the benchmarks and job scripts."""
PAGES = {"benchmarks/show/drawing": "page.js", "benchmarks/show/page": "report.html"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy because building writes into the source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("mpiddp", "benchmarks", "tests", "jobs"):
        ignored = shutil.ignore_patterns("__pycache__")
        copies.copy(launchers.ROOT / name, source / name, ignore=ignored, symlinks=True)
    for path in launchers.ROOT.iterdir():
        if path.is_file():
            copies.copy(path, source)
    program = "import setuptools.build_meta as b; print(b.build_wheel('wheels'))"
    launchers.execute(sys.executable, "-c", program, cwd=source).expect(0)
    [path] = (source / "wheels").iterdir()
    return path


@pytest.fixture(scope="session")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


INFORMATION = f"mpiddp-{mpiddp.__version__}.dist-info"


def test_every_module_is_inside_and_nothing_but_mpiddp(members):
    assert {name.split("/")[0] for name in members} == {"mpiddp", INFORMATION}
    own, benchmarks = (
        {str(path.relative_to(launchers.ROOT)) for path in launchers.ROOT.glob(f"{top}/**/*.py")}
        for top in ("mpiddp", "benchmarks")
    )
    assert own | {f"{CHECKOUT}/{name}" for name in benchmarks} == {
        name for name in members if name.endswith(".py")
    }


def test_data_types_and_licences_are_inside(members, wheel):
    data = {name for name in members if name.startswith("mpiddp/") and not name.endswith(".py")}
    jobs = {path.name for path in launchers.ROOT.glob("jobs/*.s*h")}
    pages = {
        f"{folder}/{path.name}"
        for folder in PAGES
        for path in (launchers.ROOT / folder).iterdir()
        if path.is_file() and path.suffix != ".py"
    }
    assert {"slurm.sh", "train.sbatch"} < jobs
    assert {f"{folder}/{name}" for folder, name in PAGES.items()} < pages
    assert data == {
        *(f"{CHECKOUT}/jobs/{name}" for name in jobs), *(f"{CHECKOUT}/{name}" for name in pages),
        f"{CHECKOUT}/benchmarks/measure/baselines/srun_torchrun.sh", "mpiddp/launch/fabrics.toml",
        "mpiddp/py.typed", "mpiddp/training/data/digits.csv.gz",
        "mpiddp/training/data/digits.LICENSE.txt", "mpiddp/training/data/text.txt",
    }  # fmt: skip
    assert f"{INFORMATION}/licenses/LICENSE" in members
    assert f"{INFORMATION}/licenses/mpiddp/training/data/digits.LICENSE.txt" in members
    with zipfile.ZipFile(wheel) as archive:
        original = launchers.ROOT / "mpiddp" / "training" / "data" / "digits.csv.gz"
        assert archive.read("mpiddp/training/data/digits.csv.gz") == original.read_bytes()


def test_pyproject_holds_the_build_system_alone():
    text = (launchers.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text).keys() == {"build-system"}


def test_the_changelog_begins_with_this_version():
    text = (launchers.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [newest, *_] = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert newest == mpiddp.__version__


@pytest.fixture(scope="module")
def installation(wheel, tmp_path_factory):
    """Runs a command in an empty directory, in an environment that the wheel is installed in.

    It borrows the packages of this one; that one's own installation of mpiddp is not among them.
    """
    prefix, here = tmp_path_factory.mktemp("prefix"), tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    python = prefix / "bin" / "python"
    [site] = prefix.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *options], check=True)
    path = os.pathsep.join([f"{prefix}/bin", f"{sys.prefix}/bin", os.environ["PATH"]])
    unset = dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"), "")
    clean = {"PATH": path, **launchers.WAITING, **unset}
    return functools.partial(launchers.execute, cwd=here, env=clean, timeout=300)


def test_an_installation_brings_benchmarks_and_job_scripts(installation):
    shown = installation("mpiddp", "bench", "--help")
    assert shown.stdout.startswith("usage: mpiddp bench COMMAND"), shown.stderr
    priced = installation("mpiddp", "bench", "simulate", "ring", "--ranks", "3")
    assert "3 ranks" in priced.stdout, priced.stderr
    installation("mpiddp", "bench", "explain", "ring", "--output", "ring.html").expect(0)
    assert "is not empty" in installation("mpiddp", "jobs", ".").expect(2).stderr
    # And no other package is on the path.
    program = "import importlib.util as u; print(u.find_spec('benchmarks'), u.find_spec('jobs'))"
    assert installation("python", "-c", program).stdout == "None None\n"


@pytest.mark.mpi
def test_job_scripts_are_written_where_there_is_no_checkout(installation):
    installation("mpiddp", "jobs", "my jobs").expect(0)
    trained = installation("bash", "my jobs/local.sh", "1", "--data", "toy", "--epochs", "1")
    assert "Training done" in trained.expect(0).stdout
    installation("mpiddp", "jobs", "my jobs").expect(0)
    installation("mpiddp", "doctor").expect(0)


def _name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~ ;\[]", requirement)[0]).lower()


def test_everything_that_is_installed_has_a_tested_version():
    parser = configparser.ConfigParser()
    parser.read(launchers.ROOT / "setup.cfg", encoding="utf-8")
    texts = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    wanted = {_name_of(line) for text in texts for line in text.split("\n") if line.strip()}
    lines = (launchers.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    # Weights & Biases needs an account: its tests use a made-up module.
    assert (wanted | {"mpich"}) - {"wandb", "mpiddp"} <= {_name_of(pin) for pin in pins}
    # Debian 12 has Python 3.11.2; without a release that fits it pip looks for one for ever.
    oldest = parser["options"]["python_requires"].removeprefix(">=")
    for each in importlib.metadata.distributions():
        pin, needs = f"{each.name}=={each.version}", each.metadata.get("Requires-Python", "")
        assert pin not in pins or SpecifierSet(needs).contains(f"{oldest}.0"), pin


SITE_TORCH = "2.10.0a0+git449b176"
"""As one centre's module has it (ALCF's guide to Aurora, August 2026)."""


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """What pip could install: torch in several releases, and the other requirements."""
    folder = tmp_path_factory.mktemp("index")
    parser = configparser.ConfigParser()
    parser.read(launchers.ROOT / "setup.cfg", encoding="utf-8")
    for line in parser["options"]["install_requires"].split():
        copies.make_wheel(folder, _name_of(line), "99.0")
    (folder / "torch-99.0-py3-none-any.whl").unlink()
    for version in ("2.9.1", "2.10.0", "2.11.0", "2.12.0a0", "2.12.0.dev20261101"):
        copies.make_wheel(folder, "torch", version)
    return folder


@pytest.mark.parametrize(
    ("place", "found"),
    [
        # An alpha is kept if a site has it, and chosen by nobody.
        ("nowhere", "2.11.0"),
        ("in the environment", SITE_TORCH),
        ("in a module", SITE_TORCH),
        ("below the environment", SITE_TORCH),
    ],
)
def test_a_sites_own_torch_stays(wheel, index, tmp_path, place, found):
    """A module is a directory in PYTHONPATH; a system's packages are those of PYTHONUSERBASE."""
    prefix, base = tmp_path / "prefix", tmp_path / "base"
    flags = ["--system-site-packages"] if place == "below the environment" else []
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *flags, prefix], check=True)
    site = base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if place == "in the environment":
        [site] = prefix.glob("lib/python*/site-packages")
    variables = {"PYTHONPATH": str(site) if place == "in a module" else ""}
    pip = [sys.executable, "-m", "pip", "--python", prefix / "bin" / "python"]
    install = [*pip, "install", "--quiet", "--no-index", "--no-compile", "--find-links", index]
    env = {"PYTHONUSERBASE": str(base), "VIRTUAL_ENV": "", **variables}
    if place != "nowhere":
        torch = copies.make_wheel(tmp_path, "torch", SITE_TORCH)
        site.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(torch) as archive:
            archive.extractall(site)
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*")}
    base.mkdir(exist_ok=True)
    base.chmod(0o555)
    launchers.execute(*install, wheel, env=env).expect(0)
    program = "from importlib.metadata import version as v; print(v('torch'), v('mpiddp'))"
    shown = launchers.execute(prefix / "bin" / "python", "-c", program, env=env)
    assert shown.expect(0).stdout == f"{found} {mpiddp.__version__}\n"
    # Root may write anywhere: nothing has changed there.
    assert {path: path.stat().st_mtime_ns for path in base.rglob("*")} == before
    base.chmod(0o755)


def test_an_editable_install_is_not_hidden_by_a_folder_of_its_name(wheel, tmp_path):
    """As in the directory that a checkout lies in."""
    source = wheel.parents[1]
    program = "import sys, setuptools.build_meta as b; b.build_editable(sys.argv[1])"
    launchers.execute(sys.executable, "-c", program, tmp_path, cwd=source).expect(0)
    [path] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "mpiddp").mkdir()
    program = "import site, sys; site.addsitedir('site'); import mpiddp; print(mpiddp.__file__)"
    shown = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert shown.stdout == f"{source}/mpiddp/__init__.py\n", shown.stderr
