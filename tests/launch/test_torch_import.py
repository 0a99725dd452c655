"""The import of torch beside MPI's start leaves the environment alone."""

from __future__ import annotations

import pytest

import launchers

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


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        ({}, [(True, "OPENBLAS_MAIN_FREE")]),
        pytest.param({"OPENBLAS_MAIN_FREE": "0"}, [], marks=pytest.mark.long),
    ],
    ids=["by us", "by the user"],
)
def test_only_the_main_thread_changes_a_variable(variables, changed, monkeypatch):
    monkeypatch.delenv("OPENBLAS_MAIN_FREE", raising=False)
    done = launchers.run_python("-c", PROGRAM, env=variables)
    assert (done.returncode, done.stdout) == (0, f"{changed}\n"), done.stderr
