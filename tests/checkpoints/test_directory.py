"""How checkpoints are written, in which order they count, and which are kept."""

import errno
import json
import math
import os
import re
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import stale
from mpiddp.checkpoints.packing import pack, unpack
from mpiddp.checkpoints.storage import directory as directories
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage import shards
from mpiddp.checkpoints.storage.directory import Staging, Written
from mpiddp.checkpoints.storage.finding import find_demanded, find_newest
from mpiddp.checkpoints.storage.manifest import MANIFEST
from mpiddp.checkpoints.storage.owner import OWNER
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import read_shards
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.training.options.groups.checkpoints import Interval, parse_interval
from pool import Pools
from saves import METADATA, SHARD, STATE, Clock, list_names, make_directory, open_directory, write


def raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_step(path: Path) -> int:
    return int(read_shards(path, "")["step"])


def test_what_was_written_is_read(folder: Path) -> None:
    survey = find_newest(folder, RankGroup())
    assert survey.damaged == {}
    assert survey.newest.path == folder / "step-2"
    found = read_shards(survey.newest.path, "")
    assert {name: each.tolist() for name, each in found.items()} == {
        **{name: each.tolist() for name, each in STATE.items()},
        "step": 2,
    }
    manifest = survey.newest.manifest
    assert (manifest.format, manifest.algorithm, manifest.step) == (2, "xxh3-128", 2)
    assert (manifest.world, manifest.attempt) == (1, "attempt-1")
    assert (manifest.score, manifest.configuration) == (None, {"seed": 0})
    assert manifest.owner == json.loads((folder / OWNER).read_text())["token"]
    assert manifest.versions["torch"] == torch.__version__
    assert sorted(manifest.files) == sorted([METADATA, SHARD])
    for name, file in manifest.files.items():
        assert file.size == (folder / "step-2" / name).stat().st_size


def test_a_script_may_go_elsewhere_and_its_directory_may_be_removed(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with open_directory(Path("c")) as directory:
        directory.start(1, STATE)
        directory.wait()
        monkeypatch.chdir(tmp_path / "there")
        directory.start(2, STATE)
        directory.wait()
        assert list_names(tmp_path / "here" / "c") == ["step-1", "step-2"]
        # It is not made again, without the file that says whose it is.
        shutil.rmtree(tmp_path / "here" / "c")
        directory.start(3, STATE)
        with pytest.raises(OSError, match="No such file or directory; somebody has removed them"):
            directory.wait()
    assert list(tmp_path.glob("*/*")) == []


# Which are kept


@pytest.mark.parametrize(
    ("looks", "number", "said", "kept"),
    [
        (True, errno.ENOSPC, "free some there, or choose another directory", ["step-2", "step-5"]),
        # Nobody has seen that the newest is whole.
        (False, errno.EIO, "error: choose another dir", [f"step-{each}" for each in range(1, 6)]),
    ],
)
def test_what_need_not_be_kept_goes_before_a_save_that_may_find_no_room(
    looks, number, said, kept, tmp_path, monkeypatch
):
    with open_directory(tmp_path, keep=9) as directory:
        for step, score in enumerate((0.5, 0.9, 0.1, None, None), 1):
            directory.start(step, STATE, score)
        directory.wait()
    directory = make_directory(tmp_path, keep=1)
    directory.open(directory.look() if looks else None)
    # Somebody may go on from an older one, before the next is written.
    assert len(list_names(tmp_path)) == 5

    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(directories, "write_shards", mock.Mock(side_effect=error))
    directory.start(6, STATE)
    with pytest.raises(OSError, match=said):
        directory.wait()
    assert list_names(tmp_path) == kept
    directory.close()


def test_the_one_that_training_goes_on_from_stays_until_the_next_is_whole(tmp_path, monkeypatch):
    write(tmp_path, 1, 2, 3, keep=9)
    directory = make_directory(tmp_path, keep=1)
    directory.open(directory.look())
    directory.use(find_demanded(tmp_path / "step-1", RankGroup()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_full)
        directory.start(4, STATE)
        with pytest.raises(OSError, match="No space left"):
            directory.wait()
    assert list_names(tmp_path) == ["step-1", "step-2", "step-3"]
    directory.start(4, STATE)
    directory.wait()
    assert list_names(tmp_path) == ["step-4"]
    directory.close()


@pytest.mark.parametrize(
    ("scores", "keep", "kept"),
    [
        ((0.5, 0.9, math.nan, None, 0.7, -math.inf, None), 2, ["step-7", "step-6", "step-2"]),
        ((math.nan, 0.5, math.nan, 0.4), 1, ["step-4", "step-2"]),
    ],
)
def test_the_newest_and_the_best_are_kept(scores, keep, kept, tmp_path):
    with open_directory(tmp_path, keep=keep) as directory:
        for step, score in enumerate(scores, 1):
            directory.start(step, STATE, score)
        directory.wait()
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == kept
    assert list_names(tmp_path) == sorted(kept)


def test_a_save_waits_for_each_gpu_of_its_tensors(tmp_path, monkeypatch):
    """In the thread that makes them, before they are read, and until their copies are there."""
    events = list[object]()
    gpus = [torch.device("cuda", number) for number in (1, 3)]
    made_up = dict(enumerate(SimpleNamespace(is_cuda=True, device=each) for each in gpus))

    def synchronize(gpu: torch.device) -> None:
        assert threading.current_thread() is threading.main_thread()
        events.append(gpu)

    def copy(_: object, tensors: Any) -> dict[str, torch.Tensor]:
        events.append("copied")
        return STATE

    def join(tensors: Any, _: RankGroup) -> dict[str, torch.Tensor]:
        events.append("written")
        return STATE

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(Staging, "copy", copy)
    monkeypatch.setattr(directories, "join_equal", join)
    with open_directory(tmp_path) as directory:
        directory.start(1, made_up | {"on the CPU": torch.ones(2)})
        directory.wait()
        directory.start(2, made_up, is_copied=False)
        directory.wait()
    for each in (events[:2], events[3:5], events[6:8]):
        assert set(each) == set(gpus)
    assert (events[2], events[5], events[8:]) == ("copied", "written", ["written"])


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    write(tmp_path, 5, 10)
    # A run that began again, or went on from an older one. What is replaced does not count.
    for _ in range(2):
        write(tmp_path, 5, keep=2)
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-5", "step-10"]
    write(tmp_path, 7, keep=1)
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-7"]


def test_an_exchange_that_was_cut_short_is_found(tmp_path: Path) -> None:
    replaced = tmp_path / "step-5.replaced"
    write(tmp_path, 3, 5)
    (tmp_path / "step-5").rename(replaced)
    for _ in range(2):
        survey = find_newest(tmp_path, RankGroup())
        assert (survey.newest.path, read_step(replaced)) == (replaced, 5)
        assert survey.damaged == {}
        # What was found is still there when the directory is opened.
        open_directory(tmp_path, survey).thing.close()
    # It goes as soon as there is another one of this step, and no earlier.
    shutil.copytree(replaced, tmp_path / "kept")
    write(tmp_path, 5)
    assert [path.name for path in manifests.list_checkpoints(tmp_path)] == ["step-5", "step-3"]
    (tmp_path / "kept").rename(replaced)
    (replaced / SHARD).unlink()
    survey = find_newest(tmp_path, RankGroup())
    assert survey.damaged == {}
    with open_directory(tmp_path) as directory:
        assert list_names(tmp_path) == ["step-3", "step-5"]
        # One that could not be removed is in nobody's way.
        shutil.copytree(tmp_path / "step-5", replaced)
        directory.start(5, STATE)
        directory.wait()
    assert list_names(tmp_path) == ["step-3", "step-5"]


# Writing


def test_a_write_that_fails_leaves_the_older_ones(tmp_path, monkeypatch):
    write(tmp_path, 1)
    directory = make_directory(tmp_path, keep=2)
    directory.open(directory.look())

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_full)
        directory.start(2, STATE)
        with pytest.raises(OSError, match="No space left") as caught:
            directory.wait()
    assert isinstance(caught.value, MpiddpError) and caught.value.errno == errno.ENOSPC
    said = (
        rf"a checkpoint in {tmp_path} could not be written: rank 0 on {socket.gethostname()}: No "
        r"space left on device \([\d.]+ KiB needed, .* free\): free some there, lower keep, or "
        "choose another directory; the older ones are as they were"
    )
    assert re.fullmatch(said, str(caught.value))
    assert list_names(tmp_path) == ["step-1"]
    directory.close()


def test_an_attempt_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)
    directory = make_directory(tmp_path, attempt="attempt-0", is_current=lambda: False, keep=1)
    directory.open()
    directory.start(1, {"step": torch.tensor(9)})
    with pytest.raises(OSError, match="another attempt has taken the run over"):
        directory.wait()
    assert list_names(tmp_path) == ["step-1"]
    assert read_step(tmp_path / "step-1") == 1


def test_each_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
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

    directory = make_directory(tmp_path / "new")
    directory.open()
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    told = list[Written]()
    directory.start(1, STATE, None, told.append)
    directory.wait()
    assert [each.path.name for each in told] == ["step-1"]
    assert all(0 < each.staging_seconds < each.seconds < 600 for each in told)
    partial = "step-1.attempt-1.partial"
    assert events == [
        SHARD, ".metadata.tmp", ".metadata.tmp > .metadata", MANIFEST, partial,
        f"{partial} > step-1", "new",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_those_of_torch_and_their_digests_are_of_all_bytes(tmp_path: Path) -> None:
    large = torch.randn(1 << 20)
    tensors = {
        "all": large,
        "half": large[: 1 << 19],
        "part": torch.arange(100.0)[3:50:2],
        "turned": torch.arange(6).reshape(2, 3).T,
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor(True),
        "pair": torch.tensor([0.5, 2.0]),
        "short": torch.randn(7).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        **{f"number-{each}": torch.tensor(each) for each in range(5)},
    }
    path = tmp_path / "step-1"
    (files,) = shards.write_shards(path, tensors, RankGroup(), {}, threading.Event())
    for name, file in files.items():
        content = (path / name).read_bytes()
        assert (file.size, file.digest) == (len(content), xxhash.xxh3_128_hexdigest(content))
    found = {name: torch.empty_like(each) for name, each in tensors.items()}
    torch.distributed.checkpoint.load(found, checkpoint_id=path, no_dist=True)
    for name, each in read_shards(path, "").items():
        assert torch.equal(each, tensors[name]) and torch.equal(found[name], tensors[name]), name


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


@settings(max_examples=30)
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
        ("10epochs", Interval(epochs=10)),
        ("15min", Interval(seconds=900)),
        ("auto", Interval(epochs=1, seconds=900, share=0.01)),
        ("never", None),
    ],
)
def test_intervals(text: str, interval: Interval | None) -> None:
    assert parse_interval(text) == interval
    for bad in ("", "5", "0steps", "5 parsecs", "-1min", "1.5epochs"):
        with pytest.raises(ConfigurationError, match="save_every: expected, for example, 500steps"):
            parse_interval(bad)


# Hosts


def test_a_directory_that_hosts_do_not_share_is_refused(pool: Pools, tmp_path: Path) -> None:
    ranks = pool("openmpi", 2)
    host = re.escape(socket.gethostname())
    said = ranks.call(stale.open_apart, tmp_path).values
    assert re.fullmatch(
        rf"checkpoints: {tmp_path}/node-\d is not one directory for all hosts: rank 1 \({host}\) "
        rf"does not see what rank 0 \({host}\) writes there: .*",
        said[0],
    )
    # Nothing is left but the owner's.
    assert [list_names(tmp_path / f"node-{rank}") for rank in (0, 1)] == [[], []]
    # A file that only its rank sees is found before the checkpoint has its name.
    said = ranks.call(stale.save_apart, tmp_path / "shared").values
    assert said[0] == said[1]
    assert "__1_0.distcp: rank 1 has written it: No such file" in said[0]
    assert list_names(tmp_path / "shared") == []


def test_a_file_of_another_size_is_not_published(tmp_path, monkeypatch):
    write_shards = directories.write_shards

    def lengthen(path: Path, *arguments: Any) -> Any:
        files = write_shards(path, *arguments)
        with (path / SHARD).open("ab") as file:
            file.write(b"x")
        return files

    monkeypatch.setattr(manifests, "time", Clock())
    monkeypatch.setattr(directories, "write_shards", lengthen)
    with pytest.raises(OSError, match=r"rank 0 has written it: expected \d+ bytes, found \d+: do"):
        write(tmp_path, 1)
    assert list_names(tmp_path) == []


def test_what_cannot_be_removed_is_no_failed_save(tmp_path, monkeypatch, capsys):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with open_directory(tmp_path, keep=1) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", refuse)
            for step in (1, 2, 3):
                directory.start(step, STATE)
            directory.wait()
        (line,) = capsys.readouterr().err.splitlines()
        assert "Directory not empty: it stays there, and saves go on" in line
    found = find_newest(tmp_path, RankGroup())
    assert found.newest is not None and found.newest.path.name == "step-3"
    # The next attempt removes it.
    write(tmp_path, 5, keep=1)
    assert list_names(tmp_path) == ["step-5"]
    # One that stays keeps no older one.
    write(tmp_path, 6, 7)
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (refuse if path.name == "step-7" else rename)(path, to)
    )
    write(tmp_path, 8, keep=1)
    assert list_names(tmp_path) == ["step-7", "step-8"]


def test_a_checkpoint_whose_name_may_not_last_is_older_than_the_next(tmp_path, monkeypatch):
    sync = manifests.sync_directory

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    with open_directory(tmp_path) as directory:
        with monkeypatch.context() as patch:
            patch.setattr(manifests, "sync_directory", fail)
            directory.start(5, STATE)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                directory.wait()
        assert list_names(tmp_path) == ["step-5"]
        directory.start(3, STATE)
        directory.wait()
    found = find_newest(tmp_path, RankGroup()).newest
    assert found is not None and found.path.name == "step-3"
