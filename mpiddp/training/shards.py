"""A checkpoint's tensors, written and read with torch.distributed.checkpoint.

Each file is flushed to the disk, and digested while it is written. Nothing but tensors is stored,
so that nothing has to be unpickled but the list of them; what that may hold is checked.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mpiddp.training.manifest import ALGORITHM, DamageError, File

_METADATA = ".metadata"
_ALLOWED = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)


class _Stream(io.RawIOBase):
    """A file that is digested while it is written, and on the disk once it is closed."""

    def __init__(self, path: Path, files: dict[str, File]) -> None:
        super().__init__()
        self._path = path
        self._files = files
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.new(ALGORITHM)
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            # A raw write may take only a part.
            done += self._file.write(view[done:]) or 0
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
            self._files[self._path.name] = File(self._size, self._digest.hexdigest())
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
        stream = _Stream(Path(path), self.files)
        with stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.files:
            self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Without the path, which changes when the checkpoint is done."""
        return StorageMeta()


def write_shards(
    directory: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[str, File]:
    """Write each tensor once, whichever ranks hold it; returns the files of this rank.

    Collective over ``group``; without one this process is alone. ``directory`` exists and is empty.
    Raises OSError, on all ranks if on any.
    """
    # One thread: torch loses an error of the others.
    writer = _Writer(directory, sync_files=False, thread_count=1, overwrite=False)
    files = writer.fs = _Files()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, failure = next(iter(sorted(error.failures.items())))
            cause = failure[0]
            number = getattr(cause, "errno", None)
            raise OSError(number or 0, f"rank {rank}: {cause}") from None
    return files.files


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only what the list of a checkpoint's tensors is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise DamageError([f"{_METADATA} asks for {module}.{name}, which no checkpoint holds"])


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


def read_metadata(directory: Path) -> Metadata:
    """The list of a checkpoint's tensors. Raises DamageError, and runs nothing that it names."""
    try:
        with (directory / _METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except DamageError:
        raise
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
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in read_metadata(directory).state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(each, TensorStorageMetadata)
    }
    load_shards(directory, found)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def load_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read into these tensors, of which some may be sharded over ranks. Not collective."""
    if not tensors:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=_Reader(directory), no_dist=True)
