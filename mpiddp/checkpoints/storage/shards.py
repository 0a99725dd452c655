"""A checkpoint's tensors, written and read with torch.distributed.checkpoint.

Each file is flushed to the disk, and digested while it is written. Nothing but tensors is stored,
so that nothing has to be unpickled but the list of them; what that may hold is checked.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from mpiddp.checkpoints.storage import unpickling
from mpiddp.checkpoints.storage.manifest import DamageError, File, Patience, make_digest
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.errors import MpiddpError
from mpiddp.files import find_cause
from mpiddp.torch_internals import find_record
from mpiddp.wording import describe_error

BLOCK_BYTES = 1 << 20
"""Smaller parts of a file are gathered before they are written."""
FLUSHED_BYTES = 8 << 20
"""So many are handed to the disk at once."""
_METADATA = ".metadata"


class WriteError(MpiddpError):
    """A checkpoint could not be written, though not because of an OSError; all ranks know."""


class _Stream(io.RawIOBase):
    """A file that is digested while it is written, and on the disk once it is closed."""

    def __init__(self, path: Path, files: dict[str, File]) -> None:
        """``files`` gets the file's size and digest, by its name."""
        super().__init__()
        self._path, self._files = path, files
        self._file = path.open("wb", buffering=0)
        self._digest = make_digest()
        self._size = 0
        self._unflushed = 0
        """Bytes since the last advice to the kernel."""
        self._small = bytearray()
        """What was written in small parts and is not in the file yet."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data)
        size = view.nbytes
        self._size += size
        if size < BLOCK_BYTES:
            self._small += view
            if len(self._small) >= BLOCK_BYTES:
                self._flush_small()
        else:
            self._flush_small()
            self._put(view.cast("B"))
        return size

    def _flush_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._put(memoryview(small))

    def _put(self, view: memoryview) -> None:
        # A block that was just digested is still in the processor's cache.
        for begin in range(0, len(view), BLOCK_BYTES):
            block = view[begin : begin + BLOCK_BYTES]
            self._digest.update(block)
            done = 0
            while done < len(block):
                # A raw write may take only a part.
                done += self._file.write(block[done:]) or 0
            self._begin_flush(done)

    def _begin_flush(self, written: int) -> None:
        """Have the disk begin while more is written; ``close`` then waits for less."""
        self._unflushed += written
        if self._unflushed < FLUSHED_BYTES:
            return
        begin = self._file.tell() - self._unflushed
        # Linux begins to write such pages. It is advice: whether it worked, fsync says.
        with suppress(OSError):
            advice = os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self._file.fileno(), begin, self._unflushed, advice)
        self._unflushed = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._flush_small()
                os.fsync(self._file.fileno())
                self._files[self._path.name] = File(self._size, self._digest.hexdigest())
            finally:
                self._file.close()
        super().close()


class _Files(FileSystem):
    """torch's file system, whose new files are digested."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        """What was written here, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Stream(Path(path), self.files) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.files:
            self.files[Path(new_path).name] = self.files.pop(Path(path).name)


Frames: TypeAlias = dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]]
"""What ``torch.save`` writes before and after a tensor's bytes, by its type and shape."""


class _Writer(FileSystemWriter):
    """torch's writer, which takes less time for small tensors."""

    def storage_meta(self) -> StorageMeta:
        """Without the path, which changes when the checkpoint is done."""
        return StorageMeta()

    def write(
        self, plan: SavePlan, planner: DefaultSavePlanner, frames: Frames
    ) -> list[WriteResult]:
        """Write this rank's tensors into a file, each in the format of ``torch.save``."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        # Rank 0 has made it: on a host that does not share it, rank 0 will miss the file.
        self.fs.mkdir(self.path)
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                tensor: Any = planner.resolve_data(item)
                _write_tensor(stream, tensor.detach().cpu(), frames)
                size = stream.tell() - begin
                results.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
        return results


def _write_tensor(stream: Any, tensor: torch.Tensor, frames: Frames) -> None:
    """``torch.save`` takes 0.1 ms: small tensors get what it writes around others of their kind."""
    tensor = _lay_flat(tensor)
    if tensor.nbytes >= BLOCK_BYTES:
        # All of a storage would be written.
        is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
        torch.save(tensor.clone() if is_part else tensor, stream)
        return
    kind = tensor.dtype, tensor.shape
    if kind not in frames:
        frames[kind] = _make_frame(tensor.clone())
    before, after = frames[kind]
    content: Any = tensor.view(-1).view(torch.uint8).numpy()
    stream.write(b"".join((before, content, after)))


def _lay_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as they are written: one after the other."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def _make_frame(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    begin = find_record(file, "data/0")
    content = file.getvalue()
    return content[:begin], content[begin + tensor.nbytes :]


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save adds CRC-32 checksums, which take longer than the digest."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def join_equal(tensors: Mapping[str, torch.Tensor], ranks: RankGroup) -> dict[str, torch.Tensor]:
    """Rename what is equal on all ranks, so that it is written once. Collective."""
    prefix = f"rank-{ranks.rank}."
    own = {name: _digest(each) for name, each in tensors.items() if name.startswith(prefix)}
    found = ranks.gather({name.removeprefix(prefix): each for name, each in own.items()})
    equal = {
        name for name, digest in found[0].items() if all(each.get(name) == digest for each in found)
    }
    return {
        short if (short := name.removeprefix(prefix)) in equal else name: each
        for name, each in tensors.items()
    }


def count_bytes(tensors: Mapping[str, torch.Tensor], rank: int) -> int:
    """What this rank adds to a checkpoint; what all ranks hold is rank 0's. About: no headers."""
    size = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            size += tensor.to_local().nbytes
        elif rank == 0 or name.startswith(f"rank-{rank}."):
            size += tensor.nbytes
    return size


def _digest(tensor: torch.Tensor) -> str:
    """Of a tensor: its type, shape and bytes."""
    found = make_digest()
    found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    whole: Any = _lay_flat(tensor.detach().cpu()).view(-1).view(torch.uint8)
    found.update(whole.numpy())
    return found.hexdigest()


def write_shards(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    ranks: RankGroup,
    frames: Frames,
    interrupted: threading.Event,
) -> list[dict[str, File]]:
    """Write each tensor once, whichever ranks hold it; returns every rank's files, on rank 0.

    ``directory`` is made; its parent is there. ``frames``: to be given again the next time, which
    saves their making.
    ``interrupted``: set if the tensors may have changed meanwhile.
    Collective. Raises, on all ranks if on any, OSError, or WriteError for whatever else fails.
    """
    writer, planner = _Writer(directory, sync_files=False), DefaultSavePlanner()
    files = writer.fs = _Files()
    plan, metadata = _make_plan(writer, planner, tensors, ranks)
    results = list[Any]()

    def write() -> None:
        results.extend(writer.write(planner.finish_plan(plan), planner, frames))
        if interrupted.is_set():
            raise OSError(errno.EINTR, "interrupted before its tensors were written")

    def finish() -> None:
        writer.finish(metadata, [written for _, written, _ in found])

    with _without_checksums():
        problem = attempt(write)
    found = ranks.collect((problem, results, files.files))
    problems = [each for each, _, _ in found]
    if ranks.rank == 0 and not any(problems):
        problems = [attempt(finish)]
    raise_first(ranks.broadcast(problems))
    # Rank 0 has written one more file since.
    return [files.files, *(each for _, _, each in found[1:])] if found else []


def _make_plan(
    writer: _Writer,
    planner: DefaultSavePlanner,
    tensors: Mapping[str, torch.Tensor],
    ranks: RankGroup,
) -> tuple[Any, Any]:
    """What this rank is to write; and on rank 0 the list of all tensors. Collective."""
    local, made = list[Any](), list[Any]()

    def make_local_plan() -> None:
        planner.set_up_planner(dict(tensors), StorageMeta(), ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        local.append(planner.create_local_plan())

    problem = attempt(make_local_plan)
    found = ranks.collect((problem, local))
    problems = [each for each, _ in found]

    def make_global_plan() -> None:
        Path(writer.path).mkdir()
        plans, metadata = planner.create_global_plan([plan for _, (plan,) in found])
        made.extend((writer.prepare_global_plan(plans), metadata))

    if ranks.rank == 0 and not any(problems):
        problems = [attempt(make_global_plan)]
    plans, metadata = made or ([None] * ranks.size, None)
    problems, plan = ranks.scatter([(problems, each) for each in plans])
    raise_first(problems)
    return plan, metadata


Problem: TypeAlias = tuple[int, str]
"""The number and text of an OSError; 0 and the text of another error."""


def attempt(work: Callable[[], object]) -> Problem | None:
    """What goes wrong with ``work``."""
    try:
        work()
    except Exception as error:  # Other ranks wait for an answer, whatever it is.
        return describe_failure(error)
    return None


def describe_failure(error: Exception) -> Problem:
    # On a full disk torch has an error of its own.
    cause, host = find_cause(error), socket.gethostname()
    if cause is not None:
        return cause.errno or errno.EIO, f"{host}: {describe_error(cause)}"
    return 0, f"{host}: {type(error).__name__}: {' '.join(str(error).split())}"


def raise_first(problems: list[Problem | None]) -> None:
    """Raise OSError or WriteError for the lowest rank that has a problem; return if none has.

    ``problems``: what ``attempt`` returned on each rank, in the order of ranks.
    """
    for rank, problem in enumerate(problems):
        if problem is None:
            continue
        number, text = problem
        if number:
            raise OSError(number, f"rank {rank} on {text}")
        raise WriteError(f"rank {rank} on {text}")


def read_metadata(directory: Path) -> Metadata:
    """The list of a checkpoint's tensors; nothing that it names is run.

    Raises DamageError, or OSError if it cannot be read.
    """
    content = Patience().read((directory / _METADATA).read_bytes)
    try:
        metadata = unpickling.load(content)
    except unpickling.ForbiddenError as error:
        problem = f"{_METADATA} asks for {error}, which no checkpoint holds"
        raise DamageError([problem]) from None
    except Exception as error:  # Damaged bytes raise anything.
        raise DamageError([f"{_METADATA} cannot be read: {error!r}"]) from None
    if not isinstance(metadata, Metadata):
        raise DamageError([f"{_METADATA} holds {type(metadata).__name__}"])
    return metadata


def read_shards(directory: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with ``prefix``, on the CPU, by the rest of their names.

    Not collective. Verify the files first.
    """
    found = {
        name: torch.empty(each.shape, dtype=each.dtype)
        for name, each in list_stored(directory).items()
        if name.startswith(prefix)
    }
    load_shards(directory, found)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint; of a sharded one, the whole."""

    shape: torch.Size
    dtype: torch.dtype


def list_stored(directory: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint by name. Raises DamageError."""
    return {
        name: Stored(each.size, each.properties.dtype)
        for name, each in read_metadata(directory).state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }


def load_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read into these tensors, of which some may be sharded over ranks. Not collective.

    Raises OSError if the files cannot be read for a while.
    """
    if not tensors:
        return
    reader, planner = FileSystemReader(directory), DefaultLoadPlanner()
    # Not torch's own way to read it, which unpickles whatever is there.
    metadata = read_metadata(directory)
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    plan = planner.finish_plan(plan)
    Patience().read(lambda: reader.read_data(plan, planner).wait())
