"""All that a run's future depends on, as tensors for a checkpoint, and back.

``model.``            parameters, and rank 0's buffers
``optimizer.``        with the weights' moving average and the loss scale; where every rank has the
                      same, else ``server-<n>.``, each server's own
``progress.``         how far the run is
``rank-<r>.``         what differs between ranks: random generators, buffers, sums of the epoch

The learning rate is a function of the step, and the order of samples one of seed, epoch and
position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from mpiddp.errors import CheckpointError
from mpiddp.training.checkpoint import Found
from mpiddp.training.config import Configuration
from mpiddp.training.metrics import Row, Totals
from mpiddp.training.packing import pack, unpack
from mpiddp.training.preparation import Training
from mpiddp.training.random_state import mix_seed, read_generators, seed_generators, set_generators
from mpiddp.training.shards import load_into, read_shapes, read_shards
from mpiddp.training.stages import Costs


@dataclass(frozen=True)
class Position:
    """Between two steps."""

    epoch: int = 1
    """The one that the next step belongs to, counted from 1."""
    samples: int = 0
    """Of the epoch, that all ranks together have trained on."""
    step: int = 0
    """Steps taken so far."""
    row: Row | None = None
    """Of the last epoch, where the next one has not begun."""


@dataclass
class EpochTotals:
    """Sums of the epoch so far, of one rank."""

    totals: Totals
    seconds: float = 0.0
    """Since the epoch began, without the time between two attempts."""
    costs: Costs = field(default_factory=Costs)

    @classmethod
    def make(cls, training: Training) -> EpochTotals:
        """Zeros, on the training's device."""
        return cls(Totals(training.session.device, training.task.metrics))


def name_values(configuration: Any) -> dict[str, Any]:
    """The options, as JSON can hold them."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(configuration), default=str))
    return values


def capture(training: Training, position: Position, epoch: EpochTotals) -> dict[str, torch.Tensor]:
    """The state between two steps. The tensors are the run's own, not copies."""
    session = training.session
    is_first = session.world.rank == 0
    module = training.engine.module
    weights = pack(dict(module.state_dict()))
    shared = {name for name, _ in module.named_parameters()}
    parts = {"model": weights if is_first else _select(weights, shared)}
    state = training.engine.update.read_state()
    if state is not None:
        name, held = state
        packed = pack(held)
        parts[name] = packed
    if is_first:
        parts["progress"] = pack(asdict(position))
    own = {
        "buffers": {} if is_first else dict(module.named_buffers()),
        "random": read_generators(session.device),
        "sums": epoch.totals.sums,
        "metrics": list(training.task.metrics),
        "seconds": epoch.seconds,
        "costs": asdict(epoch.costs),
    }
    parts[f"rank-{session.world.rank}"] = pack(own)
    return {f"{part}.{name}": each for part, found in parts.items() for name, each in found.items()}


def _select(tensors: Mapping[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if name in names}


@dataclass(frozen=True)
class Restored:
    position: Position
    epoch: EpochTotals


def read_position(found: Found) -> Position:
    """How far the run was. Not collective. Raises CheckpointError."""
    with _named(found):
        values = unpack(read_shards(found.path, "progress."))
        row = values.pop("row")
        return Position(**values, row=None if row is None else Row(**row))


def restore(training: Training, found: Found, position: Position) -> Restored:
    """Bring the training to a checkpoint's state. Not collective. Raises CheckpointError.

    ``position``: what `read_position` returned.
    """
    with _named(found):
        return _restore(training, found, position)


@contextmanager
def _named(found: Found) -> Iterator[None]:
    """Turn whatever torch raises for shapes, names and contents into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {found.path} does not fit this training: {error}"
        ) from error


def _restore(training: Training, found: Found, position: Position) -> Restored:
    session = training.session
    rank, device = session.world.rank, session.device
    is_same_world = found.manifest.world == session.world.size

    def read(part: str) -> Any:
        return unpack(load_into(found.path, f"{part}.", _find_targets(training, found, part)))

    module = training.engine.module
    module.load_state_dict(read("model"))
    training.engine.update.load_state(
        read, training.find_rate_step(position.epoch, position.samples)
    )
    epoch = EpochTotals.make(training)
    if is_same_world:
        own = read(f"rank-{rank}")
        _copy_buffers(module, own["buffers"])
        set_generators(own["random"], device)
        if _check_sums(training, found, position, own):
            epoch.totals.sums = own["sums"]
        epoch.seconds, epoch.costs = own["seconds"], Costs(**own["costs"])
    else:
        # No rank has gone on from another's random state, and none repeats what it has drawn.
        seed_generators(mix_seed(training.configuration.seed, rank, position.step))
        if rank == 0:
            every = [read(f"rank-{each}") for each in range(found.manifest.world)]
            if _check_sums(training, found, position, every[0]):
                epoch.totals.sums = sum(own["sums"] for own in every)
            epoch.seconds = every[0]["seconds"]
            epoch.costs = Costs(**every[0]["costs"])
    return Restored(position, epoch)


def _check_sums(
    training: Training, found: Found, position: Position, own: Mapping[str, Any]
) -> bool:
    """Whether the sums of a checkpoint, one rank's ``own``, are of the task's metrics.

    Between two epochs they may be of others. Raises CheckpointError where they must not.
    """
    expected = list(training.task.metrics)
    metrics = own.get("metrics", expected)
    if metrics == expected:
        return True
    if position.samples == 0:
        return False
    raise CheckpointError(
        f"the checkpoint {found.path} is within epoch {position.epoch}, of which it has sums for "
        f"the metrics {', '.join(metrics) or 'none'}, but the task has "
        f"{', '.join(expected) or 'none'}: change metrics at the end of an epoch, or start over "
        "with --resume never"
    )


def _find_targets(training: Training, found: Found, part: str) -> dict[str, torch.Tensor]:
    """For tensors of which this rank has a part only, what takes it; by name within ``part``."""
    if not training.engine.gathers:
        return {}
    named = dict(training.engine.module.named_parameters())
    parameters, targets = list(named.values()), dict[str, torch.Tensor]()
    for name, shape in read_shapes(found.path, f"{part}.").items():
        owner = named.get(name) if part == "model" else None
        if part == "optimizer":
            what, _, rest = name.partition(".")
            if what == "average":
                owner = named.get(rest)
            elif what == "state":
                owner = parameters[int(rest.partition(".")[0])]
        if owner is not None and owner.shape == shape:
            targets[name] = torch.empty_like(owner.detach())
    return targets


def _copy_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def check_fit(found: Found, values: Mapping[str, Any]) -> list[str]:
    """Options that differ from the checkpoint's, where it can be used none the less.

    Raises CheckpointError where it cannot.
    """
    before = found.manifest.configuration
    changed = list_changed(before, values)
    fixed = [name for name in changed if name in _FIXED]
    if fixed:
        listed = describe_changes(fixed, before, values)
        raise CheckpointError(
            f"the checkpoint {found.path} is of another training ({listed}): choose another "
            "--name, or start over with --resume never"
        )
    return changed


def describe_changes(
    names: Iterable[str], before: Mapping[str, Any], values: Mapping[str, Any]
) -> str:
    """The values of these options ``before`` and now, for a message."""
    return ", ".join(f"{name} {before.get(name)!r}, now {values[name]!r}" for name in names)


def list_changed(before: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The options that decide the result, and are others now than ``before``."""
    return [name for name in values if name not in _FREE and values[name] != before.get(name)]


def keep_measured(configuration: Configuration, before: Mapping[str, Any]) -> Configuration:
    """The configuration with what was chosen by measurement ``before``, where it is still open."""
    for name in ("overlap", "bucket_mb"):
        if getattr(configuration, name) == "auto":
            configuration = replace(configuration, **{name: before.get(name, "auto")})
    return configuration


_FIXED = ("data", "samples", "shape", "image_size", "text", "context", "model", "optimizer", "seed")
_FREE = (
    "data_dir", "workers", "download", "summary",
    "name", "runs_dir", "evaluate_every", "straggler", "save_every", "checkpoint_dir", "keep",
    "resume", "on_save_error", "preempt_signal", "on_nan", "on_bad_sample", "export",
    "evaluate_only", "weights", "backend", "interface", "port_range", "timeout",
    "allow_shared_gpu", "overlap",
    "lifeline_timeout", "bind", "stall_timeout", "log_dir", "log_every", "track",
    "profile", "console",
    "label",
)  # fmt: skip
"""Options that leave the numbers as they are."""
