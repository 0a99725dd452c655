"""``python -m mpiddp checkpoints``: what is in a directory of checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from launchers import run_python
from mpiddp.checkpoints.__main__ import show
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.errors import CheckpointError, ConfigurationError
from saves import METADATA, SHARD, flip, write


def read(path: Path, capsys: pytest.CaptureFixture[str], *, is_quick: bool = False) -> list[str]:
    """The rows, with single spaces."""
    show(path, is_quick=is_quick)
    owner, head, *rows = capsys.readouterr().out.splitlines()
    assert re.search(r"/checkpoints: run 'a' \(.*since ", owner)
    assert head.split() == ["checkpoint", "written", "size", "ranks", "score", "attempt", "state"]
    return [" ".join(row.split()) for row in rows]


WRITTEN = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+ KiB 1"


def test_each_checkpoint_has_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, 30, score=0.75, attempt="attempt-2")
    rows = read(folder, capsys)
    assert re.fullmatch(rf"step-30 {WRITTEN} 0.75 attempt-2 valid", rows[0])
    assert re.fullmatch(rf"step-2 {WRITTEN} attempt-1 valid", rows[1])
    assert re.fullmatch(rf"step-1 {WRITTEN} attempt-1 valid", rows[2])
    assert read(folder.parent, capsys) == rows
    assert read(folder / "step-2", capsys) == [rows[1]]


def test_what_is_damaged_or_unfinished_says_so(folder, capsys):
    write(folder, 3, 4, 5)
    flip(folder / "step-5" / SHARD, 0.5)
    (folder / "step-4" / "more").touch()
    (folder / "step-4" / METADATA).unlink()
    (folder / "step-3" / manifests.MANIFEST).unlink()
    manifests.set_aside(folder / "step-1", ["first", "second"])
    (folder / "step-6.attempt-1.partial").mkdir()
    before = sorted(folder.rglob("*"))
    states = [row.partition(" KiB ")[2] or row.partition(" B ")[2] for row in read(folder, capsys)]
    assert states == [
        f"1 attempt-1 damaged: {SHARD}: has changed",
        "1 attempt-1 damaged: more does not belong to it, and 1 more",
        "damaged: manifest.json is missing",
        "1 attempt-1 valid",
        "set aside: first, and 1 more",
        "partial: being written or removed, or left over",
    ]
    assert "valid by its files' sizes" in read(folder, capsys, is_quick=True)[0]
    assert sorted(folder.rglob("*")) == before


def test_what_a_job_does_meanwhile_is_no_damage(folder, monkeypatch, capsys):
    list_checkpoints = manifests.list_checkpoints

    def list_and_change(path: Path) -> list[Path]:
        found = list_checkpoints(path)
        shutil.copytree(path / "step-2", path / "step-3")
        shutil.rmtree(path / "step-1")
        return found

    monkeypatch.setattr(manifests, "list_checkpoints", list_and_change)
    valid, gone = read(folder, capsys)
    assert valid.endswith(" valid") and gone == "step-1 ? ? was removed meanwhile"


def test_other_owners_and_formats(folder, monkeypatch, capsys):
    (folder / "owner.json").unlink()
    show(folder, is_quick=False)
    assert capsys.readouterr().out.startswith(f"{folder}: an unknown owner\n")
    other = folder.parent / "other"
    write(other, 7, run="b")
    shutil.copytree(other / "step-7", folder / "step-7")
    shutil.copy(other / "owner.json", folder)
    show(folder, is_quick=False)
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: run 'b' (on ") and out.count("(of another owner)") == 2
    monkeypatch.setattr(manifests, "FORMAT", 99)
    with pytest.raises(CheckpointError, match="found none"):
        show(folder, is_quick=False)
    assert capsys.readouterr().out.count("has format 2 with xxh3-128, and this mpiddp reads") == 3


def test_where_there_is_none(tmp_path: Path, folder: Path) -> None:
    for path, what in ((tmp_path / "absent", "does not exist"), (folder / "lock", "is no dir")):
        with pytest.raises(ConfigurationError, match=what):
            show(path, is_quick=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"expected a checkpoint in .*empty, found none"):
        show(tmp_path / "empty", is_quick=False)
    # A run whose checkpoints are elsewhere.
    (tmp_path / "empty" / "config.toml").write_text(f'checkpoint_dir = "{folder}"\n')
    show(tmp_path / "empty", is_quick=False)


def test_the_command_needs_no_torch_and_leaves_with_5(folder: Path) -> None:
    program = (
        "import sys; from mpiddp.__main__ import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    for path in folder.glob("step-*"):
        (path / METADATA).unlink()
    found = run_python("-c", program, "checkpoints", folder, timeout=160).expect(5)
    assert found.stdout.splitlines()[-1] == "False"
    assert found.stderr == f"mpiddp: expected a valid checkpoint in {folder}, found none\n"
