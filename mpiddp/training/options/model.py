"""Options of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mpiddp.training.options.checks import check_choice, one_of
from mpiddp.training.registry import MODELS

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained."""

    model: Annotated[str, one_of([AUTO, *MODELS])] = AUTO
    """Model; auto takes the one that fits the data."""

    def __post_init__(self) -> None:
        check_choice("model", self.model, [AUTO, *MODELS])
