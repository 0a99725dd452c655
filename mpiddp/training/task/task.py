"""What is trained: a model, its data, the loss, and the metrics, in one object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import DataSet, load
from mpiddp.training.data.factories import Factory, call_factory, describe, failed, find_factory
from mpiddp.training.data.samples import Batch
from mpiddp.training.data.seeding import fork_generators
from mpiddp.training.data.structure import call_model, find_shape
from mpiddp.training.options.config import Configuration
from mpiddp.training.records.metrics import Average, Metric, Row, StepsRow
from mpiddp.training.task import models

LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]
"""From a model's outputs and the targets to the mean over the batch, a scalar."""
RateSchedule: TypeAlias = Callable[[int, int], float]
"""From a step, counted from 0, and the steps of the run to a factor of the peak learning rate."""


OWN = {
    "model": "a module",
    "data": "a DataSet",
    "optimizer": "an optimizer",
    "schedule": "a factor of the learning rate",
}
"""What a task may bring in place of an option, and what that function returns."""
MANY = 100
"""Classes from which on the share among the five highest scores is reported."""
LARGEST_EXPONENT = 700.0
"""Whose power of e is a float."""


def cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The mean in nats: of scores (samples, classes, …) and labels (samples, …), int64."""
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing)


def count_correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """For each sample the share of its labels that have the highest score; the sum of that."""
    count = (outputs.argmax(dim=1) == targets).sum()
    return count if targets.dim() == 1 else count * (len(targets) / targets.numel())


def count_top5(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """For each sample the share of its labels among the five highest scores; the sum of that."""
    hits = outputs.topk(5, dim=1).indices == targets.unsqueeze(1)
    return hits.sum() * (len(targets) / targets.numel())


@dataclass(frozen=True)
class Task:
    """A model, its data, the loss that training lowers, and metrics that it reports.

        def build(shape, classes):
            return torch.nn.Linear(shape[0], classes)
        task = mpiddp.training.Task(build, metrics={})

    `mpiddp.training.Trainer` takes it, and so does
    ``python -m mpiddp.train --task package.module:factory``, where ``factory()`` returns one.

    Attributes:
        model: returns a new ``torch.nn.Module``, on the CPU; the same weights for the same seed of
            torch. If it has parameters ``shape`` and ``classes``, they are given: the shape of one
            sample, and the number of classes. None: the option ``model`` decides.
        data: returns a `DataSet`, the same on every rank. If it has a parameter ``seed``, that is
            given. None: the option ``data`` decides.
        loss: takes outputs and targets, (samples, …), and returns the mean over the batch, a
            scalar. By default the cross entropy of scores (samples, classes, …) and int64 labels.
        metrics: what is reported beside the loss, by name: each takes outputs and targets, and
            returns the sum over the samples, a scalar. The mean over all samples of an epoch is
            reported. By default ``accuracy``.
        optimizer: takes ``parameters`` (also called ``params``), a list of tensors, and
            ``learning_rate`` (or ``lr``), and returns a ``torch.optim.Optimizer``. If it has a
            parameter ``model``, that is given, except with parameter servers, where tensors are
            flat pieces of parameters. Groups keep the ratio of their rates. None: the option
            ``optimizer`` decides.
        schedule: takes a step, counted from 0, and the steps of the run, and returns a factor of
            the peak rate; the same on every rank. The warm-up is another factor. None: the option
            ``schedule`` decides.
    """

    model: Factory | None = None
    data: Factory | None = None
    loss: LossFunction = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": count_correct})
    optimizer: Factory | None = None
    schedule: RateSchedule | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError for what is no function."""
        for name in OWN:
            _check_factory(name, getattr(self, name))
        _check_function("loss", self.loss)
        if not isinstance(self.metrics, Mapping):
            raise ConfigurationError(
                f"metrics: expected functions by name, for example {{'gap': gap}}, found "
                f"{_name(self.metrics)}"
            )
        for key, metric in self.metrics.items():
            if not isinstance(key, str):
                raise ConfigurationError(f"metrics: expected names, found {_name(key)}")
            _check_function(f"metric {key}", metric)


def _check_factory(name: str, found: object) -> None:
    what = OWN[name]
    advice = ""
    if isinstance(found, nn.Module | DataSet):
        # A module can be called, too: with inputs.
        advice = ": give a function that makes it"
    elif isinstance(found, str):
        advice = f": give a name as the option {name}, not in a Task"
    elif found is None or (callable(found) and not isinstance(found, torch.optim.Optimizer)):
        return
    raise ConfigurationError(
        f"{name}: expected a function that returns {what}, found {_name(found)}{advice}"
    )


def _check_function(what: str, found: object) -> None:
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    if is_class or not callable(found):
        advice = ": give an instance, called with ()" if is_class else ""
        raise ConfigurationError(
            f"{what}: expected a function of outputs and targets, found {_name(found)}{advice}"
        )


def _name(found: object) -> str:
    if isinstance(found, type):
        return f"the class {found.__name__}"
    plain = isinstance(found, str | int | float)
    return f"{found!r} ({type(found).__name__})" if plain else f"a {type(found).__name__}"


def add_test_metrics(task: Task, classes: int) -> Task:
    """The task with what is only reported of test samples, for the loss and metric of mpiddp.

    Among few classes five hold nearly every sample, which says nothing.
    """
    if task.metrics.get("accuracy") is not count_correct or classes < MANY:
        return task
    own = {name: metric for name, metric in task.metrics.items() if name != "accuracy"}
    return replace(task, metrics={"accuracy": count_correct, "top5_accuracy": count_top5, **own})


def add_perplexity(task: Task, targets: Any, average: Average) -> Average:
    """The averages with the perplexity, if targets are sequences: (samples, length)."""
    if task.loss is not cross_entropy or not isinstance(targets, torch.Tensor) or targets.dim() < 2:
        return average
    perplexity = math.exp(min(average.loss, LARGEST_EXPONENT))
    return replace(average, metrics={**average.metrics, "perplexity": perplexity})


def find_task(configuration: Configuration, given: Task | None) -> tuple[Task, Configuration]:
    """Return the task that is given, or else the one that the options name, and the options.

    The task's model and data are not None, and the options have their names. Raises
    ConfigurationError.
    """
    task = given or Task()
    if configuration.task is not None and given is None:
        task = call_factory("task", find_factory("task", configuration.task), Task)
    names: dict[str, Any] = name_own(task, vars(configuration))
    configuration = replace(configuration, **names).complete()
    chosen: dict[str, Any] = {
        name: find_factory(name, reference)
        for name in ("optimizer", "schedule")
        if getattr(task, name) is None and ":" in (reference := getattr(configuration, name))
    }
    return (
        replace(
            task,
            model=task.model or partial(models.build, configuration.model),
            data=task.data or partial(load, configuration),
            **chosen,
        ),
        configuration,
    )


def name_own(task: Task, options: Mapping[str, Any]) -> dict[str, str]:
    """The options that a task decides. Raises ConfigurationError if they say something else."""
    if not isinstance(task, Task):
        raise ConfigurationError(f"task: expected an mpiddp.training.Task, found {_name(task)}")
    names = {}
    for option in OWN:
        own, chosen = getattr(task, option), options.get(option)
        usual = getattr(Configuration, option)
        if own is None:
            continue
        names[option] = describe(own)
        if chosen not in (None, usual, names[option]):
            raise ConfigurationError(
                f"{option} = {chosen!r} cannot be combined with a task that has {option} of its "
                f"own ({names[option]}): leave out one of them"
            )
    return names


def choose_loss(task: Task, label_smoothing: float) -> LossFunction:
    """The loss of training. Raises ConfigurationError if its labels cannot be smoothed."""
    if label_smoothing == 0:
        return task.loss
    if task.loss is not cross_entropy:
        raise ConfigurationError(
            f"label_smoothing = {label_smoothing} cannot be combined with a task that has its "
            "own loss: leave out one of them"
        )
    return partial(cross_entropy, label_smoothing=label_smoothing)


def build_model(task: Task, data: DataSet) -> nn.Module:
    """A new module, on the CPU. Raises ConfigurationError."""
    assert task.model is not None
    module = call_factory("model", task.model, nn.Module, shape=data.shape, classes=data.classes)
    if not any(each.requires_grad for each in module.parameters()):
        raise ConfigurationError(
            f"model: expected parameters to train, found none in {type(module).__name__}"
        )
    return module


def check_task(task: Task, module: nn.Module, batch: Batch, classes: int = 0) -> None:
    """Check the names of a task's metrics, and try the task on one sample of ``batch``.

    The batch lies on the module's device. Nothing is left of it. Raises ConfigurationError if
    model, data, loss and metrics do not fit; ``classes``: those of the data.
    """
    reserved = {each.name for each in (*fields(Row), *fields(StepsRow))} & set(task.metrics)
    if reserved:
        name = reserved.pop()
        raise ConfigurationError(f"metrics: {name!r} is a name of mpiddp's own: choose another")
    inputs, targets, _ = batch.first()
    is_training, device = module.training, batch.device
    module.eval()
    with fork_generators(device):
        sample = f"a sample of shape {find_shape(inputs)}"
        outputs = _try("model", sample, call_model, module, inputs)
        shapes = f"outputs of shape {_shape(outputs)} and targets of shape {_shape(targets)}"
        functions = {"loss": task.loss, **{f"metric {name}": f for name, f in task.metrics.items()}}
        for what, function in functions.items():
            found = _try(what, shapes, function, outputs, targets)
            if not isinstance(found, torch.Tensor) or found.dim() != 0:
                kind = _shape(found) if isinstance(found, torch.Tensor) else type(found).__name__
                raise ConfigurationError(
                    f"{what}: expected a tensor with one number, of shape (), found {kind}"
                )
            if what == "loss" and not found.requires_grad:
                raise ConfigurationError(
                    "loss: expected a tensor that depends on the model's parameters, found one "
                    "without a gradient (detached, or of whole numbers)"
                )
    module.train(is_training)
    if task.loss is cross_entropy and outputs.shape[1] < classes:
        raise ConfigurationError(
            f"model: expected a score for each of {classes} classes of the data, found "
            f"{outputs.shape[1]} in outputs of shape {_shape(outputs)}"
        )


def _try(what: str, found: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # A user's code.
        raise failed(what, f"does not take {found}", error) from error


def _shape(value: Any) -> object:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
