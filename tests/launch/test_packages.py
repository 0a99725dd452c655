"""A package that is missing or too old is told in one line, before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import launchers
from facts import messages
from mpiddp.launch import packages

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
"""


def hide(folder: Path, *names: str) -> dict[str, str]:
    """Variables with which Python does not find packages of these names."""
    (folder / "sitecustomize.py").write_text(BLOCK.format(names=names))
    return {"PYTHONPATH": f"{folder}:{launchers.ROOT}"}


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
    ("version", "is_old"),
    [("2.8.0+cu128", True), ("1.13.1", True), ("2.10.0a0+git449b176", False), ("3.0", False)],
)
def test_a_torch_that_is_too_old(version, is_old, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    check = "from mpiddp.launch.packages import check_packages as check; check()"
    result = launchers.run_python("-c", check, env={"PYTHONPATH": f"{tmp_path}:{launchers.ROOT}"})
    assert (result.returncode != 0) == is_old, result
    assert (f"torch {version} in {sys.prefix} is too old" in result.stderr) == is_old
