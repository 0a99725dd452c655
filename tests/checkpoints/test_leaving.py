"""Scripts that leave while their last checkpoint is being written."""

from __future__ import annotations

from pathlib import Path

import pytest

import launchers
from mpiddp.checkpoints.storage.manifest import list_checkpoints

PROGRAM = launchers.ROOT / "tests/programs/leaving.py"
CODES = {"end": 0, "forgotten": 0, "exit": 0, "failing": 1}
"""Exit codes by the way in which a script leaves."""


def check(folder: Path) -> None:
    assert [path.name for path in list_checkpoints(folder)] == ["step-7"]
    assert not list(folder.glob("*.partial"))


def test_the_last_checkpoint_of_one_process_is_finished(tmp_path: Path) -> None:
    ways = ",".join([*CODES, "late"])
    done = launchers.run_python(PROGRAM, tmp_path, ways, timeout=160).expect(0)
    assert done.stdout.startswith("".join(f"leaves\n{way}: {CODES[way]}\n" for way in CODES))
    for way in CODES:
        check(tmp_path / way)
    # What is waited for for long is said, and a failure, too.
    told = "mpiddp: the program ends: waiting up to 300 s for the checkpoint of step 7"
    assert told in done.stderr
    assert "mpiddp: the checkpoint of step 7 failed: a checkpoint in " in done.stderr
    assert list_checkpoints(tmp_path / "late") == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("group", 0),
        pytest.param("preempted", 75, marks=pytest.mark.long),
        pytest.param("full", 1, marks=pytest.mark.long),
    ],
)
def test_the_last_checkpoint_of_two_ranks_is_finished(way: str, code: int, tmp_path: Path) -> None:
    words = ["-m", "mpiddp", str(PROGRAM), str(tmp_path / "c"), way]
    result = launchers.run("openmpi", 2, words, timeout=160, cwd=tmp_path).expect(code)
    assert result.stdout.count("leaves") == 2
    if way == "full":
        assert "No space left on device" in result.output
        assert list_checkpoints(tmp_path / "c") == []
    else:
        check(tmp_path / "c")
