"""Whose a directory is: who may write there, and what stays whoever writes."""

import errno
import gc
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage import owner as owners
from mpiddp.checkpoints.storage.owner import OWNER, Owner
from mpiddp.errors import ConfigurationError, StorageError
from saves import list_names, make_directory, open_directory, write

NAMES = st.none() | st.sampled_from(["a", "b"])
IDENTITIES = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2) | st.lists(st.text()))
OWNERS = st.builds(Owner.make, NAMES, IDENTITIES)


@given(OWNERS, OWNERS)
def test_owners_are_the_same_both_ways(one: Owner, other: Owner) -> None:
    assert one.is_same(one)
    assert one.is_same(other) == other.is_same(one)
    assert one.run is None or not one.is_same(replace(one, run="c"))


@given(OWNERS, st.sampled_from("xyz"), st.integers(3, 5))
def test_values_that_only_one_has_are_no_difference(one: Owner, name: str, value: int) -> None:
    changed = replace(one, run=None, identity={**one.identity, name: value})
    assert one.is_same(changed) == (name not in one.identity)
    # A run that goes on under its name may have changed some.
    assert one.is_same(replace(changed, run=one.run)) == (
        one.run is not None or name not in one.identity
    )
    assert one.is_same(replace(one, run=None))


def refuse(path: Path, **values: Any) -> str:
    """What ``look`` and ``open`` both say; nothing is changed, and the lock is not held."""
    before = {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    said = set()
    for name in ("look", "open"):
        directory = make_directory(path, **values)
        with pytest.raises(ConfigurationError) as caught:
            getattr(directory, name)()
        directory.close()
        said.add(str(caught.value))
    assert {each: each.stat().st_mtime_ns for each in path.rglob("*")} == before
    (line,) = said
    assert "\n" not in line
    return line


def test_a_stranger_is_told_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    path = tmp_path / "checkpoints"
    write(path, 3, identity={"model": "mlp", "seed": 0})
    since = json.loads((path / OWNER).read_text())["since"]
    advice = "begin from it with --resume {path}"
    line = refuse(path, run=None, identity={"model": "convnet", "seed": 0}, advice=advice)
    assert line == (
        f"checkpoints: {path} belongs to run 'a' (model 'mlp', here 'convnet'; job job-17, since "
        f"{since}): begin from it with --resume {path / 'step-3'}"
    )
    assert "belongs to run 'a' (here 'b'; job" in refuse(path, run="b")
    # The same owner, whatever else it says of itself.
    write(path, 4, run=None, identity={"model": "mlp", "width": 3})
    assert list_names(path) == ["step-3", "step-4"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 1}'])
def test_checkpoints_without_an_owner_are_a_strangers(content: str | None, folder: Path) -> None:
    (folder / OWNER).unlink()
    if content is not None:
        (folder / OWNER).write_text(content)
    assert "belongs to an unknown owner: choose" in refuse(folder)


def test_an_owner_file_of_a_later_release_is_refused(folder: Path) -> None:
    values = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps({**values, "format": 7}))
    assert "has format 7, and this mpiddp reads format 1" in refuse(folder)


def test_who_has_left_no_checkpoint_owns_nothing(tmp_path: Path) -> None:
    open_directory(tmp_path).thing.close()
    (tmp_path / "step-3.attempt-1.partial").mkdir()
    write(tmp_path, 1, run="b")
    assert list_names(tmp_path) == ["step-1"]
    assert "belongs to run 'b' (here 'a'" in refuse(tmp_path)


def test_a_directory_is_one_job_s(folder: Path) -> None:
    first = make_directory(folder)
    first.look()
    assert f"checkpoints: {folder} is in use by process {os.getpid()} on " in refuse(folder)
    first.close()
    first.close()
    second = make_directory(folder)
    second.open()
    assert "is in use by" in refuse(folder)
    del second
    gc.collect()
    make_directory(folder).look()


def test_checkpoints_that_nobody_looked_for_are_not_replaced(folder: Path) -> None:
    directory = make_directory(folder, replaces=False)
    with pytest.raises(
        ConfigurationError, match=r"of run 'a' \(.*, the newest step-2: restore\(\)"
    ):
        directory.open()
    directory.open(directory.look())
    directory.close()


def test_what_was_written_after_a_look_that_found_nothing_is_not_replaced(tmp_path: Path) -> None:
    late = make_directory(tmp_path / "new", replaces=False)
    survey = late.look()
    assert survey.newest is None
    write(tmp_path / "new", 7)
    with pytest.raises(ConfigurationError, match=r"holds checkpoints of .*the newest step-7: "):
        late.open(survey)
    assert list_names(tmp_path / "new") == ["step-7"]


def test_looking_changes_nothing(tmp_path: Path) -> None:
    with_partial = tmp_path / "checkpoints"
    with_partial.mkdir()
    (with_partial / "step-3.attempt-1.partial").mkdir()
    for path in (tmp_path / "none", with_partial):
        directory = make_directory(path)
        assert directory.look().newest is None
        directory.close()
    assert list_names(tmp_path) == ["checkpoints"]
    assert {each.name for each in with_partial.iterdir()} == {"lock", "step-3.attempt-1.partial"}


def test_without_a_lock(folder, monkeypatch, capsys):
    """On a disk that cannot be written one may look; where no file can be locked, write too."""

    def fail(number: int) -> None:
        def acquire(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(owners.DirectoryLock, "acquire", acquire)

    fail(errno.EROFS)
    newest = make_directory(folder).look().newest
    assert newest is not None and newest.path.name == "step-2"
    assert "belongs to run 'a'" in refuse(folder, run="b")
    with pytest.raises(StorageError, match=r"cannot be used: .*Read-only file system"):
        make_directory(folder).open()
    assert capsys.readouterr().err == ""
    fail(errno.ENOLCK)
    write(folder, 3)
    assert list_names(folder) == ["step-1", "step-2", "step-3"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder} cannot be locked (No locks available): make sure that no other" in line


# What stays

OTHERS = (
    "dataset.partial", "step-3.partial.bak", "step-x.partial", "step-3.a b.partial",
    "step3.partial", "notes.damaged", "results.replaced", "step-01.a.partial", "xstep-3.partial",
    "step-3.partial\n",
)  # fmt: skip


def test_what_the_owner_has_not_written_stays(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", 7, run="b")
    shutil.copytree(tmp_path / "other" / "step-7", folder / "step-7")
    shutil.copytree(tmp_path / "other" / "step-7", folder / "step-8.replaced")
    with mock.patch.object(manifests, "_remove_tree"):  # As if it was killed at its last act.
        write(folder, 8, keep=1)
    for name in OTHERS:
        (folder / name).mkdir()
        (folder / name / "data").touch()
    (folder / "step-3.attempt-0.partial").mkdir()
    (folder / "step-4.partial").mkdir()
    (folder / "step-5.partial").touch()
    (folder / "step-6.partial").symlink_to(tmp_path / "other")
    write(folder, 9, 10, keep=1)
    stays = [*OTHERS, "step-10", "step-5.partial", "step-6.partial", "step-7", "step-8.replaced"]
    assert list_names(folder) == sorted(stays)
    assert all((folder / name / "data").exists() for name in OTHERS)
    assert list_names(tmp_path / "other") == ["step-7"]


def test_another_owners_checkpoint_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", 7, run="b")
    shutil.copytree(tmp_path / "other" / "step-7", folder / "step-7")
    with pytest.raises(OSError, match=r"rank 0 on .*step-7: was written by another owner"):
        write(folder, 7)
    assert list_names(folder) == ["step-1", "step-2", "step-7"]
