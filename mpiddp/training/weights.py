"""Weights for others, and a digest of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from mpiddp.checkpoints.plain_weights import read_weights, write_weights
from mpiddp.checkpoints.storage.directory import Written
from mpiddp.checkpoints.storage.finding import Found
from mpiddp.checkpoints.storage.manifest import read_manifest
from mpiddp.training.options.groups.checkpoints import STEP
from mpiddp.training.preparation import Training
from mpiddp.training.reports import say
from mpiddp.training.step.sharded_tensors import collect


def export_trained(training: Training, step: int) -> str:
    """Write the weights to predict with to the options' file, if they name one; collective.

    ``step``: the last one. Returns, on all ranks, why they cannot be written; empty if they are.
    """
    if training.configuration.export is None:
        return ""
    path = _name_file(training.configuration.export, step)
    problem = None
    try:
        with training.engine.at_average():
            export_weights(training.engine.module, path, training.session.world.rank)
    except OSError as error:
        problem = error.strerror
    # Rank 0 may take longer than a collective call may.
    training.session.meet()
    if problem := training.session.broadcast(problem):
        return f"export: cannot write {path}: {problem}"
    say(training.session, f"Weights written: {path}")
    return ""


def export_weights(model: nn.Module, path: Path, rank: int) -> None:
    """Write the whole model's ``state_dict``, on the CPU, on rank 0; collective. Raises OSError."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if rank == 0:
        write_weights(path, weights)


def export_saved(written: Written, path: Path) -> str:
    """Write the weights to predict with of a checkpoint that is on the disk, in any thread.

    Returns the console's line, also for an error: the checkpoint stays as it is.
    """
    path = _name_file(path, written.step)
    try:
        found = Found(written.path, read_manifest(written.path))
        write_weights(path, read_weights(found))
    except Exception as error:  # Training goes on, whatever it is.
        reason = error.strerror or error if isinstance(error, OSError) else repr(error)
        return f"mpiddp: export: cannot write {path}: {reason}; training goes on"
    return f"Weights written: {path}"


def _name_file(path: Path, step: int) -> Path:
    return path.with_name(path.name.replace(STEP, str(step)))


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 over the bytes of all parameters and buffers, in their order.

    Collective if they are sharded.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole: Any = collect(tensor.detach()).cpu().contiguous()
        digest.update(whole.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
