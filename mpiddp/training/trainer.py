"""The training loop: the same on every rank; rank 0 also writes and speaks."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.failure import WayOut
from mpiddp.launch.session import Session
from mpiddp.sync.serving import Roles, describe_roles
from mpiddp.training import metrics, models, overlap, run_directory
from mpiddp.training.batches import (
    Batch,
    TrainingBatches,
    check_share,
    make_evaluation_batches,
    make_training_batches,
)
from mpiddp.training.config import FRAMEWORK, Configuration
from mpiddp.training.data import load
from mpiddp.training.parallel import (
    find_bound,
    find_roles,
    replicate,
    serve,
    share_buffers,
)
from mpiddp.training.run_directory import RunDirectory
from mpiddp.training.updates import LocalUpdate, Update, make_optimizer

WARM_UP = 0.05
"""Share of all steps in which the learning rate rises to its peak."""
EVALUATION_BATCH = 256
"""Samples per rank and forward pass of an evaluation; it changes no result."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    test_accuracy: float
    """Share of the test samples whose class was right, 0 to 1."""
    parameters: str
    """SHA-256 of the trained parameters."""
    steps: int
    """Optimizer steps taken."""
    run_directory: Path


@dataclass(frozen=True)
class Task:
    """One rank's part of a run, from its first step to its last."""

    configuration: Configuration
    session: Session
    way_out: WayOut
    model: nn.Module
    """What takes a batch: DDP's wrapper, or the module itself."""
    module: nn.Module
    update: Update
    roles: Roles | None
    """Of ranks with parameter servers."""
    rate: Callable[[int], float]
    """The learning rate of a step, counted from 0."""
    training: TrainingBatches
    """Of a rank that computes; a dedicated server leaves them to the others."""
    evaluation: DataLoader[Batch]
    total_steps: int
    pace: overlap.Choice | None
    """How quick passes are with overlap and without, if that was measured."""

    @property
    def workers(self) -> int:
        """Ranks that compute."""
        return len(self.roles.workers) if self.roles else self.session.world.size

    @property
    def computes(self) -> bool:
        """Whether this rank does."""
        return self.roles is None or self.session.world.rank in self.roles.workers


def train(configuration: Configuration, session: Session, way_out: WayOut) -> Result:
    """Train as the configuration says; collective over all ranks of the session.

    The parameters are the same on all ranks at the end, and the same bits in every run with the
    same configuration and number of ranks on CPUs.

    Args:
        configuration: resolved.
        session: started, with torch.distributed's default group.
        way_out: is told the run directory and each step.

    Raises:
        ConfigurationError: the ranks disagree, the data cannot be shared out, the model does not
            fit the data, or the run directory is refused.
        MpiddpError: the loss is not a number any more.
    """
    begin = time.perf_counter()
    _agree(configuration, session)
    task = _prepare(configuration, session, way_out)
    configuration = task.configuration
    run = _open_run(configuration, session, way_out)
    _say(session, *_describe_start(task))
    if way_out.attempt > 0:
        _say(session, f"Attempt {way_out.attempt + 1} in {way_out.run_directory}: starting over")
    row = _run_epochs(task, way_out.attempt)
    task.update.close()
    path = way_out.run_directory
    assert path is not None
    assert row.test_accuracy is not None
    assert row.parameters is not None
    seconds = time.perf_counter() - begin
    _say(session, metrics.describe_end(row.test_accuracy, configuration.epochs, seconds, path))
    if run is not None:
        way_out.finish()
        # After a failure the run stays locked while the way out writes; then the process ends.
        run.close()
    return Result(row.test_accuracy, row.parameters, row.step, path)


def learning_rate_factor(step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate at a step: a linear rise, then half a cosine.

    Args:
        step: counted from 0.
        total_steps: of the whole run.
    """
    rise = max(1, round(WARM_UP * total_steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (total_steps - rise)))


def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> metrics.Average:
    """Return loss and accuracy over the batches of all ranks; collective.

    The model is one rank's own, not wrapped: ranks may have different numbers of batches.
    """
    totals = metrics.Totals(device)
    model.eval()
    with torch.no_grad():
        for features, labels in batches:
            targets = labels.to(device)
            outputs = model(features.to(device))
            totals.add(nn.functional.cross_entropy(outputs, targets), outputs, targets)
    return totals.reduce()


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 over the bytes of all parameters and buffers, in their order."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _agree(configuration: Configuration, session: Session) -> None:
    """Check that all ranks were given the same; field by field only where they were not."""
    if session.any(session.broadcast(configuration) != configuration):
        for field in fields(configuration):
            session.agree(getattr(configuration, field.name), f"option {field.name}")


def _prepare(configuration: Configuration, session: Session, way_out: WayOut) -> Task:
    world = session.world
    data = load(configuration)
    session.agree(data.digest(), f"data set {configuration.data}")
    roles = find_roles(configuration, world.size)
    workers = roles.workers if roles is not None else tuple(range(world.size))
    check_share(len(data.train), len(workers), configuration.batch_size)
    share = workers.index(world.rank) if world.rank in workers else 0
    training = make_training_batches(
        data.train, configuration.batch_size, configuration.seed, share, len(workers)
    )
    total_steps = configuration.epochs * len(training)
    peak = configuration.learning_rate
    assert peak is not None

    def rate(step: int) -> float:
        return peak * learning_rate_factor(min(step, total_steps - 1), total_steps)

    torch.manual_seed(configuration.seed)
    module = models.build(configuration.model, data.shape, data.classes)
    model: nn.Module = module
    update: Update
    pace = None
    if roles is not None:
        update = serve(configuration, session, roles, module, rate, way_out.fail)
    else:
        replica = replicate(module, session.device, configuration)
        features = torch.from_numpy(data.train.features[: configuration.batch_size])
        labels = torch.from_numpy(data.train.labels[: configuration.batch_size])
        configuration, pace = overlap.settle(
            configuration, replica, (features.to(session.device), labels.to(session.device))
        )
        model, module = replica.model, replica.model.module
        update = LocalUpdate(make_optimizer(configuration, list(module.parameters())), rate)
    # From here on ranks draw differently: their samples are to meet different dropout masks.
    torch.manual_seed(_mix(configuration.seed, world.rank))
    return Task(
        configuration=configuration,
        session=session,
        way_out=way_out,
        model=model,
        module=module,
        update=update,
        roles=roles,
        rate=rate,
        training=training,
        evaluation=make_evaluation_batches(data.test, EVALUATION_BATCH, world.rank, world.size),
        total_steps=total_steps,
        pace=pace,
    )


def _mix(seed: int, rank: int) -> int:
    digest = hashlib.sha256(f"{seed} {rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def _open_run(
    configuration: Configuration, session: Session, way_out: WayOut
) -> RunDirectory | None:
    """Open the run on rank 0, and tell the others' ways out where it is."""
    run, refusal = None, None
    if session.world.rank == 0:
        try:
            run = run_directory.open_run(configuration)
        except ConfigurationError as error:
            refusal = str(error)
    refusal = session.broadcast(refusal)
    if refusal is not None:
        raise ConfigurationError(refusal)
    place = (run.path, run.attempt) if run is not None else None
    place = session.broadcast(place)
    assert place is not None
    way_out.run_directory, way_out.attempt = place
    return run


def _describe_start(task: Task) -> list[str]:
    session, world = task.session, task.session.world
    counts = torch.zeros(world.node_count, dtype=torch.int64, device=session.device)
    counts[world.node_rank] = 1
    dist.all_reduce(counts)
    lines = metrics.describe_start(
        session.device.type,
        counts.tolist(),
        world.master_hostname,
        task.configuration.batch_size,
        task.workers,
    )
    if task.roles is not None:
        bound = find_bound(task.configuration)
        lines.append(f"Weights: {describe_roles(task.roles, bound)}")
    elif task.configuration.sync != FRAMEWORK:
        lines.append(_describe_synchronization(task))
    return lines


def _describe_synchronization(task: Task) -> str:
    configuration, pace = task.configuration, task.pace
    parts = [f"Gradients: {configuration.sync} over transport {configuration.transport}"]
    if configuration.wire_dtype != "auto":
        parts.append(f"in {configuration.wire_dtype}")
    how = "during" if configuration.overlap == "on" else "after"
    parts.append(f"{how} the backward pass of their bucket")
    if pace is not None:
        found = f"{1e3 * pace.with_overlap:.1f} ms with overlap, {1e3 * pace.without:.1f} without"
        parts.append(f"({found})")
    return " ".join(parts)


def _run_epochs(task: Task, attempt: int) -> metrics.Row:
    """Train and evaluate; return the last row."""
    directory = task.way_out.run_directory
    assert directory is not None
    is_writer = task.session.world.rank == 0
    file = metrics.MetricsFile(directory / run_directory.METRICS) if is_writer else None
    epochs = task.configuration.epochs
    for epoch in range(1, epochs + 1):
        row = _train_epoch(task, epoch, attempt)
        is_last = epoch == epochs
        task.update.settle()
        share_buffers(task.module)
        if is_last or epoch % task.configuration.evaluate_every == 0:
            row = _add_evaluation(task, row)
        if is_last:
            digest = digest_parameters(task.module)
            row = replace(row, parameters=task.session.agree(digest, "trained parameters"))
        if file is not None:
            file.append(row)
        _say(task.session, metrics.describe_epoch(row))
    return row


def _train_epoch(task: Task, epoch: int, attempt: int) -> metrics.Row:
    device = task.session.device
    totals = metrics.Totals(device)
    step = (epoch - 1) * len(task.training)
    waited = 0.0
    begin = loaded = time.perf_counter()
    task.module.train()
    for features, labels in _show_progress(task, epoch):
        waited += time.perf_counter() - loaded
        _take_step(task, features.to(device), labels.to(device), totals)
        step += 1
        task.way_out.step = step
        loaded = time.perf_counter()
    average = totals.reduce()
    seconds = time.perf_counter() - begin
    _refuse_divergence("training", average, epoch)
    return metrics.Row(
        attempt=attempt,
        epoch=epoch,
        step=step,
        loss=average.loss,
        accuracy=average.accuracy,
        test_loss=None,
        test_accuracy=None,
        learning_rate=task.rate(step - 1),
        samples_per_second=average.samples / seconds,
        seconds=seconds,
        load_seconds=waited,
        evaluate_seconds=None,
        parameters=None,
    )


def _refuse_divergence(what: str, average: metrics.Average, epoch: int) -> None:
    if not math.isfinite(average.loss):
        raise MpiddpError(
            f"expected a finite {what} loss, found {average.loss} in epoch {epoch}: training has "
            "diverged; try a smaller --learning-rate"
        )


def _take_step(
    task: Task, features: torch.Tensor, labels: torch.Tensor, totals: metrics.Totals
) -> None:
    outputs = task.model(features)
    loss = nn.functional.cross_entropy(outputs, labels)
    task.update.begin_step()
    torch.autograd.backward(loss)
    task.update.finish_step()
    totals.add(loss, outputs, labels)


def _add_evaluation(task: Task, row: metrics.Row) -> metrics.Row:
    begin = time.perf_counter()
    average = evaluate(task.module, task.evaluation, task.session.device)
    _refuse_divergence("test", average, row.epoch)
    return replace(
        row,
        test_loss=average.loss,
        test_accuracy=average.accuracy,
        evaluate_seconds=time.perf_counter() - begin,
    )


def _show_progress(task: Task, epoch: int) -> Iterator[Batch]:
    """Pass the epoch's batches through; with a bar on rank 0's terminal, if it has one."""
    if not task.computes:
        return iter(())
    is_shown = task.session.world.rank == 0 and sys.stderr.isatty()
    return iter(
        tqdm(
            task.training.start(epoch),
            desc=f"Epoch {epoch}",
            unit="batch",
            leave=False,
            disable=not is_shown,
        )
    )


def _say(session: Session, *lines: str) -> None:
    if session.world.rank == 0:
        for line in lines:
            print(line, flush=True)
