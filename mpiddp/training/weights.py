"""Weights for others, and a digest of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from mpiddp.checkpoints.finding import find_demanded, find_newest
from mpiddp.checkpoints.packing import is_structure
from mpiddp.checkpoints.ranks import Ranks
from mpiddp.checkpoints.shards import read_shards
from mpiddp.errors import ConfigurationError
from mpiddp.training.preparation import Training
from mpiddp.training.reports import say
from mpiddp.training.run_directory import CHECKPOINTS
from mpiddp.training.sharded_tensors import collect

AVERAGE = "average.weights."
"""The moving average in a checkpoint: the weights to predict with, where there is one."""


def export_trained(training: Training) -> None:
    """Write the weights to predict with where the options say; collective.

    Raises ConfigurationError on all ranks where they cannot be written.
    """
    path = training.configuration.export
    if path is None:
        return
    problem = None
    try:
        with training.engine.at_average():
            export_weights(training.engine.module, path, training.session.world.rank)
    except OSError as error:
        problem = error.strerror
    # Rank 0 may take longer than a collective call may.
    training.session.meet()
    if problem := training.session.broadcast(problem):
        raise ConfigurationError(f"export: cannot write {path}: {problem}")
    say(training.session, f"Weights written: {path}")


def export_weights(model: nn.Module, path: Path, rank: int) -> None:
    """Write the whole model's ``state_dict``, on the CPU, on rank 0; collective.

    ``torch.load(path, weights_only=True)`` reads it. Nobody sees half of the file. Raises OSError.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if rank != 0:
        return
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("wb") as file:
            torch.save(dict(weights), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 over the bytes of all parameters and buffers, in their order.

    Collective where they are sharded.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole: Any = collect(tensor.detach()).cpu().contiguous()
        digest.update(whole.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def load_weights(model: nn.Module, path: Path) -> None:
    """Have ``model`` go by the weights of a file, a checkpoint, or a run's newest one; collective.

    Raises ConfigurationError where they do not fit, CheckpointError where none can be used.
    """
    weights = _read_directory(path) if path.is_dir() else _read_file(path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).partition("\n\t")[2].partition("\n")[0]
        raise ConfigurationError(
            f"weights: {path} is of another model than {type(model).__name__}: {first}"
        ) from None


def _read_file(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigurationError(f"weights: cannot read {path}: {error.strerror}") from None
    except Exception:  # torch raises many types for a file that torch.save has not written.
        raise ConfigurationError(
            f"weights: expected a file of tensors alone, as --export writes it, found {path}"
        ) from None
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            f"weights: expected a state_dict in {path}, found {type(found).__name__}"
        )
    return found


def _read_directory(path: Path) -> Mapping[str, torch.Tensor]:
    ranks = Ranks()
    try:
        if path.name.startswith("step-"):
            survey = find_demanded(path, ranks)
        else:
            folder = path / CHECKPOINTS
            survey = find_newest(folder if folder.is_dir() else path, ranks)
    finally:
        ranks.close()
    if survey.newest is None:
        raise ConfigurationError(f"weights: there is no checkpoint in {path}")
    found = read_shards(survey.newest.path, "model.")
    found |= read_shards(survey.newest.path, AVERAGE)
    return {name: each for name, each in found.items() if not is_structure(name)}
