"""Options of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import REFERENCE, check_reference
from mpiddp.options.fields import one_of
from mpiddp.training.options.groups.effects import FIXED
from mpiddp.training.options.groups.registry import DATASETS, MODELS

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained."""

    model: Annotated[str, one_of([AUTO, *MODELS, REFERENCE]), FIXED] = AUTO
    """Model; auto takes the one that fits the data."""

    task: Annotated[str | None, one_of([REFERENCE])] = None
    """Function without parameters that returns an mpiddp.training.Task: model, data, loss, metrics,
    optimizer and schedule. What it leaves open is decided by the options model, data, optimizer and
    schedule."""

    def __post_init__(self) -> None:
        check_reference("model", self.model, [AUTO, *MODELS])
        if self.task is not None:
            check_reference("task", self.task, [])


def choose_model(data: str) -> str:
    """The model that fits a data set.

    Raises ConfigurationError for data of the user's own.
    """
    if data not in DATASETS:
        raise ConfigurationError(
            f"model = {AUTO!r} cannot be combined with data = {data!r}: give --model"
        )
    return DATASETS[data].model
