"""One voice per node for processes that cannot ask each other."""

from __future__ import annotations

import subprocess
import sys

import launchers

CLAIM = """
from mpiddp.launch.node_claim import claim_node
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
