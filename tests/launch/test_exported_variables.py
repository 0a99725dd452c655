"""What start-up sets stays in its process and the children that serve it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launchers
from mpiddp import environment
from mpiddp.launch.launcher.exported_variables import (
    ExportedVariables,
    export_for_good,
    forget_inherited,
    read_original,
    set_meanwhile,
)

NAMES = ("FIRST", "SECOND", "THIRD", environment.EXPORTED)


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def now() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES[:3]]


def become_another_process() -> None:
    """Change the list as if the process that wrote it was this one's parent."""
    entries = json.loads(os.environ[environment.EXPORTED])
    os.environ[environment.EXPORTED] = json.dumps([os.getppid(), entries[1]])


def test_another_process_puts_back_what_was_there_before(monkeypatch):
    monkeypatch.setenv("SECOND", "the user's")
    monkeypatch.setenv("THIRD", "2")
    ExportedVariables().export({"FIRST": "1", "SECOND": "2", "THIRD": "3"})
    forget_inherited()
    assert now() == ["1", "2", "3"]
    os.environ["THIRD"] = "changed since"
    for name in environment.OF_JOB:
        monkeypatch.setenv(name, "of the rank's job")
    assert not forget_inherited()
    become_another_process()
    assert forget_inherited()
    assert now() == [None, "the user's", "changed since"]
    assert os.environ.keys().isdisjoint({environment.EXPORTED, *environment.OF_JOB})
    # A job's own variables stay, in the ranks that the front has started.
    monkeypatch.setenv(environment.JOB_DIRECTORY, "/job")
    assert not forget_inherited() and environment.JOB_DIRECTORY in os.environ


def test_an_inner_session_gives_back_what_the_outer_one_has_set(monkeypatch):
    monkeypatch.setenv("FIRST", "the user's")
    outer, inner = ExportedVariables(), ExportedVariables()
    outer.export({"FIRST": "1"})
    before = dict(os.environ)
    inner.export({"FIRST": "2", "SECOND": "2"})
    inner.export({"FIRST": "3"})
    inner.restore()
    assert dict(os.environ) == before
    inner.export({"FIRST": "2"})
    become_another_process()
    forget_inherited()
    assert now() == ["the user's", None, None]


def test_nothing_is_left_of_a_session_but_what_is_set_for_good() -> None:
    before = dict(os.environ)
    session = ExportedVariables()
    session.export({"FIRST": "1"})
    export_for_good({"SECOND": "2"})
    session.restore()
    assert now() == [None, "2", None]
    become_another_process()
    forget_inherited()
    assert dict(os.environ) == before


def children_see() -> list[str | None]:
    lines = subprocess.run("env", stdout=-1, check=True, timeout=60).stdout.decode().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    return [found.get(name) for name in NAMES[:3]]


def test_what_is_for_this_process_alone_reaches_no_child(monkeypatch):
    monkeypatch.setenv("SECOND", "the user's")
    before = dict(os.environ)
    outer, inner = ExportedVariables(), ExportedVariables()
    outer.export({"THIRD": "a child's"})
    outer.export({"FIRST": "1", "SECOND": "2", "THIRD": "3"}, own=True)
    inherited = [None, "the user's", "a child's"]
    assert (now(), children_see()) == (["1", "2", "3"], inherited)
    inner.export({"FIRST": "4", "SECOND": "5"}, own=True)
    with set_meanwhile({"FIRST": "6"}):
        assert children_see()[0] == "6"
    assert (now(), children_see()) == (["4", "5", "3"], inherited)
    assert read_original() == before
    inner.restore()
    assert (now(), children_see()) == (["1", "2", "3"], inherited)
    # What a script sets itself is its children's as well.
    os.environ["FIRST"] = "the script's"
    assert children_see()[0] == read_original()["FIRST"] == "the script's"
    outer.restore()
    assert dict(os.environ) == before and children_see() == now()


CHILD = """
import os, sys
from mpiddp.launch.launcher.exported_variables import forget_inherited
os.environ.update(word.split("=") for word in sys.argv[1:])
forget_inherited()
print([os.environ.get(name) for name in ("FIRST", "SECOND", "THIRD")])
"""


def test_a_launch_from_a_rank_keeps_what_its_launcher_says(monkeypatch):
    """Though that is a number that the rank has itself."""
    monkeypatch.setenv("PYTHONPATH", str(launchers.ROOT))
    monkeypatch.setenv("FIRST", "the user's")
    ExportedVariables().export({"FIRST": "a child's"})
    ExportedVariables().export({"FIRST": "1", "SECOND": "2", "THIRD": "3"}, own=True)

    def start(*words: str, env: dict[str, str] | None = None) -> str:
        command = [sys.executable, "-c", CHILD, *words]
        return subprocess.run(command, env=env, stdout=-1, check=True, timeout=60).stdout.decode()

    assert start("SECOND=2") == "[\"the user's\", '2', None]\n"
    # A script may hand on all that it sees.
    assert start(env=dict(os.environ)) == '["the user\'s", None, None]\n'


@pytest.mark.parametrize("text", ["{", '[1, {"FIRST": 3}]', '[1, {"FIRST": [1, null]}]'])
def test_a_damaged_list_does_no_harm(text, monkeypatch):
    monkeypatch.setenv(environment.EXPORTED, text)
    monkeypatch.setenv("FIRST", "1")
    forget_inherited()
    assert now() == ["1", None, None] and environment.EXPORTED not in os.environ


NOTEBOOK = """
import os, subprocess, sys
import mpiddp

def run(*words):
    print(subprocess.run([sys.executable, *words], stdout=-1, check=True).stdout.decode().strip())

session = mpiddp.init(timeout=90, port_range="20000-40000")
run("-m", "mpiddp", "--launcher", "none", "show.py")
run("rank.py")
run("show.py")
"""
SHOW = """
import os
names = ("MPIDDP_EXPORTED", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "WORLD_SIZE")
print(os.environ["MPIDDP_PORT_RANGE"], *(name for name in names if name in os.environ))
"""
RANK = """
# What each start-up begins with.
import os
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.options import Options
from mpiddp.launch.phases import StartUp
StartUp(Options(), FailureHandler())
print(os.environ["MPIDDP_PORT_RANGE"])
"""


def test_a_launch_inherits_nothing_from_the_session_that_starts_it(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "rank.py").write_text(RANK)
    variables = {environment.PORT_RANGE: "10000-50000"}
    result = launchers.run_python("-c", NOTEBOOK, env=variables, cwd=tmp_path)
    assert result.returncode == 0, result
    front, rank, child = result.stdout.splitlines()
    assert front == rank == "10000-50000"
    # Any other child keeps what serves it.
    assert child.split() == [
        "20000-40000", "MPIDDP_EXPORTED", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "WORLD_SIZE",
    ]  # fmt: skip
