"""Checkpoints that rot, or cannot be read: what is found, and what is done then."""

import errno
import math
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpiddp
import stale
from mistakes import hear
from mpiddp.checkpoints import tensor_memory
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage import owner as owners
from mpiddp.checkpoints.storage import shards
from mpiddp.checkpoints.storage.finding import ask_rank_0, find_demanded, find_newest, read_together
from mpiddp.checkpoints.storage.manifest import MANIFEST, DamageError, File
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import read_metadata, read_shards
from mpiddp.errors import CheckpointError, ConfigurationError, StorageError
from mpiddp.front.job_end import FINAL
from saves import (
    METADATA,
    SHARD,
    Clock,
    Hostile,
    delete,
    flip,
    list_names,
    make_directory,
    make_hostile,
    open_directory,
    truncate,
    write,
)

# Damage


def lengthen(path: Path, _: float) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def exchange(path: Path, _: float) -> None:
    """With the same file of the checkpoint before; files are as long there."""
    shutil.copy(path.parents[1] / "step-1" / path.name, path)


def replace_by_folder(path: Path, _: float) -> None:
    path.unlink()
    path.mkdir()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.sampled_from((flip, truncate, lengthen, delete, exchange, replace_by_folder)),
    name=st.sampled_from([SHARD, METADATA, MANIFEST]),
    place=st.floats(0, 1),
)
def test_damage_is_found_and_the_older_one_taken(damage, name, place, sound, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    damage(folder / "step-2" / name, place)
    if (folder / "step-2" / name).is_file() and (folder / "step-2" / name).read_bytes() == (
        sound / "step-2" / name
    ).read_bytes():
        return  # The lists of tensors of two checkpoints are the same.
    survey = find_newest(folder, RankGroup())
    assert survey.newest.path == folder / "step-1"
    (problems,) = survey.damaged.values()
    if not (name == MANIFEST and damage is exchange):
        assert all(name in problem for problem in problems)
    open_directory(folder, survey).thing.close()
    assert list_names(folder) == ["step-1", "step-2.damaged"]
    reason = (folder / "step-2.damaged" / "reason.txt").read_text()
    assert reason.splitlines() == problems


def test_all_bad_files_are_named_and_nothing_is_unpickled(folder, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    flip(folder / "step-2" / SHARD, 0.5)
    (folder / "step-2" / METADATA).unlink()
    (folder / "step-2" / "more").touch()
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("mpiddp.checkpoints.storage.finding.read_metadata", refuse)
    with pytest.raises(CheckpointError) as caught:
        find_demanded(folder / "step-2", RankGroup())
    assert caught.value.exit_code == 5
    for text in (f"{SHARD}: expected digest", f"{METADATA}: is missing", "more does not belong"):
        assert text in str(caught.value)


def test_a_checkpoint_under_another_name_is_refused(folder: Path) -> None:
    (folder / "step-2").rename(folder / "step-3")
    with pytest.raises(CheckpointError, match="is of step 2"):
        find_demanded(folder / "step-3", RankGroup())


def test_a_demanded_checkpoint_that_does_not_exist_is_told_from_a_damaged_one(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-999 does not exist; .* is step-2, step-1$"):
        find_demanded(folder / "step-999", RankGroup())
    with pytest.raises(CheckpointError, match=r"does not exist; .* there is none$"):
        find_demanded(folder / "no" / "step-1", RankGroup())
    (folder / "step-2" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"cannot be used: {MANIFEST} is missing"):
        find_demanded(folder / "step-2", RankGroup())


def test_damage_is_set_aside_by_a_training_that_goes_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with mpiddp.Checkpointer(tmp_path, model, keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
        checkpointer.wait()
        flip(tmp_path / "step-2" / SHARD, 0.5)
        assert checkpointer.restore() == {"step": 1}
        checkpointer.save(3)
        checkpointer.save(2)
        checkpointer.wait()
        assert list_names(tmp_path) == ["step-2", "step-2.damaged", "step-3"]


def test_a_full_disk_keeps_nobody_from_the_older_one(folder, monkeypatch, capsys):
    (folder / "step-2" / SHARD).unlink()
    (folder / "step-2" / "more").touch()
    with monkeypatch.context() as patch:
        fail(patch, manifests, "write_whole", math.inf, errno.ENOSPC)
        open_directory(folder, find_newest(folder, RankGroup())).thing.close()
    assert list_names(folder) == ["step-1", "step-2.damaged"]
    assert find_newest(folder, RankGroup()).newest is not None
    (line,) = capsys.readouterr().err.splitlines()
    assert "more does not belong to it, and 1 more)" in line and "step-1 is used" in line


def test_damaged_ones_alone_are_no_fresh_start(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"step-{step}" / MANIFEST).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="found damaged ones alone") as caught:
            find_newest(folder, RankGroup())
        assert caught.value.exit_code == 5
    # Also where they have been set aside.
    for step in (1, 2):
        manifests.set_aside(folder / f"step-{step}", ["gone"])
    with pytest.raises(CheckpointError, match="found damaged ones alone"):
        find_newest(folder, RankGroup())


# Hostile


HOSTILE = {
    "function": pickle.dumps(Hostile()), "module": b"cos\nsystem\n(S'touch /tmp/hostile'\ntR.",
    "attribute": b"\x80\x04\x8c\x05torch\x8c\x0bSize.mro.x\x93.",
    "other type": pickle.dumps({"a": 1}), "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_list_of_tensors_is_never_run(name, folder, capsys):
    make_hostile(folder / "step-2", METADATA, HOSTILE[name])
    with pytest.raises(DamageError):
        read_metadata(folder / "step-2")
    survey = find_newest(folder, RankGroup())
    assert survey.newest.path == folder / "step-1"
    assert METADATA in " ".join(survey.damaged[folder / "step-2"])
    assert capsys.readouterr().out == ""


def test_a_hostile_tensor_is_never_run(folder, capsys):
    path = folder / "step-2"
    content = pickle.dumps(Hostile()).ljust(manifests.read_manifest(path).files[SHARD].size)
    make_hostile(path, SHARD, content)
    find_demanded(path, RankGroup())
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|invalid|unpickl"):
        read_shards(path, "")
    assert capsys.readouterr().out == ""


def test_files_outside_are_refused(folder: Path) -> None:
    path = folder / "step-2"
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = "../step-1/" + info.relative_path
    make_hostile(path, METADATA, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is none of its files"):
        find_demanded(path, RankGroup())
    # And so is a list of what cannot be listed.
    make_hostile(path, METADATA, pickle.dumps(replace(metadata, storage_data={"step": None})))
    with pytest.raises(CheckpointError, match="its list of tensors cannot be read"):
        find_demanded(path, RankGroup())


@pytest.mark.parametrize(("dtype", "rows"), [("float65", 1), ("float32", 3)])
def test_bytes_that_hold_no_such_tensor_are_refused(dtype, rows):
    said = {"offset": 0, "shape": [rows, 2], "strides": [2, 1], "dtype": dtype}
    with pytest.raises(ValueError, match="16 bytes hold no tensor of "):
        tensor_memory.make(said, torch.zeros(16, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["../step-1/x", "..", "", "a\0b", "a\ud800"])
def test_names_in_the_manifest_that_are_no_file_names_are_refused(name, folder, monkeypatch):
    manifest = manifests.read_manifest(folder / "step-2")
    files = {**manifest.files, name: File(0, xxhash.xxh3_128_hexdigest(b""))}
    (folder / "step-1" / "x").touch()
    manifests.write_manifest(folder / "step-2", replace(manifest, files=files))
    monkeypatch.setattr(manifests, "compare", None)  # No file is read.
    with pytest.raises(CheckpointError, match=r"manifest.json names .*, which is not a file name"):
        find_demanded(folder / "step-2", RankGroup())


# Errors of reading


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(manifests, "time", clock)
    return clock


def throw(error: Exception | None) -> None:
    if error is not None:
        raise error


def fail(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, times: float, number: int = 116
) -> None:
    """Have a function raise an OSError so many times."""
    function, count = getattr(place, name), 0

    def call(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count <= times:
            raise OSError(number, os.strerror(number), "x")
        return function(*arguments)

    monkeypatch.setattr(place, name, call)


READS = ((manifests, "read_text"), (manifests, "compare"), (manifests, "_list"), (os, "listdir"))


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize(("place", "name"), READS)
def test_what_cannot_be_read_is_tried_again_and_never_damage(
    place, name, number, folder, monkeypatch, capsys, clock
):
    with monkeypatch.context() as patch:
        fail(patch, place, name, 2, number)
        survey = find_newest(folder, RankGroup())
    assert survey.newest is not None and survey.newest.path.name == "step-2"
    assert survey.damaged == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{os.strerror(number)}: trying again for up to" in line
    with monkeypatch.context() as patch:
        fail(patch, place, name, math.inf, number)
        with pytest.raises(StorageError, match=os.strerror(number)) as caught:
            find_newest(folder, RankGroup())
    assert caught.value.exit_code not in FINAL
    assert "\n" not in str(caught.value)
    assert list_names(folder) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("place", "name"), [(shards.FileSystemReader, "read_data"), (Path, "read_bytes")]
)
def test_tensors_that_cannot_be_read_are_tried_again(place, name, folder, monkeypatch, clock):
    fail(monkeypatch, place, name, 2)
    assert int(read_shards(folder / "step-2", "")["step"]) == 2


def hear_both(work: Callable[[Any], object]) -> list[str]:
    """What each of two ranks, which are threads here, hears of ``work``."""
    barrier, values = threading.Barrier(2, timeout=60), [None, None]

    def run(rank: int) -> str:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = [*values]
            barrier.wait()
            return found

        ranks = SimpleNamespace(rank=rank, size=2, gather=gather)
        ranks.broadcast = lambda value: gather(value)[0]
        return hear(lambda: work(ranks))

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, range(2))]


STALE = OSError(errno.ESTALE, "Stale file handle")
UNREAD = r"StorageError: .*/step-2 cannot be read: rank 1 on \S+: Stale file handle: nothing was "


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ((None, STALE), UNREAD),
        # What may succeed next time comes first.
        ((KeyError("no"), STALE), UNREAD),
        ((None, KeyError("no")), "CheckpointError: .*/step-2 does not fit: KeyError: 'no'; go on "),
        ((CheckpointError("one"), CheckpointError("two")), "CheckpointError: one$"),
    ],
)
def test_all_ranks_hear_of_what_one_cannot_read(errors, said, folder):
    found = find_newest(folder, RankGroup()).newest
    said_by = hear_both(
        lambda ranks: read_together(found, ranks, lambda: throw(errors[ranks.rank]))
    )
    assert said_by[0] == said_by[1] and re.match(said, said_by[0]), said_by


# Rank 0 compares the first of the two files, rank 1 the second.
@pytest.mark.parametrize(("rank", "name"), [(0, METADATA), (1, SHARD)])
def test_all_ranks_hear_of_a_file_that_one_cannot_compare(rank, name, folder, monkeypatch, clock):
    compare = manifests.compare

    def fail_for_one(path: Path, *more: Any) -> str:
        throw(STALE if path.name == name else None)
        return compare(path, *more)

    monkeypatch.setattr(manifests, "compare", fail_for_one)
    said = hear_both(lambda ranks: find_newest(folder, ranks))
    assert said[0] == said[1] and f"step-2 cannot be read: rank {rank} on " in said[0], said


@pytest.mark.parametrize(
    ("error", "said"),
    [(ConfigurationError("in use"), "in use$"), (STALE, r"StorageError: rank 0 on \S+: Stale ")],
)
def test_all_ranks_hear_of_what_rank_0_is_asked(error, said):
    said_by = hear_both(lambda ranks: ask_rank_0(ranks, lambda: throw(error), StorageError))
    assert said_by[0] == said_by[1] and re.match(said, said_by[0]), said_by


OPENING = ((owners, "read_owner"), (manifests, "list_checkpoints"), (manifests, "read_or_none"))


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize(("place", "name"), OPENING)
def test_a_directory_is_opened_and_locked_though_a_read_fails(
    place, name, number, folder, monkeypatch, clock
):
    directory = make_directory(folder, replaces=False)
    with monkeypatch.context() as patch:
        fail(patch, place, name, 1, number)
        survey = directory.look()
    with pytest.raises(ConfigurationError, match="is in use by"):
        make_directory(folder).look()
    with monkeypatch.context() as patch:
        fail(patch, place, name, 1, number)
        directory.open(survey)
    directory.close()


def test_what_fails_now_and_then_is_read_however_long_that_takes(tmp_path, monkeypatch, clock):
    patience, folder = manifests.Patience(), tmp_path / "folder"
    folder.mkdir()
    for _ in range(2):
        with monkeypatch.context() as patch:
            fail(patch, os, "listdir", 1)
            assert patience.read(os.listdir, folder) == []
        clock.sleep(manifests.PATIENCE_SECONDS)  # A large file is read.


@pytest.mark.parametrize("stale_rank", [0, 1])
def test_all_ranks_must_find_what_one_finds(stale_rank, pool, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "checkpoints")
    ranks = pool("openmpi", 2)
    # Rank 0 compares the first of the two files, rank 1 the second.
    name = (METADATA, SHARD)[stale_rank]
    passed = ranks.call(stale.find_with_stale_rank, folder, stale_rank, 2)
    assert passed.values == [("step-2", [])] * 2
    assert f"is missing, but not for rank {1 - stale_rank} on " in passed.stderr[0]
    said = ranks.call(stale.find_with_stale_rank, folder, stale_rank, 10**9).values
    assert said[0] == said[1]
    assert re.fullmatch(
        rf"StorageError: {folder}/step-2 cannot be read: rank {stale_rank} on .*: {name}: is "
        rf"missing, but not for rank {1 - stale_rank} on \S+ \(do all hosts share it\?\): nothing "
        r"was changed; .*",
        said[0],
    )
    assert list_names(folder) == ["step-1", "step-2"]
    (folder / "step-2" / name).unlink()
    found = ranks.call(stale.find_with_stale_rank, folder, stale_rank, 0).values
    assert found == [("step-1", [f"{name}: is missing"])] * 2


def test_a_manifest_that_one_rank_does_not_see_yet_is_no_damage(pool, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "checkpoints")
    ranks = pool("openmpi", 2)
    assert ranks.call(stale.find_without_manifest, folder, 1).values == [("step-2", [])] * 2
    said = ranks.call(stale.find_without_manifest, folder, 10**9).values
    assert "cannot be read: rank 0 on" in said[0] and said[0] == said[1]
    assert list_names(folder) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: shutil.rmtree(folder / "step-2"), "step-1"),
        (lambda folder: write(folder, 3, keep=1), "step-3"),
    ],
)
def test_what_another_job_changes_meanwhile_is_no_damage(change, found, folder, monkeypatch):
    compare = manifests.compare

    def change_and_compare(path: Path, file: File, **options: bool) -> str:
        if (folder / "step-2").exists():
            change(folder)
        return compare(path, file, **options)

    monkeypatch.setattr(manifests, "compare", change_and_compare)
    survey = find_newest(folder, RankGroup())
    assert survey.newest is not None and survey.newest.path.name == found
    assert survey.damaged == {}


@pytest.mark.parametrize("gone", ["step-1", "step-2"])
def test_a_list_is_made_while_some_are_renamed(gone, folder, monkeypatch):
    listed = manifests._list(folder)
    (folder / gone).rename(folder / "step-9.a.partial")
    monkeypatch.setattr(manifests, "_list", lambda _: listed)
    is_dir, seen = Path.is_dir, set[Path]()

    def was_there(path: Path) -> bool:
        """A directory is there when it is looked at first."""
        if path in seen:
            return is_dir(path)
        seen.add(path)
        return True

    monkeypatch.setattr(Path, "is_dir", was_there)
    assert {path.name for path in manifests.list_checkpoints(folder)} == {"step-1", "step-2"} - {
        gone
    }


def test_another_format_is_no_damage(folder: Path) -> None:
    path = folder / "step-2"
    manifests.write_manifest(path, replace(manifests.read_manifest(path), format=1))
    for find in (
        lambda: find_newest(folder, RankGroup()),
        lambda: find_demanded(path, RankGroup()),
    ):
        with pytest.raises(
            CheckpointError, match=r"has format 1 .* reads format 2 .*: use"
        ) as caught:
            find()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert list_names(folder) == ["step-1", "step-2"]
