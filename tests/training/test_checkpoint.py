"""Checkpoints that rot: what the loader finds, and what it does then."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_metrics import ROW

from mpiddp.errors import CheckpointError, ConfigurationError
from mpiddp.training import manifest as manifests
from mpiddp.training import shards
from mpiddp.training.checkpoint import (
    CheckpointDirectory,
    Source,
    Written,
    find_demanded,
    find_newest,
)
from mpiddp.training.manifest import MANIFEST, DamageError, File
from mpiddp.training.packing import pack, unpack
from mpiddp.training.ranks import Ranks
from mpiddp.training.save_interval import Interval, parse_interval
from mpiddp.training.saving import find_score
from mpiddp.training.shards import read_metadata, read_shards

SHARD, METADATA = "__0_0.distcp", ".metadata"
STATE = {"weights": torch.arange(3000.0), "counts": torch.tensor([4, 5])}
ran: list[str] = []
"""What a hostile pickle would leave."""


def open_directory(path: Path, keep: int = 9) -> CheckpointDirectory:
    directory = CheckpointDirectory(path, Ranks(), Source("attempt-1", {"seed": 0}), keep)
    directory.open()
    return directory


def write(path: Path, *steps: int, keep: int = 9, score: float | None = None) -> None:
    directory = open_directory(path, keep)
    for step in steps:
        state = {**STATE, "step": torch.tensor(step)}
        directory.start(step, state, score)
    directory.wait()


def read_step(path: Path) -> int:
    return int(read_shards(path, "")["step"])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, which no test changes."""
    path = tmp_path_factory.mktemp("sound")
    write(path, 1, 2)
    return path


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "checkpoints"))


def test_what_was_written_is_read(folder: Path) -> None:
    survey = find_newest(folder, Ranks())
    assert survey.newest is not None
    assert survey.damaged == {}
    assert survey.newest.path == folder / "step-2"
    found = read_shards(survey.newest.path, "")
    assert {name: each.tolist() for name, each in found.items()} == {
        **{name: each.tolist() for name, each in STATE.items()},
        "step": 2,
    }
    manifest = survey.newest.manifest
    assert (manifest.format, manifest.algorithm, manifest.step) == (1, "sha256", 2)
    assert (manifest.world, manifest.attempt) == (1, "attempt-1")
    assert manifest.versions["torch"] == torch.__version__
    assert sorted(manifest.files) == sorted([METADATA, SHARD])
    for name, file in manifest.files.items():
        assert file.size == (folder / "step-2" / name).stat().st_size


# Damage


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def truncate(path: Path, place: float) -> None:
    os.truncate(path, int(place * (path.stat().st_size - 1)))


def lengthen(path: Path, _: float) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def delete(path: Path, _: float) -> None:
    path.unlink()


def exchange(path: Path, _: float) -> None:
    """With the same file of the checkpoint before; files are as long there."""
    shutil.copy(path.parents[1] / "step-1" / path.name, path)


def replace_by_folder(path: Path, _: float) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = (flip, truncate, lengthen, delete, exchange, replace_by_folder)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    damage=st.sampled_from(DAMAGES),
    name=st.sampled_from([SHARD, METADATA, MANIFEST]),
    place=st.floats(0, 1),
)
def test_damage_is_found_and_the_older_one_taken(
    damage: Callable[[Path, float], None],
    name: str,
    place: float,
    sound: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    damage(folder / "step-2" / name, place)
    if (folder / "step-2" / name).is_file() and (folder / "step-2" / name).read_bytes() == (
        sound / "step-2" / name
    ).read_bytes():
        return  # The lists of tensors of two checkpoints are the same.
    survey = find_newest(folder, Ranks())
    assert survey.newest is not None
    assert survey.newest.path == folder / "step-1"
    (problems,) = survey.damaged.values()
    if not (name == MANIFEST and damage is exchange):
        assert all(name in problem for problem in problems)
    CheckpointDirectory(folder, Ranks(), Source("b", {}), 9).open(survey)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2.damaged"]
    reason = (folder / "step-2.damaged" / "reason.txt").read_text()
    assert reason.splitlines() == problems


def test_all_bad_files_are_named_and_nothing_is_unpickled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    flip(folder / "step-2" / SHARD, 0.5)
    (folder / "step-2" / METADATA).unlink()
    (folder / "step-2" / "more").touch()
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("mpiddp.training.checkpoint.read_metadata", refuse)
    with pytest.raises(CheckpointError) as caught:
        find_demanded(folder / "step-2", Ranks())
    assert caught.value.exit_code == 5
    for text in (f"{SHARD}: expected digest", f"{METADATA}: is missing", "more does not belong"):
        assert text in str(caught.value)


def test_two_shards_that_are_swapped_are_found(folder: Path) -> None:
    # As they would be with two ranks.
    path = folder / "step-2"
    manifest = manifests.read_manifest(path)
    (path / "__1_0.distcp").write_bytes((path / SHARD).read_bytes()[::-1])
    digest = manifests.hashlib.sha256((path / "__1_0.distcp").read_bytes()).hexdigest()
    size = manifest.files[SHARD].size
    more = {**manifest.files, "__1_0.distcp": File(size, digest)}
    manifests.write_manifest(path, replace(manifest, files=more))
    assert find_demanded(path, Ranks()).newest is not None
    (path / SHARD).rename(path / "between")
    (path / "__1_0.distcp").rename(path / SHARD)
    (path / "between").rename(path / "__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: .*; __1_0.distcp: expected digest"):
        find_demanded(path, Ranks())


def test_a_checkpoint_under_another_name_is_refused(folder: Path) -> None:
    (folder / "step-2").rename(folder / "step-3")
    with pytest.raises(CheckpointError, match="is of step 2"):
        find_demanded(folder / "step-3", Ranks())


def test_a_demanded_checkpoint_that_does_not_exist_is_told_from_a_damaged_one(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-999 does not exist; .* is step-2, step-1$"):
        find_demanded(folder / "step-999", Ranks())
    with pytest.raises(CheckpointError, match=r"does not exist; .* there is none$"):
        find_demanded(folder / "no" / "step-1", Ranks())
    (folder / "step-2" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"cannot be used: {MANIFEST} is missing"):
        find_demanded(folder / "step-2", Ranks())


def test_what_is_set_aside_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survey = find_newest(folder, Ranks())
    CheckpointDirectory(folder, Ranks(), Source("b", {}), 9).open(survey)
    assert capsys.readouterr().err == ""
    (folder / "step-2" / SHARD).unlink()
    (folder / "step-2" / "more").touch()
    survey = find_newest(folder, Ranks())
    CheckpointDirectory(folder, Ranks(), Source("b", {}), 9).open(survey)
    (line,) = capsys.readouterr().err.splitlines()
    for text in (
        f"{folder / 'step-2.damaged'} (",
        "more does not belong to it, and 1 more)",
        "step-1 is used",
    ):
        assert text in line


def test_damaged_ones_alone_are_no_fresh_start(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"step-{step}" / MANIFEST).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="found damaged ones alone") as caught:
            find_newest(folder, Ranks())
        assert caught.value.exit_code == 5
    # Also where they have been set aside.
    for step in (1, 2):
        manifests.set_aside(folder / f"step-{step}", ["gone"])
    with pytest.raises(CheckpointError, match="found damaged ones alone"):
        find_newest(folder, Ranks())


def test_a_save_that_was_cut_short_is_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "step-3.attempt-1.partial").mkdir()
    assert find_newest(tmp_path, Ranks()).newest is None
    open_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert find_newest(tmp_path / "none", Ranks()).newest is None


# Hostile


def leave_trace() -> None:
    ran.append("hostile")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return leave_trace, ()


def test_a_hostile_pickle_would_be_noticed() -> None:
    pickle.loads(pickle.dumps(Hostile()))
    assert ran.pop() == "hostile"


def make_hostile(path: Path, name: str, content: bytes) -> None:
    """As somebody would who can write there: the manifest fits."""
    (path / name).write_bytes(content)
    manifest = manifests.read_manifest(path)
    digest = manifests.hashlib.sha256(content).hexdigest()
    files = {**manifest.files, name: File(len(content), digest)}
    manifests.write_manifest(path, replace(manifest, files=files))


HOSTILE = {
    "function": pickle.dumps(Hostile()),
    "module": b"cos\nsystem\n(S'touch /tmp/hostile'\ntR.",
    "attribute": b"\x80\x04\x8c\x05torch\x8c\x0bSize.mro.x\x93.",
    "other type": pickle.dumps({"a": 1}),
    "rubbish": b"rubbish",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_list_of_tensors_is_never_run(name: str, folder: Path) -> None:
    make_hostile(folder / "step-2", METADATA, HOSTILE[name])
    with pytest.raises(DamageError):
        read_metadata(folder / "step-2")
    survey = find_newest(folder, Ranks())
    assert survey.newest is not None
    assert survey.newest.path == folder / "step-1"
    assert METADATA in " ".join(survey.damaged[folder / "step-2"])
    assert ran == []


def test_a_hostile_tensor_is_never_run(folder: Path) -> None:
    path = folder / "step-2"
    content = pickle.dumps(Hostile()).ljust(manifests.read_manifest(path).files[SHARD].size)
    make_hostile(path, SHARD, content)
    assert find_demanded(path, Ranks()).newest is not None
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|invalid|unpickl"):
        read_shards(path, "")
    assert ran == []


def test_files_outside_are_refused(folder: Path) -> None:
    path = folder / "step-2"
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = "../step-1/" + info.relative_path
    make_hostile(path, METADATA, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is none of its files"):
        find_demanded(path, Ranks())


@pytest.mark.parametrize("name", ["../step-1/x", "/etc/hostname", "..", ".", "", "a\0b", "a\ud800"])
def test_names_in_the_manifest_that_are_no_file_names_are_refused(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifests.read_manifest(folder / "step-2")
    files = {**manifest.files, name: File(0, manifests.hashlib.sha256().hexdigest())}
    (folder / "step-1" / "x").touch()
    manifests.write_manifest(folder / "step-2", replace(manifest, files=files))
    monkeypatch.setattr(manifests, "_compare", None)  # No file is read.
    with pytest.raises(CheckpointError, match=r"manifest.json names .*, which is not a file name"):
        find_demanded(folder / "step-2", Ranks())


# Which are kept


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    directory = open_directory(tmp_path, keep=2)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.8), (4, None), (5, 0.7), (6, None)):
        directory.start(step, STATE, score)
    directory.wait()
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == [
        "step-6",
        "step-5",
        "step-2",
    ]
    assert len(list(tmp_path.iterdir())) == 3


def test_the_best_has_the_highest_accuracy_or_else_the_lowest_loss() -> None:
    evaluated = replace(ROW, test_loss=0.5)
    assert find_score(ROW) is None
    assert find_score(replace(evaluated, test_metrics={"gap": 7.0, "accuracy": 0.75})) == 0.75
    for metrics in ({}, {"gap": 7.0}):
        better = replace(evaluated, test_loss=0.25, test_metrics=metrics)
        score, higher = find_score(replace(evaluated, test_metrics=metrics)), find_score(better)
        assert score is not None and higher is not None and higher > score


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    write(tmp_path, 5, 10)
    # A run that began again, or went on from an older one.
    write(tmp_path, 5)
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-5", "step-10"]
    write(tmp_path, 7, keep=1)
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-7"]


def test_an_exchange_that_was_cut_short_is_found(tmp_path: Path) -> None:
    replaced = tmp_path / "step-5.replaced"
    write(tmp_path, 3, 5)
    (tmp_path / "step-5").rename(replaced)
    for _ in range(2):
        survey = find_newest(tmp_path, Ranks())
        assert survey.newest is not None
        assert (survey.newest.path, read_step(replaced)) == (replaced, 5)
        assert survey.damaged == {}
        # What was found is still there when the directory is opened.
        CheckpointDirectory(tmp_path, Ranks(), Source("b", {}), 9).open(survey)
    # It goes as soon as there is another one of this step, and no earlier.
    shutil.copytree(replaced, tmp_path / "kept")
    write(tmp_path, 5)
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-5", "step-3"]
    (tmp_path / "kept").rename(replaced)
    (replaced / SHARD).unlink()
    survey = find_newest(tmp_path, Ranks())
    assert survey.damaged == {}
    open_directory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-5"]


def test_an_exchange_is_cut_short_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    write(tmp_path / "before", 5)
    (tmp_path / "before" / "step-5" / "more").mkdir()
    renames, rename = 0, Path.rename
    while True:
        folder, count = tmp_path / f"after-{renames}", 0
        shutil.copytree(tmp_path / "before", folder)
        (folder / "step-5" / "more").rmdir()
        shutil.copytree(folder / "step-5", folder / "step-5.b.partial")

        def stop(self: Path, target: Path, limit: int = renames) -> Path:
            nonlocal count
            if count == limit:
                raise Killed
            count += 1
            return rename(self, target)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "rename", stop)
                manifests.publish(folder / "step-5.b.partial", folder / "step-5")
            break
        except Killed:
            survey = find_newest(folder, Ranks())
            assert survey.newest is not None
            assert survey.newest.path.name == ("step-5.replaced" if renames == 1 else "step-5")
            assert survey.damaged == {}
        renames += 1
    assert renames == 3
    assert [path.name for path in folder.iterdir()] == ["step-5"]


# Writing


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    directory, tensor, told = open_directory(tmp_path), torch.zeros(1000), list[Written]()
    for step in (1, 2):
        tensor.fill_(step)
        directory.start(step, {"step": tensor}, None, told.append)
        tensor.fill_(-1)
    directory.wait()
    assert not directory.is_busy
    assert [each.path.name for each in told] == ["step-1", "step-2"]
    assert all(0 < each.staging_seconds < each.seconds for each in told)
    for step in (1, 2):
        found = read_shards(tmp_path / f"step-{step}", "")["step"]
        assert torch.equal(found, torch.full((1000,), float(step)))


def test_a_write_that_fails_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    directory = open_directory(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        directory.start(2, STATE)
        with pytest.raises(OSError, match="No space left") as caught:
            directory.wait()
    assert (caught.value.errno, caught.value.strerror) == (28, "rank 0: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert find_demanded(tmp_path / "step-1", Ranks()).newest is not None
    directory.start(3, STATE)
    directory.wait()
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-3", "step-1"]


def test_an_attempt_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)
    source = Source("attempt-0", {}, is_current=lambda: False)
    directory = CheckpointDirectory(tmp_path, Ranks(), source, 1)
    directory.open()
    directory.start(1, {"step": torch.tensor(9)})
    with pytest.raises(OSError, match="another attempt has taken the run over"):
        directory.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert read_step(tmp_path / "step-1") == 1


def test_each_file_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(path.name)
        assert path.is_dir() or path.stat().st_size > 0
        sync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(f"{self.name} > {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    write(tmp_path / "new", 1)
    partial = "step-1.attempt-1.partial"
    assert events == [
        SHARD, ".metadata.tmp", ".metadata.tmp > .metadata", MANIFEST, partial,
        f"{partial} > step-1", "new",
    ]  # fmt: skip


def test_only_memory_that_stays_is_digested_later(tmp_path: Path) -> None:
    tensors = [torch.arange(100.0), torch.ones(64, 64), torch.zeros(0)]
    memory = shards._Memory(tensors)

    def holds(tensor: torch.Tensor, more: int = 0) -> bool:
        size = tensor.nbytes + more
        return memory.holds(memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())))

    for tensor in tensors[:2]:
        assert holds(tensor) and holds(tensor[3:])
        assert not holds(tensor, more=1)
        assert not holds(tensor.clone())
    # torch writes a copy of the part of a larger tensor, and frees it.
    large = torch.randn(1 << 20)
    path = tmp_path / "step-1"
    (files,) = shards.write_shards(path, {"half": large[: 1 << 19], "all": large}, Ranks())
    for name, file in files.items():
        content = (path / name).read_bytes()
        assert (file.size, file.digest) == (len(content), hashlib.sha256(content).hexdigest())
    assert torch.equal(read_shards(path, "")["half"], large[: 1 << 19])


# Parts


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@given(STATES)
def test_any_state_is_packed_and_unpacked(state: Any) -> None:
    assert unpack(pack(state)) == state


def test_tensors_with_like_names_are_kept_apart() -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "tensor": [torch.tensor(3)]}}
    assert repr(unpack(pack(state))) == repr(state)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500steps", Interval(steps=500)),
        ("1 step", Interval(steps=1)),
        ("10epochs", Interval(epochs=10)),
        ("15min", Interval(seconds=900)),
        ("never", None),
    ],
)
def test_intervals(text: str, interval: Interval | None) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize("text", ["", "5", "0steps", "5 parsecs", "-1min", "1.5epochs"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="save_every: expected, for example, 500steps"):
        parse_interval(text)


def test_a_manifest_says_what_it_was_given(tmp_path: Path) -> None:
    write(tmp_path, 4, score=0.25)
    manifest = manifests.read_manifest(tmp_path / "step-4")
    assert manifest.score == 0.25
    assert manifest.configuration == {"seed": 0}
    assert manifest.configuration_digest == manifests.digest_configuration({"seed": 0})
    assert set(asdict(manifest)["files"]) == {SHARD, METADATA}
