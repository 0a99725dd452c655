"""Signals that come while mpiddp's programs are imported."""

from __future__ import annotations

import os
import signal

import pytest

import launchers

SITE = """
import os, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), int(os.environ["NUMBER"]))

sys.meta_path.insert(0, Finder)
"""
INT, TERM = signal.SIGINT, signal.SIGTERM
RANK = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("module", "at", "number", "variables", "line"),
    [
        ("mpiddp", "mpiddp.launch.script.command_line", INT, {}, True),
        ("mpiddp", "mpiddp.front.front", TERM, {}, True),
        ("mpiddp", "mpiddp.launch.failure.failure", INT, RANK, False),
        ("mpiddp.train", "mpiddp.launch.failure.failure", INT, RANK, False),
        ("mpiddp.remote.rank", "mpiddp.launch.failure.failure", TERM, RANK, False),
    ],
)
def test_a_signal_during_an_import_is_one_line(module, at, number, variables, line, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(launchers.ROOT)])
    given = {**variables, "PYTHONPATH": path, "AT": at, "NUMBER": str(int(number))}
    words = ["-m", module, "-n", "2", "script.py"]
    done = launchers.run_python(*words, env=launchers.clean_environment(given))
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
