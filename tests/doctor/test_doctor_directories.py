"""Directories that all nodes should share."""

import contextlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpiddp.doctor.node import directories
from mpiddp.doctor.node.directories import DirectoryFacts

CONTENT = "0123456789abcdef"


def test_a_token_leaves_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "runs"
    token, problem = directories.put_token(folder, CONTENT)
    assert problem == "" and token.path.read_text() == CONTENT
    # Another node sees it late.
    token.path.unlink()
    monkeypatch.setattr(directories.time, "sleep", lambda _: token.put())
    place = directories.look_at_runs(folder, CONTENT)
    assert place.is_there and place.problem == "" and place.free > 0
    assert [path.name for path in folder.iterdir()] == [token.path.name]
    token.remove()
    assert list(tmp_path.iterdir()) == []
    # What others have put there stays.
    token, _ = directories.put_token(folder, CONTENT)
    (folder / "run").mkdir()
    token.remove()
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_rank_0_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    token, problem = directories.put_token(tmp_path / "file" / "runs", CONTENT)
    assert token is None and "cannot be written by rank 0: Not a directory" in problem


@pytest.mark.parametrize(("is_there", "problem"), [(0, "is not there"), (1, "is not the same as")])
def test_a_directory_of_its_own(is_there, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "PATIENCE_SECONDS", 1.0)
    if is_there:
        # Another job's file of the same name would be a wonder, and is noticed.
        (tmp_path / "runs").mkdir()
        directories.token_path(tmp_path / "runs", CONTENT).touch()
    place = directories.look_at_runs(tmp_path / "runs", CONTENT)
    finding = directories.judge_runs(tmp_path / "runs", place, 2)
    assert (finding.status, finding.code) == ("fail", 2)
    assert problem in finding.found and "--runs-dir" in finding.advice


def test_a_file_server_that_has_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "PATIENCE_SECONDS", 0.2)
    is_back, put = threading.Event(), directories.Token.put
    monkeypatch.setattr(directories, "_look_at_runs", lambda *_: is_back.wait())
    monkeypatch.setattr(directories, "_list", lambda *_: is_back.wait())
    monkeypatch.setattr(directories.Token, "put", lambda token: is_back.wait() and put(token))
    assert "does not answer" in directories.look_at_runs(tmp_path, CONTENT).problem
    assert "does not answer" in directories.look_at_data(tmp_path).problem
    assert "does not answer" in directories.put_token(tmp_path / "runs", CONTENT)[1]
    is_back.set()
    for thread in threading.enumerate():
        if thread.name == "mpiddp-call":
            thread.join(60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "nodes", "status", "words"),
    [
        (5 << 30, 2, "pass", "is the same and writable from every node, at least 4 GiB free"),
        (1 << 30, 1, "pass", " is writable, at least 1 GiB free"),
        (1 << 20, 2, "warn", "has 1 MiB free, less than 1 GiB"),
    ],
)
def test_free_space(free, nodes, status, words, tmp_path):
    finding = directories.judge_runs(tmp_path, DirectoryFacts(True, free=free), nodes)
    assert finding.status == status and words in finding.found


def test_data_that_differs(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, text in zip(folders, ("12", "34", "567"), strict=True):
        folder.mkdir()
        (folder / "data.bin").write_text(text)
        (folder / "sub").mkdir()
    one, alike, other = (directories.look_at_data(folder) for folder in folders)
    finding = directories.judge_data(tmp_path, alike, one)
    assert finding.status == "pass"
    assert finding.found.endswith(
        "holds the same 2 entries at its top level on every node (names and sizes)"
    )
    finding = directories.judge_data(tmp_path, other, one)
    assert finding.status == "warn" and "than on rank 0's node" in finding.found
    assert "2 entries at its top level, of other names or sizes" in finding.found
    absent = directories.look_at_data(tmp_path / "nowhere")
    finding = directories.judge_data(tmp_path / "nowhere", absent, one)
    assert (finding.status, finding.code) == ("fail", 2)
    assert "No such file or directory" in finding.found
    assert directories.judge_data(None, None, None).status == "skip"


def test_the_order_of_a_file_system_does_not_matter(monkeypatch):
    """Local file systems list their entries each in an order of its own."""
    found = []
    for names in ("abc", "cab"):
        entries = [SimpleNamespace(name=name, is_file=lambda: False) for name in names]
        monkeypatch.setattr(os, "scandir", lambda _, it=entries: contextlib.nullcontext(iter(it)))
        found.append(directories._list(Path("/nowhere")))
        monkeypatch.undo()
    assert found[0] == found[1] and found[0].entries == 3


def test_large_directories_are_compared_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "MOST_SIZES", 3)
    monkeypatch.setattr(directories, "MOST_NAMES", 5)
    for number in range(5):
        (tmp_path / f"{number}.bin").write_text("x")
    before = directories.look_at_data(tmp_path)
    text = directories.judge_data(tmp_path, before, before).found
    assert "5 entries" in text and "all names, and the sizes of the first 3" in text
    # The fourth and fifth size are not looked at, every name is.
    (tmp_path / "4.bin").write_text("longer")
    assert directories.look_at_data(tmp_path) == before
    (tmp_path / "2.bin").write_text("longer")
    after = directories.look_at_data(tmp_path)
    assert directories.judge_data(tmp_path, after, before).status == "warn"
    (tmp_path / "5.bin").touch()
    more = directories.look_at_data(tmp_path)
    finding = directories.judge_data(tmp_path, more, more)
    assert finding.status == "pass" and "more than 5 entries" in finding.found
    assert "not compared" in finding.found
    assert directories.judge_data(tmp_path, more, before).status == "warn"
