"""Plain weights: a model's tensors by name, in one file, as other programs read and write them.

``.safetensors`` is what the safetensors library writes, any other file what ``torch.save`` does.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpiddp.checkpoints.packing import unpack
from mpiddp.checkpoints.state import clean_name
from mpiddp.checkpoints.storage.finding import Found, find_valid, read_together
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import read_shards
from mpiddp.errors import ConfigurationError
from mpiddp.files import find_cause, replaced
from mpiddp.wording import count_noun

SAFETENSORS = ".safetensors"
AVERAGE = "average.weights."
"""The moving average in a checkpoint: the weights to predict with, if there is one."""
WRAPPERS = ("model_state_dict", "state_dict", "model")
"""Usual names of the entry that is a model's state_dict beside other things."""
REPLICA = "module"
"""What the names in a DistributedDataParallel's state_dict begin with."""
LISTED = 3
"""Names in a message."""


@dataclass(frozen=True)
class WeightSelection:
    """Which tensors of a file become a model's."""

    prefix: str = ""
    """Those below this prefix only, without it."""
    skipped: tuple[str, ...] = ()
    """Patterns of names, as in a shell, that are not taken, and need not be there."""

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.skipped)


def check_format(path: Path, option: str) -> None:
    """Raise ConfigurationError if the file's format needs a library that is not installed."""
    if path.suffix == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise ConfigurationError(
            f"{option}: {path} needs the library safetensors: pip install 'mpiddp[safetensors]'"
        )


def load_weights(model: nn.Module, path: Path, selection: WeightSelection) -> str:
    """Give a plain ``model`` the weights of a file, a checkpoint, or a run's newest one.

    Collective; all ranks read. Draws no random numbers. Returns a line that says what was taken.

    Raises ConfigurationError if they do not fit, CheckpointError if no checkpoint can be used.
    """
    source = _read_directory(path) if path.is_dir() else read_file(path)
    expected = {name: each for name, each in model.state_dict().items() if _is_kept(name, each)}
    chosen = _choose(source, selection.prefix, expected)
    _check_fit(chosen, expected, path, selection, type(model).__name__)
    taken = {name: each for name, each in chosen.items() if not selection.skips(name)}
    try:
        model.load_state_dict(taken, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"weights: {path} cannot be used: {reason}") from None
    new = [name for name in expected if name not in taken]
    kept = f"; as the model has them: {_list(new)}" if new else ""
    count = count_noun(len(taken), "tensor")
    return f"Weights taken from {source.path}{source.note}: {count}{kept}"


@dataclass(frozen=True)
class StoredWeights:
    """What was read from a file or a checkpoint."""

    path: Path
    tensors: Mapping[str, Any]
    """On the CPU, by name; those of nested entries by names with dots."""
    wrapper: str = ""
    """The entry in which a script keeps the model's state_dict beside other things."""
    note: str = ""
    """Why it is not the newest checkpoint, if it is not."""


def read_file(path: Path) -> StoredWeights:
    """The tensors of a file. Nothing that it names is run. Raises ConfigurationError."""
    check_format(path, "weights")
    found: Any
    try:
        if path.suffix == SAFETENSORS:
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigurationError(
            f"weights: cannot read {path}: {error.strerror or error}"
        ) from None
    except Exception as error:  # Both libraries raise many types for files of other programs.
        raise ConfigurationError(_describe_other(path, error)) from None
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            f"weights: expected a state_dict in {path}, found {type(found).__name__}"
        )
    wrapper = next((each for each in WRAPPERS if isinstance(found.get(each), Mapping)), "")
    return StoredWeights(path, dict(_flatten(found, "")), wrapper)


def _describe_other(path: Path, error: Exception) -> str:
    """What to say of a file that neither library can read as tensors."""
    if path.suffix == SAFETENSORS:
        reason = " ".join(str(error).split())
        return f"weights: expected a file of the library safetensors, found {path}: {reason}"
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is None:
        return (
            f"weights: expected a file of tensors alone, as --export and torch.save write it, "
            f"found {path}"
        )
    return (
        f"weights: expected a file of tensors alone, found {named[1]} in {path}: write it with "
        "torch.save(model.state_dict(), path)"
    )


def _flatten(entries: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, each in entries.items():
        name = f"{prefix}{key}"
        if isinstance(each, Mapping):
            yield from _flatten(each, f"{name}.")
        elif _is_kept(name, each):
            yield name, each


def _is_kept(name: str, value: object) -> bool:
    """Whether it is a tensor, or what `torch.nn.Module.get_extra_state` has returned."""
    return isinstance(value, torch.Tensor) or name.endswith("_extra_state")


def _read_directory(path: Path) -> StoredWeights:
    """The newest valid checkpoint there, and its weights. Collective."""
    ranks = RankGroup()
    try:
        newest, found = find_valid(path, ranks)
        weights = read_together(newest, ranks, lambda: read_weights(newest))
        damaged = _list([each.name for each in found])
        return StoredWeights(newest.path, weights, note=f" ({damaged}: damaged)" if damaged else "")
    finally:
        ranks.close()


def read_weights(found: Found, *, is_raw: bool = False) -> dict[str, Any]:
    """The weights of a verified checkpoint, on the CPU. Not collective.

    They are the moving average, if it has one, unless ``is_raw``.
    """
    weights: dict[str, Any] = unpack(read_shards(found.path, "model."))
    if not is_raw:
        weights |= read_shards(found.path, AVERAGE)
    return weights


def _choose(source: StoredWeights, prefix: str, expected: Collection[str]) -> Mapping[str, Any]:
    """The tensors to take, by the names that a plain model gives them.

    Raises ConfigurationError if there are none.
    """
    inner = _take(source.tensors, source.wrapper) if source.wrapper else source.tensors
    chosen = inner
    if prefix:
        chosen = _take(source.tensors, prefix) or _take(inner, prefix)
        if not chosen:
            raise ConfigurationError(
                f"weights_prefix: no tensor of {source.path} is below {prefix!r}; it has "
                f"{_list(list(inner)) or 'none'}"
            )
    chosen = {clean_name(name): each for name, each in chosen.items()}
    start = f"{REPLICA}."
    is_replica = all(name.startswith(start) for name in chosen)
    is_own = any(name.startswith(start) for name in expected)
    return _take(chosen, REPLICA) if is_replica and not is_own else chosen


def _take(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What is below a prefix, without it."""
    start = f"{prefix.rstrip('.')}."
    return {
        name.removeprefix(start): each for name, each in found.items() if name.startswith(start)
    }


def _check_fit(
    chosen: Mapping[str, Any],
    expected: Mapping[str, Any],
    path: Path,
    selection: WeightSelection,
    model: str,
) -> None:
    """Raise ConfigurationError, with names, unless the tensors are those of the model."""
    for pattern in selection.skipped:
        if not any(fnmatchcase(name, pattern) for name in [*chosen, *expected]):
            raise ConfigurationError(
                f"weights_except: {pattern!r} matches no tensor of {path} and none of the model, "
                f"which has {_list(list(expected))}"
            )
    needed = [name for name in expected if not selection.skips(name)]
    offered = [name for name in chosen if not selection.skips(name)]
    missing = [name for name in needed if name not in chosen]
    unexpected = [name for name in offered if name not in expected]
    sizes = {
        name: (_measure(expected[name]), _measure(chosen[name]))
        for name in needed
        if name in chosen and not is_lazy(expected[name])
    }
    others = {
        name: f"{name} (expected {here}, found {there})"
        for name, (here, there) in sizes.items()
        if here != there
    }
    if not (missing or unexpected or others) and offered:
        return
    parts = {"missing": missing, "unexpected": unexpected, "other shapes:": list(others.values())}
    said = "; ".join(f"{what} {_list(names)}" for what, names in parts.items() if names)
    said = said or "no tensor is left to take"
    advice = _advise([*missing, *unexpected, *others], chosen, needed)
    raise ConfigurationError(f"weights: {path} is of another model than {model}: {said}{advice}")


def _advise(misfits: Iterable[str], chosen: Mapping[str, Any], needed: list[str]) -> str:
    """What to type: a prefix that all names have in the file, or patterns of what does not fit."""
    first = needed[0] if needed else ""
    for name in chosen if first else ():
        prefix = name.removesuffix(f".{first}")
        if prefix != name and all(f"{prefix}.{each}" in chosen for each in needed):
            return f": give --weights-prefix {prefix}"
    patterns = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in misfits})
    rest = WeightSelection(skipped=tuple(patterns))
    is_some_left = any(name in chosen and not rest.skips(name) for name in needed)
    if len(patterns) > LISTED or not is_some_left:
        return ""
    return f": to train without these, give --weights-except {','.join(patterns)!r}"


def _measure(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _list(names: list[str]) -> str:
    """The first names, and how many there are."""
    shown = ", ".join(names[:LISTED])
    return f"{shown}, … ({len(names)} in all)" if len(names) > LISTED else shown


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write tensors on the CPU, by name, to one file, which replaces one that is there.

    Nobody sees half of the file. ``torch.load(path, weights_only=True)``, or for ``.safetensors``
    ``safetensors.torch.load_file(path)``, reads it. Raises UnwritableError.
    """
    tensors = [each for each in weights.values() if isinstance(each, torch.Tensor)]
    with replaced(path, sum(each.nbytes for each in tensors)) as temporary:
        try:
            _write(temporary, weights, is_safe=path.suffix == SAFETENSORS)
        except Exception as error:
            # Both libraries have errors of their own for a disk that is full.
            if find_cause(error) is not None:
                raise
            reason = " ".join(str(error).split())
            found = re.search(r"\(os error (\d+)\)", reason)
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number) if found else reason) from None


def _write(path: Path, weights: Mapping[str, Any], *, is_safe: bool) -> None:
    if is_safe:
        from safetensors.torch import save_file

        tensors = {name: each for name, each in weights.items() if isinstance(each, torch.Tensor)}
        path.touch()
        mode = path.stat().st_mode
        # The library refuses tensors that share memory, as tied ones do, or have gaps.
        copies = {
            name: each.clone(memory_format=torch.contiguous_format)
            for name, each in tensors.items()
        }
        save_file(copies, path, {"format": "pt"})
        # It replaces the file by one that nobody else can read.
        path.chmod(mode)
    with path.open("ab") as file:
        if not is_safe:
            torch.save(dict(weights), file)
            file.flush()
        os.fsync(file.fileno())
