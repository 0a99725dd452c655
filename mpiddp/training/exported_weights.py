"""Trained weights in a file for other programs, and a digest of them."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from mpiddp.checkpoints.plain_weights import read_weights, write_weights
from mpiddp.checkpoints.storage.directory import Written
from mpiddp.checkpoints.storage.finding import Found
from mpiddp.checkpoints.storage.manifest import read_manifest
from mpiddp.files import replaced
from mpiddp.training.options.groups.checkpoints import PLACES, has_places
from mpiddp.training.preparation import Training
from mpiddp.training.resuming import read_position
from mpiddp.training.run_output import say
from mpiddp.training.run_state import Position
from mpiddp.training.step.sharded_tensors import collect


class Exports:
    """The files of ``--export``. If its name has places, ``latest.pt`` leads to the newest."""

    def __init__(self, named: Path) -> None:
        self.named = named
        self._lock = threading.Lock()
        self._newest = -1
        """The step of the file that ``latest.pt`` leads to."""

    def name_file(self, position: Position) -> Path:
        name = self.named.name
        for place, value in zip(PLACES, (position.last_epoch, position.step), strict=True):
            name = name.replace(place, str(value))
        return self.named.with_name(name)

    def describe(self, path: Path, step: int) -> str:
        """The console's line about a file that is written now."""
        line = f"Weights written: {path}"
        latest = path.with_name(f"latest{path.suffix}")
        with self._lock:  # At the end the last checkpoint may still be written beside the training.
            if not has_places(self.named) or step < self._newest:
                return line
            self._newest = step
            try:
                if latest.exists() and not latest.is_symlink():
                    return f"{line} ({latest} is a file of its own, and left alone)"
                with replaced(latest) as link:
                    link.symlink_to(path.name)
            except OSError as error:
                return f"{line} ({latest} cannot be made: {error.strerror})"
        return f"{line}, also as {latest}"


def export_trained(training: Training, exports: Exports, position: Position) -> str:
    """Write the weights to predict with, once training is over; collective.

    Returns on all ranks why they could not be written; empty if they were.
    """
    path, problem = exports.name_file(position), None
    try:
        with training.engine.at_average():
            export_weights(training.engine.module, path, training.session.world.rank)
    except OSError as error:
        problem = error.strerror
    # Rank 0 may take longer than a collective call may.
    training.session.meet()
    if problem := training.session.broadcast(problem):
        return f"export: cannot write {path}: {problem}"
    if training.session.world.rank == 0:
        say(training.session, exports.describe(path, position.step))
    return ""


def export_weights(model: nn.Module, path: Path, rank: int) -> None:
    """Write the whole model's ``state_dict``, on the CPU, on rank 0; collective. Raises OSError."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if rank == 0:
        write_weights(path, weights)


def export_saved(written: Written, exports: Exports) -> str:
    """Write the weights of a checkpoint that is on the disk, to predict with; in any thread.

    Returns the console's line, also for an error: the checkpoint stays as it is.
    """
    path = exports.named
    try:
        found = Found(written.path, read_manifest(written.path))
        path = exports.name_file(read_position(found))
        write_weights(path, read_weights(found))
    except Exception as error:  # Training goes on after any error.
        reason = error.strerror or error if isinstance(error, OSError) else repr(error)
        return f"mpiddp: export: cannot write {path}: {reason}; training goes on"
    return exports.describe(path, written.step)


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
