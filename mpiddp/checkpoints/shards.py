"""A checkpoint's tensors, written and read with torch.distributed.checkpoint.

Each file is flushed to the disk, and digested while it is written. Nothing but tensors is stored,
so that nothing has to be unpickled but the list of them; what that may hold is checked.
"""

from __future__ import annotations

import bisect
import errno
import hashlib
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from mpiddp.checkpoints import unpickling
from mpiddp.checkpoints.manifest import ALGORITHM, DamageError, File, Patience
from mpiddp.checkpoints.ranks import Ranks
from mpiddp.errors import MpiddpError

BLOCK_BYTES = 1 << 20
"""Smaller parts of a file are gathered before they are written."""
FLUSHED_BYTES = 8 << 20
"""So many are handed to the disk at once."""
_METADATA = ".metadata"


class WriteError(MpiddpError):
    """A checkpoint could not be written, though not because of an OSError; all ranks know."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a checkpoint cannot be written: {reason}")
        self.reason = reason


class _Memory:
    """The memory of tensors that stay as they are until all is written and digested."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        storages = {each.untyped_storage() for each in local if each.device.type == "cpu"}
        self._spans = sorted((each.data_ptr(), each.nbytes()) for each in storages)

    def holds(self, view: memoryview) -> bool:
        """Whether a part of a file is some of this memory: torch writes copies of others."""
        begin = np.frombuffer(view, np.uint8).ctypes.data
        place = bisect.bisect(self._spans, (begin, math.inf)) - 1
        if place < 0:
            return False
        start, size = self._spans[place]
        return begin + len(view) <= start + size


class _Stream(io.RawIOBase):
    """A file that is digested while it is written, and on the disk once it is closed."""

    def __init__(
        self, path: Path, files: dict[str, File], digester: Executor, memory: _Memory
    ) -> None:
        """``files`` gets the file's size and digest, by its name."""
        super().__init__()
        self._path, self._files, self._digester, self._memory = path, files, digester, memory
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.new(ALGORITHM)
        self._digested: list[Future[None]] = []
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
        # torch calls this forty times for each tensor, nearly always with some bytes.
        view = memoryview(data)
        size = view.nbytes
        self._size += size
        if size < BLOCK_BYTES:
            self._small += view
            if len(self._small) >= BLOCK_BYTES:
                self._flush_small()
        else:
            self._flush_small()
            whole = view.cast("B")
            self._put(whole, lasts=self._memory.holds(whole))
        return size

    def _flush_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._put(memoryview(small), lasts=True)

    def _put(self, view: memoryview, *, lasts: bool) -> None:
        # Both let go of the interpreter's lock. Memory that does not last is the caller's again
        # afterwards: wait for both.
        digested = self._digester.submit(self._digest.update, view)
        self._digested.append(digested)
        try:
            done = 0
            while done < len(view):
                # A raw write may take only a part.
                done += self._file.write(view[done:]) or 0
            self._begin_flush(done)
        finally:
            if not lasts:
                digested.result()

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
                for digested in self._digested:
                    digested.result()
                self._files[self._path.name] = File(self._size, self._digest.hexdigest())
            finally:
                self._file.close()
        super().close()


class _Files(FileSystem):
    """torch's file system, whose new files are digested."""

    def __init__(self, digester: Executor, memory: _Memory) -> None:
        self._digester, self._memory = digester, memory
        self.files: dict[str, File] = {}
        """What was written here, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Stream(Path(path), self.files, self._digester, self._memory) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.files:
            self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Without the path, which changes when the checkpoint is done."""
        return StorageMeta()


@contextmanager
def _without_checksums() -> Iterator[None]:
    """torch.save adds CRC-32 checksums, which take longer than the digest."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def write_shards(
    directory: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> list[dict[str, File]]:
    """Write each tensor once, whichever ranks hold it; returns every rank's files, on rank 0.

    ``directory`` is made. Collective. Raises, on all ranks if on any, OSError, or WriteError for
    whatever else fails.
    """
    writer = _Writer(directory, sync_files=False, overwrite=False)
    planner = DefaultSavePlanner()
    problem = attempt(lambda: directory.mkdir(parents=True)) if ranks.rank == 0 else None
    raise_first([ranks.broadcast(problem)])
    plan, metadata = _make_plan(writer, planner, tensors, ranks)
    with ThreadPoolExecutor(1, "mpiddp-digest") as digester, _without_checksums():
        files = writer.fs = _Files(digester, _Memory(tensors.values()))
        results: Any = []

        def write() -> None:
            results.extend(writer.write_data(planner.finish_plan(plan), planner).value())

        problem = attempt(write)
        raise_first(ranks.gather(problem))
        written = ranks.collect(results)
        if ranks.rank == 0:
            problem = attempt(lambda: writer.finish(metadata, written))
        raise_first([ranks.broadcast(problem)])
    return ranks.collect(files.files)


def _make_plan(
    writer: _Writer,
    planner: DefaultSavePlanner,
    tensors: Mapping[str, torch.Tensor],
    ranks: Ranks,
) -> tuple[Any, Any]:
    """What this rank is to write; and on rank 0 the list of all tensors. Collective."""
    local, made = list[Any](), list[Any]()

    def make_local_plan() -> None:
        planner.set_up_planner(dict(tensors), StorageMeta(), ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))

    problem = attempt(make_local_plan)
    found = ranks.collect((problem, local))
    problems = [each for each, _ in found]

    def make_global_plan() -> None:
        plans, metadata = planner.create_global_plan([plan for _, (plan,) in found])
        made.extend((writer.prepare_global_plan(plans), metadata))

    if ranks.rank == 0 and not any(problems):
        problems = [attempt(make_global_plan)]
    raise_first(ranks.broadcast(problems))
    plans, metadata = made or ([], None)
    return ranks.scatter(plans), metadata


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
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return error.errno or errno.EIO, f"{named}{error.strerror or error}"
    return 0, f"{type(error).__name__}: {' '.join(str(error).split())}"


def raise_first(problems: list[Problem | None]) -> None:
    """Raise OSError or WriteError for the lowest rank that has a problem; return if none has.

    ``problems``: what ``attempt`` returned on each rank, in the order of ranks.
    """
    for rank, problem in enumerate(problems):
        if problem is None:
            continue
        number, text = problem
        if number:
            raise OSError(number, f"rank {rank}: {text}")
        raise WriteError(f"rank {rank}: {text}")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


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
    except Exception as error:
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
    reader, planner = _Reader(directory), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    plan = planner.finish_plan(plan)
    Patience().read(lambda: reader.read_data(plan, planner).wait())
