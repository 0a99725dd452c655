"""The training loop: the same on every rank; rank 0 also writes files and the console."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.sync.parameter_server.roles import Serving, describe_roles
from mpiddp.training import metrics, overlap, run_directory
from mpiddp.training.batches import Batch
from mpiddp.training.config import FRAMEWORK, Configuration
from mpiddp.training.malloc import keep_freed_memory
from mpiddp.training.parallel import find_bound, share_buffers
from mpiddp.training.preparation import Engine, Task, agree, prepare
from mpiddp.training.run_directory import RunDirectory
from mpiddp.training.straggler import describe_straggler, parse_straggler


def train(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> metrics.Row:
    """Train as the configuration says, and return the last row of the metrics; collective.

    The parameters are the same on all ranks at the end, and the same bits in every run with the
    same configuration and number of ranks on CPUs, unless gradients may be stale. (Payloads of NaNs
    may differ; a loss that is not finite is refused.)

    The configuration is a resolved one, and the failure handler is told the run directory and each
    step.

    Raises:
        ConfigurationError: the ranks disagree, the data cannot be shared out, the model does not
            fit the data, or the run directory is refused.
        MpiddpError: the loss is not a number any more.
    """
    begin = time.perf_counter()
    if session.device.type == "cpu":
        keep_freed_memory()
    agree(configuration, session)
    task = prepare(configuration, session, failure_handler)
    configuration = task.configuration
    run = _open_run(configuration, session, failure_handler)
    _say(session, *_describe_start(task))
    if failure_handler.attempt > 1:
        directory = failure_handler.run_directory
        _say(session, f"Attempt {failure_handler.attempt} in {directory}: starting over")
    row = _run_epochs(task, failure_handler.attempt)
    task.engine.update.close()
    path = failure_handler.run_directory
    assert path is not None
    assert row.test_accuracy is not None
    seconds = time.perf_counter() - begin
    if row.staleness is not None:
        _say(session, metrics.describe_staleness(row.staleness))
    _say(session, metrics.describe_end(row.test_accuracy, configuration.epochs, seconds, path))
    if run is not None:
        failure_handler.finish()
        # After a failure the run stays locked while the failure handler writes, until the end.
        run.close()
    return row


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


def _open_run(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> RunDirectory | None:
    """Open the run on rank 0, and tell the other ranks' failure handlers where it is."""
    run: RunDirectory | None = None
    answer: Any = None
    if session.world.rank == 0:
        try:
            run = run_directory.open_run(configuration)
            answer = (run.path, run.attempt)
        except ConfigurationError as error:
            answer = error
    answer = session.broadcast(answer)
    if isinstance(answer, ConfigurationError):
        raise answer
    failure_handler.enter_run(*answer)
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
        len(task.workers),
    )
    if task.configuration.straggler is not None:
        lines.append(describe_straggler(parse_straggler(task.configuration.straggler)))
    if task.roles is not None:
        bound = find_bound(task.configuration)
        lines.append(f"Weights: {describe_roles(task.roles, bound)}")
    elif task.configuration.sync != FRAMEWORK:
        lines.append(_describe_synchronization(task))
    return lines


def _describe_synchronization(task: Task) -> str:
    configuration, pace = task.configuration, task.engine.pace
    parts = [f"Gradients: {configuration.sync} over transport {configuration.transport}"]
    if configuration.wire_dtype != "auto":
        parts.append(f"in {configuration.wire_dtype}")
    how = "during" if configuration.overlap == "on" else "after"
    parts.append(f"{how} the backward pass of their bucket")
    if pace is not None:
        parts.append(f"({overlap.describe(pace)})")
    return " ".join(parts)


def _run_epochs(task: Task, attempt: int) -> metrics.Row:
    directory = task.failure_handler.run_directory
    assert directory is not None
    is_writer = task.session.world.rank == 0
    file = metrics.MetricsFile(directory / run_directory.METRICS) if is_writer else None
    epochs = task.configuration.epochs
    for epoch in range(1, epochs + 1):
        row = _train_epoch(task, epoch, attempt)
        is_last = epoch == epochs
        task.engine.update.settle()
        share_buffers(task.engine.module)
        row = replace(row, staleness=_count_staleness(task))
        if is_last or epoch % task.configuration.evaluate_every == 0:
            row = _add_evaluation(task, row)
        if is_last:
            digest = digest_parameters(task.engine.module)
            row = replace(row, parameters=task.session.agree(digest, "trained parameters"))
        if file is not None:
            file.append(row)
        _say(task.session, metrics.describe_epoch(row))
    return row


def _train_epoch(task: Task, epoch: int, attempt: int) -> metrics.Row:
    device = task.session.device
    totals = metrics.Totals(device)
    first = (epoch - 1) * len(task.training)
    waited = 0.0
    begin = loaded = time.perf_counter()
    task.engine.module.train()
    for step, (features, labels) in enumerate(_show_progress(task, epoch), start=first):
        waited += time.perf_counter() - loaded
        if task.slowdown is not None:
            task.slowdown.wait(step)
        _take_step(task.engine, features.to(device), labels.to(device), totals)
        task.failure_handler.step = step + 1
        loaded = time.perf_counter()
    task.engine.update.finish_epoch()
    average = totals.reduce()
    seconds = time.perf_counter() - begin
    _refuse_divergence("training", average, epoch)
    last = epoch * len(task.training)
    return metrics.Row(
        attempt=attempt,
        epoch=epoch,
        step=last,
        loss=average.loss,
        accuracy=average.accuracy,
        learning_rate=task.rate(last - 1),
        samples_per_second=average.samples / seconds,
        seconds=seconds,
        load_seconds=waited,
    )


def _count_staleness(task: Task) -> dict[int, int] | None:
    """How often a gradient was so many updates late, over all servers; None without any."""
    update = task.engine.update
    if not isinstance(update, Serving):
        return None
    counts: Counter[int] = Counter()
    for found in task.session.gather(update.staleness):
        counts.update(found)
    return dict(sorted(counts.items()))


def _refuse_divergence(what: str, average: metrics.Average, epoch: int) -> None:
    if not math.isfinite(average.loss):
        raise MpiddpError(
            f"expected a finite {what} loss, found {average.loss} in epoch {epoch}: training has "
            "diverged; try a smaller --learning-rate"
        )


def _take_step(
    engine: Engine, features: torch.Tensor, labels: torch.Tensor, totals: metrics.Totals
) -> None:
    outputs = engine.model(features)
    loss = nn.functional.cross_entropy(outputs, labels)
    engine.update.begin_step()
    torch.autograd.backward(loss)
    engine.update.finish_step()
    totals.add(loss, outputs, labels)


def _add_evaluation(task: Task, row: metrics.Row) -> metrics.Row:
    begin = time.perf_counter()
    average = evaluate(task.engine.module, task.evaluation, task.session.device)
    _refuse_divergence("test", average, row.epoch)
    return replace(
        row,
        test_loss=average.loss,
        test_accuracy=average.accuracy,
        evaluate_seconds=time.perf_counter() - begin,
    )


def _show_progress(task: Task, epoch: int) -> Iterator[Batch]:
    """Pass the epoch's batches through; with a bar on rank 0's terminal, if it has one."""
    rank = task.session.world.rank
    if rank not in task.workers:
        return iter(())
    is_shown = rank == 0 and sys.stderr.isatty()
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
