"""What a trained model makes of samples, which need no targets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.sync.parameter_server.serving import Serving
from mpiddp.training.data.data_sets import Split
from mpiddp.training.data.factories import call_factory, failed, find_factory
from mpiddp.training.data.reading import BatchReading
from mpiddp.training.data.samples import Samples
from mpiddp.training.data.structure import (
    FormError,
    call_model,
    count_samples,
    find_form,
    take_inputs,
)
from mpiddp.training.evaluation import PREDICTIONS, fill_up, load_model, write_rows
from mpiddp.training.options.config import Configuration
from mpiddp.training.preparation import Training, agree, share_evaluation
from mpiddp.training.run_output import say
from mpiddp.training.shared_run import after_error, enter_run
from mpiddp.training.step.precision import Precision
from mpiddp.training.step.step import Engine
from mpiddp.training.task.loading import choose_reading
from mpiddp.training.task.task import Task, cross_entropy, find_task
from mpiddp.wording import count_noun


@dataclass(frozen=True)
class Unlabelled:
    """Samples with or without targets, as the trainer reads them: with a target, which is 0."""

    data: Any
    form: Any
    """Of a sample's inputs."""

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, position: int, /) -> tuple[Any, int]:
        return take_inputs(self.data[position], self.form), 0


@dataclass(frozen=True)
class Predictor:
    """A model on all ranks, that predicts together."""

    model: nn.Module
    """As it is called."""
    module: nn.Module
    form: Any
    """Of a sample's inputs."""
    session: Session
    reading: BatchReading
    precision: Precision
    engine: Engine | None = None
    """Of the training whose model it is."""

    def predict(self, data: Any) -> Any:
        """The model's outputs for all samples, as `mpiddp.training.Trainer.predict`. Collective."""
        engine = self.engine
        if engine and isinstance(engine.update, Serving) and engine.update.has_idle_ranks:
            raise ConfigurationError(
                "predict: expected a call after the loop, found one within it: ranks that only "
                "serve take no steps, and would not make it"
            )
        session, samples = self.session, self._find_samples(data)
        session.agree((len(data), _digest(data)), "data to predict")
        batches = share_evaluation(samples, session, self.reading)
        parts = list[Any]()
        modes = [(each, each.training) for each in self.model.modules()]
        self.model.eval()
        try:
            with _at_average(engine), torch.no_grad(), self.precision.autocast():
                for batch in fill_up(batches) if engine and engine.gathers else batches:
                    outputs = call_model(self.model, batch.to(session.device).inputs)
                    if batch.weight > 0:
                        count = count_samples(batch.targets)
                        parts.append(tree_map(partial(_take_output, count), outputs))
        finally:
            batches.reader.close()
            for module, is_training in modes:  # A module comes before those in it.
                module.train(is_training)
        mine = tree_map(_join, *parts) if parts else None
        found = [each for each in session.gather(mine) if each is not None]
        return tree_map(partial(_interleave, session.world.size), *found)

    def _find_samples(self, data: Any) -> Samples:
        """Raises ConfigurationError for what are no samples with such inputs."""
        is_array = isinstance(data, Split)
        split = replace(data, augment=None) if is_array else Unlabelled(data, self.form)
        try:
            if not len(split):
                raise ConfigurationError("predict: expected samples, found none")
            split[0]
        except FormError as error:
            raise ConfigurationError(f"predict: {error}") from None
        except (TypeError, AttributeError, LookupError) as error:
            raise failed("predict", "expected samples with a length, by position", error) from error
        return Samples(split, "given")


def _digest(data: Any) -> str:
    """Of samples that are in memory."""
    digest = hashlib.sha256()
    if isinstance(data, torch.Tensor):
        whole: Any = data.detach().cpu().contiguous()
        digest.update(whole.view(-1).view(torch.uint8).numpy())
    elif isinstance(data, np.ndarray) and not data.dtype.hasobject:
        digest.update(np.ascontiguousarray(data).data)
    elif isinstance(data, Split):
        digest.update(data.digest())
    return digest.hexdigest()


def _take_output(samples: int, output: Any) -> Any:
    """An output for so many samples, on the CPU. Raises ConfigurationError for what is none."""
    if output is None or (isinstance(output, torch.Tensor) and output.shape[:1] == (samples,)):
        return output if output is None else output.cpu()
    is_tensor = isinstance(output, torch.Tensor)
    found = f"shape {tuple(output.shape)}" if is_tensor else type(output).__name__
    raise ConfigurationError(
        f"predict: expected outputs that are tensors (samples, …), alone or in tuples, lists and "
        f"dicts, found {found} for {count_noun(samples, 'sample')}"
    )


def _join(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]


def _interleave(ranks: int, *parts: Any) -> Any:
    """Of each rank every ``ranks``-th sample from its own number on."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    total = sum(map(len, parts))
    found = parts[0].new_empty((total, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        found[rank::ranks] = part
    return found


def make_predictor(training: Training) -> Predictor:
    """Of a model that is being trained, with its present weights."""
    engine, session = training.engine, training.session
    return Predictor(
        engine.module, engine.module, training.form, session,
        choose_reading(training.configuration, session), engine.forward.precision, engine,
    )  # fmt: skip


@contextmanager
def _at_average(engine: Engine | None) -> Iterator[None]:
    """As the engine's, with rank 0's buffers on all ranks, and with its weights if servers update
    those. Collective."""
    if engine is None:
        yield
        return
    tensors = list(engine.module.buffers())
    if isinstance(engine.update, Serving):
        tensors += [each.detach() for each in engine.module.parameters()]
    with engine.at_average():
        own = [each.clone() for each in tensors]
        for each in tensors:
            dist.broadcast(each, 0)
        try:
            yield
        finally:
            for tensor, each in zip(tensors, own, strict=True):
                tensor.copy_(each)


def load_predictor(configuration: Configuration, task: Task, session: Session) -> Predictor:
    """Of a model with the weights that the options name. Collective.

    Raises ConfigurationError, CheckpointError.
    """
    found = load_model(configuration, task, session)
    return Predictor(
        found.model, found.module, find_form(found.first.inputs), session,
        choose_reading(configuration, session), Precision(configuration.precision, session.device),
    )  # fmt: skip


def predict_only(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> None:
    """Write predictions for the samples that ``predict`` names into a run's directory; collective.

    Raises ConfigurationError, CheckpointError.
    """
    task, configuration = find_task(configuration, None)
    agree(configuration, session)
    assert configuration.predict is not None
    samples = read_samples(configuration.predict)
    outputs = load_predictor(configuration, task, session).predict(samples)
    run = enter_run(configuration, session, failure_handler)
    with after_error(run.abandon):
        if session.world.rank == 0:
            path = run.state.directory / PREDICTIONS
            write_outputs(path, task, outputs)
            say(session, f"Prediction done: {count_noun(len(samples), 'sample')} in {path}")
        run.leave()


def read_samples(reference: str) -> Any:
    """An array from a ``.npy`` file, or what ``package.module:factory`` returns.

    Raises ConfigurationError.
    """
    if not reference.endswith(".npy"):
        return call_factory("predict", find_factory("predict", reference), object)
    try:
        return np.load(Path(reference), allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"predict: cannot read {reference}: {error}") from None


def write_outputs(path: Path, task: Task, outputs: Any) -> None:
    """Write a row for each sample: the class with the highest score and its probability, or for a
    loss of one's own the outputs. Raises OSError, and ConfigurationError for other outputs."""
    if not isinstance(outputs, torch.Tensor):
        raise ConfigurationError(
            f"predict: expected a model that returns one tensor, found {type(outputs).__name__}: "
            "use mpiddp.training.Trainer.predict in a script"
        )
    rows: Sequence[Sequence[Any]]
    if task.loss is cross_entropy and outputs.ndim == 2:
        names = ["predicted", "probability"]
        best = outputs.float().softmax(dim=1).max(dim=1)
        rows = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    else:
        rows = outputs.reshape(len(outputs), -1).tolist()
        names = [f"output_{number}" for number in range(len(rows[0]))]
    write_rows(path, names, enumerate(rows))
