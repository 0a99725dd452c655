"""One voice per node for processes that cannot ask each other."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys

import pytest

import launchers
from mpiddp.launch.failure import reporting_rank
from mpiddp.launch.failure.reporting_rank import claim_node

CLAIM = """
from mpiddp.launch.failure.reporting_rank import claim_node
held = claim_node()
print(held is not None)
"""


def claim(more: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"{CLAIM}\n{more}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=launchers.clean_environment(),
    )


def test_the_first_of_a_parents_processes_has_the_claim_until_it_ends():
    with claim("import sys\nsys.stdout.flush()\nsys.stdin.read()") as first:
        assert first.stdout is not None and first.stdout.readline() == "True\n"
        assert claim().communicate(timeout=20)[0] == "False\n"
        first.communicate(timeout=20)
    assert claim().communicate(timeout=20)[0] == "True\n"


@pytest.fixture(params=["listens", "is bound", "is deaf"])
def stranger(request, monkeypatch):
    """Somebody holds the name that this process would take; another user, as it seems from here."""
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(reporting_rank, "LISTENING_SECONDS", 0.1)
    name = reporting_rank._name_claim()
    with socket.socket(socket.AF_UNIX) as taken, contextlib.ExitStack() as stack:
        taken.bind(name)
        if request.param != "is bound":
            taken.listen(0 if request.param == "is deaf" else 8)
        while request.param == "is deaf":
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            try:
                caller.connect(name)
            except BlockingIOError:
                break
        yield request.param


def test_a_stranger_silences_nobody(stranger):
    claims = [claim_node(), claim_node()]
    for held in claims:
        assert held is not None
        assert re.fullmatch(
            r"mpiddp: .*user.* has taken 'mpiddp-.*'; each process reports\n", held.note
        )
        assert (f"user {os.geteuid() - 1} " in held.note) == (stranger == "listens")
        held.holder.close()


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"])
def test_two_launches_of_one_parent_have_a_claim_each(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    first = claim_node()
    assert first is not None and claim_node() is None
    monkeypatch.setenv(variable, "2")
    second = claim_node()
    assert second is not None and not second.note
    for held in (first, second):
        held.holder.close()
