"""Prepares one rank's part of a run from the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from mpiddp import environment
from mpiddp.checkpoints.plain_weights import WeightSelection, load_weights
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.exported_variables import export_for_good
from mpiddp.launch.session import Session
from mpiddp.process.streams.output import refuse_absent_ranks
from mpiddp.schedules.plans.loading import find_digest
from mpiddp.sync.parameter_server.serving import Roles, Serving
from mpiddp.training.data.batches import (
    Cut,
    EvaluationBatches,
    TrainingBatches,
    check_share,
    make_evaluation_batches,
    make_training_batches,
)
from mpiddp.training.data.data_sets import DataSet
from mpiddp.training.data.reading import BatchReading
from mpiddp.training.data.samples import Batch, Samples
from mpiddp.training.data.seeding import mix_seed, seed_generators
from mpiddp.training.data.structure import find_form, find_shape, list_leaves
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.checkpoints import CheckpointOptions
from mpiddp.training.options.groups.data import AUTO_BATCH
from mpiddp.training.options.groups.parallelism import ParallelismOptions
from mpiddp.training.options.groups.straggler import Slowdown, check_straggler, parse_straggler
from mpiddp.training.step.learning_rate import LearningRate, make_learning_rate
from mpiddp.training.step.optimizer_step import make_dense, make_optimizer
from mpiddp.training.step.precision import Precision
from mpiddp.training.step.step import Engine, Forward, split_batch
from mpiddp.training.task.loading import choose_reading, choose_samples, load_on_all, read_first
from mpiddp.training.task.task import Task, add_test_metrics, build_model, check_task, choose_loss
from mpiddp.training.wrapping import overlap
from mpiddp.training.wrapping.engine import EngineParts, recompute_some, start_engine
from mpiddp.training.wrapping.parameters import check_parameters
from mpiddp.training.wrapping.rehearsal import rehearse, takes_one_sample, time_pass
from mpiddp.training.wrapping.shared_model import find_roles

WORKSPACE = ":4096:8"
"""Of cuBLAS, with which its results do not depend on what else runs (cuBLAS, Reproducibility)."""
EVALUATION_BATCH = 256
"""Samples per rank and forward pass of an evaluation; it changes no result."""


@dataclass(frozen=True)
class Training:
    """One rank's part of a run, from its first step to its last."""

    configuration: Configuration
    task: Task
    session: Session
    engine: Engine
    pace: overlap.Pace | None
    """Time of a pass with overlap and without, if it was measured."""
    workers: tuple[int, ...]
    """Ranks that compute."""
    roles: Roles | None
    """Of ranks with parameter servers."""
    batches: TrainingBatches
    evaluation: EvaluationBatches
    tested: Task
    """The task with the metrics of test samples."""
    targets: Any
    """Of the first batch."""
    form: Any
    """Of a sample's inputs."""
    rate: LearningRate
    slowdown: Slowdown | None
    notes: tuple[str, ...]
    """On the batch size that was found, and what the weights were: lines for the console."""

    def close(self) -> None:
        """There are no more steps. Collective."""
        self.engine.update.close()
        self.batches.reader.close()
        self.evaluation.reader.close()

    def settle(self) -> None:
        """Have all gradients applied, and give all ranks the same weights.

        Collective, between two steps.
        """
        self.engine.guard.settle()
        self.engine.update.finish_epoch()
        self.engine.update.settle()

    def find_rate_step(self, epoch: int, samples: int) -> int:
        """The step, counted from 0, whose learning rate the next one has.

        With ``samples`` of the epoch taken, by whatever number of ranks.
        """
        left = self.batches.count(samples)
        return epoch * self.batches.count() - left


def agree(configuration: Configuration, session: Session) -> None:
    """Check that all ranks have the same configuration, and that it fits their number.

    Raises ConfigurationError. Collective.
    """
    # Field by field only if they differ.
    if session.any(session.broadcast(configuration) != configuration):
        for field in fields(configuration):
            session.agree(getattr(configuration, field.name), f"option {field.name}")
    if configuration.load is not None:
        session.agree(find_digest(configuration.load), f"contents of {configuration.load}")
    refuse_absent_ranks(configuration.profile, "--profile", session.world.size)


def prepare(
    configuration: Configuration,
    task: Task,
    session: Session,
    fail: Callable[[BaseException], object],
    taken: int | None = None,
) -> Training:
    """Load the task's data, build its model, and join the ranks; collective.

    The training's configuration has what was left to be chosen by measurement. ``fail`` is called
    with the error that ends a parameter server's thread. ``taken``: samples of its first epoch that
    earlier attempts have trained on; None if it does not go on from any.

    Raises ConfigurationError for what does not go together.
    """
    world = session.world
    roles = find_roles(configuration, world.size)
    workers = tuple(range(world.size)) if roles is None else roles.workers
    data = load_on_all(configuration, task, session)
    train, test = choose_samples(configuration, data, session.device)
    set_determinism(configuration.deterministic)
    configuration, notes = _settle_batch_size(configuration, task, data, train, session, workers)
    cut = _make_cut(configuration, len(data.train), world.rank, workers)
    reading = choose_reading(configuration, session)
    batches = make_training_batches(train, cut, reading)
    rate = make_learning_rate(configuration, batches.count(), cut.step_samples, task.schedule)
    batch = read_first(train, configuration.batch_size, session)
    seed_generators(configuration.seed)
    module = _build(configuration, task, data, session)
    notes.append(load_initial(module, configuration) if taken is None else "")
    module = _place(configuration, module, session.device)
    sample = batch.to(next(module.parameters()).device)
    check_task(task, module, sample, data.classes)
    forward = _make_forward(configuration, task, session, batch)
    problem = _find_single_sample(configuration, cut, len(data.train), taken or 0)
    if problem and not takes_one_sample(module, sample, forward):
        raise ConfigurationError(problem)
    start = EngineParts(module, forward, batch, rate, task.optimizer)
    slowdown = _make_slowdown(configuration, start, cut.rank, workers)
    configuration, engine, pace = start_engine(configuration, session, roles, start, fail)
    batches = _follow_workers(batches, engine, computes=world.rank in workers)
    # From here on ranks draw differently: their samples are to meet different dropout masks.
    seed_generators(mix_seed(configuration.seed, world.rank))
    return Training(
        configuration=configuration,
        task=task,
        tested=add_test_metrics(task, data.classes),
        targets=batch.targets,
        form=find_form(batch.inputs),
        session=session,
        engine=engine,
        pace=pace,
        workers=workers,
        roles=roles,
        batches=batches,
        evaluation=share_evaluation(test, session, reading),
        rate=rate,
        slowdown=slowdown,
        notes=tuple(filter(None, notes)),
    )


def share_evaluation(
    samples: Samples, session: Session, reading: BatchReading
) -> EvaluationBatches:
    """This rank's batches of samples that are not trained on."""
    cut = Cut(EVALUATION_BATCH, session.world.rank, session.world.size)
    return make_evaluation_batches(samples, cut, reading)


def _settle_batch_size(
    configuration: Configuration,
    task: Task,
    data: DataSet,
    samples: Samples,
    session: Session,
    workers: tuple[int, ...],
) -> tuple[Configuration, list[str]]:
    """The configuration with the batch size that fits, if that is open. Collective."""
    if configuration.batch_size != AUTO_BATCH:
        return configuration, []
    # Here, since few runs need it.
    from mpiddp.training.wrapping import batch_size

    check_share(len(data.train), len(workers), configuration.accumulation_steps)
    trial = None
    if session.world.rank in workers:
        few = read_first(samples, min(batch_size.SAMPLES, len(data.train)), session)
        module = _place(configuration, _build(configuration, task, data, session), session.device)
        check_task(task, module, few, data.classes)
        recompute_some(module, configuration)
        forward = _make_forward(configuration, task, session, few)
        parameters: list[torch.Tensor] = list(module.parameters())
        optimizer = make_optimizer(configuration, parameters, task.optimizer, module)

        def compute(part: Batch) -> None:
            torch.autograd.backward(forward.precision.scale(forward(module, part)[1]))
            if task.optimizer is None:
                make_dense(module.parameters())

        trial = batch_size.StepTrial(configuration, session, compute, optimizer, few)
    most = len(data.train) // len(workers)
    size, line = batch_size.settle(configuration, session, trial, most)
    return replace(configuration, batch_size=size), [line]


def _build(configuration: Configuration, task: Task, data: DataSet, session: Session) -> nn.Module:
    """A new module whose parameters can be trained so. Raises ConfigurationError."""
    module = build_model(task, data)
    check_parameters(module, configuration, session.backend)
    return module


def _make_forward(
    configuration: Configuration, task: Task, session: Session, batch: Batch
) -> Forward:
    loss = choose_loss(task, configuration.label_smoothing)
    precision = Precision(configuration.precision, session.device)
    return Forward(loss, precision, _check_format(configuration, batch))


def load_initial(module: nn.Module, options: CheckpointOptions) -> str:
    """Give a new model the weights that the options name, if they do. Collective.

    Returns a line for the console. Raises ConfigurationError or CheckpointError.
    """
    if options.weights is None:
        return ""
    skipped = tuple(each for each in options.weights_except.split(",") if each)
    return load_weights(module, options.weights, WeightSelection(options.weights_prefix, skipped))


def _make_cut(
    configuration: Configuration, samples: int, rank: int, workers: tuple[int, ...]
) -> Cut:
    """Raises ConfigurationError if there are too few samples."""
    check_share(samples, len(workers), configuration.batch_size)
    place = workers.index(rank) if rank in workers else 0
    drops = configuration.last_batch == "drop"
    return Cut(configuration.batch_size, place, len(workers), drops)


def _find_single_sample(configuration: Configuration, cut: Cut, samples: int, taken: int) -> str:
    """The message if some forward pass has a single sample; empty if none has."""
    passes = configuration.accumulation_steps
    if cut.batch_size // passes == 1:
        name = "batch_size" if passes == 1 else "accumulation_steps"
        where, advice = f"{name}: each forward pass", "give a larger --batch-size"
    else:
        if cut.find_smallest(samples) // passes < 2:
            where = f"last_batch: step {cut.count(samples)} of each epoch, on some rank,"
            advice = "give --last-batch drop, or another --batch-size"
        elif cut.find_smallest(samples - taken) // passes < 2:
            # The steps of an earlier attempt had other sizes.
            where = "last_batch: the last step of the resumed epoch, on some rank,"
            advice = "give --last-batch drop, another --batch-size, or another number of ranks"
        else:
            return ""
    return (
        f"{where} has one sample, of which the model's batch normalisation has no variance: "
        f"expected 2 or more; {advice}"
    )


def _place(options: ParallelismOptions, module: nn.Module, device: torch.device) -> nn.Module:
    """The model on its device; for FSDP on the CPU, since a device may hold no more than a part."""
    # FSDP takes parameters only as they are usually stored.
    is_sharded = options.parallel == "fsdp"
    if options.channels_last and not is_sharded:
        # torch's types leave out memory_format.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module if is_sharded else module.to(device)


def _check_format(options: ParallelismOptions, batch: Batch) -> torch.memory_format:
    """How inputs are stored. Raises ConfigurationError if they cannot be."""
    if not options.channels_last:
        return torch.preserve_format
    if not any(each.dim() == 4 for each in list_leaves(batch.inputs)):
        raise ConfigurationError(
            "channels_last: expected images (channels, height, width), found samples of shape "
            f"{find_shape(batch.inputs)}: leave out --channels-last"
        )
    return torch.channels_last


def _make_slowdown(
    configuration: Configuration, start: EngineParts, place: int, workers: tuple[int, ...]
) -> Slowdown | None:
    if configuration.straggler is None:
        return None
    straggler = parse_straggler(configuration.straggler)
    check_straggler(straggler, workers)
    device = start.batch.device
    module = start.module.to(device)
    part = split_batch(start.batch, configuration.accumulation_steps)[0]
    with rehearse(module, module, part, start.forward) as take_pass:
        seconds = time_pass(take_pass, device) * configuration.accumulation_steps
    return Slowdown(straggler, place, workers, configuration.seed, seconds, device)


def _follow_workers(batches: TrainingBatches, engine: Engine, *, computes: bool) -> TrainingBatches:
    """The batches; on a rank that only serves, what follows its workers'."""
    if isinstance(engine.update, Serving) and not computes:
        return replace(batches, follow=engine.update.follow_steps)
    return batches


def set_determinism(is_wanted: bool) -> None:
    """Take deterministic algorithms only, or the quickest; before the first work on a GPU.

    An operation that has no deterministic algorithm raises an error. The user's own setting of
    cuBLAS is kept.
    """
    if is_wanted and environment.CUBLAS_WORKSPACE_CONFIG not in os.environ:
        export_for_good({environment.CUBLAS_WORKSPACE_CONFIG: WORKSPACE})
    torch.use_deterministic_algorithms(is_wanted)
    torch.backends.cudnn.benchmark = not is_wanted
