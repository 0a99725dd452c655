"""Unpickles only what checkpoints, and the messages of ranks that write one, are made of.

A pickle can name any function, which is called with arguments from the pickle. Here the name of
any other than these is an error before it is called.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

import torch

_CHECKPOINT = "torch.distributed.checkpoint"
_NAMES = {
    f"{_CHECKPOINT}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    f"{_CHECKPOINT}.storage": ("WriteResult",),
    "mpiddp.checkpoints.storage.manifest": ("File",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
}
ALLOWED = frozenset((module, name) for module, names in _NAMES.items() for name in names)


class ForbiddenError(pickle.UnpicklingError):
    """A pickle names what it must not."""


def _find_member(kind: Any, name: Any) -> Enum:
    """In place of getattr, with which Python 3.11.0 to 3.11.3 pickle an enumeration's members."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise ForbiddenError("builtins.getattr")
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _find_member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ForbiddenError(f"{module}.{name}")


def load(content: bytes | memoryview) -> Any:
    """The value of a pickle. Raises ForbiddenError, and runs nothing that it names."""
    return _Unpickler(io.BytesIO(content)).load()
