"""Options of the data and of the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import REFERENCE, at_least, check, check_reference, check_text, quote
from mpiddp.options.fields import Argument, one_of
from mpiddp.training.options.groups.effects import FIXED, FREE
from mpiddp.training.options.groups.registry import DATASETS, MODELS

AUTO = "auto"
AUTO_BATCH = 0
"""The batch size that is found by trial."""


def _read_batch(text: str) -> int:
    try:
        return AUTO_BATCH if text == "auto" else at_least(1)(text)
    except ValueError:
        raise ValueError(f"expected 1 or more samples, or auto, found {quote(text)}") from None


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is trained on."""

    data: Annotated[str, one_of([*DATASETS, REFERENCE]), FIXED] = "digits"
    """Data set."""

    batch_size: Annotated[int, Argument("N|auto", _read_batch)] = 16
    """Batch, in samples per rank and step; auto tries at the start how many fit into memory, and
    takes as many."""

    last_batch: Literal["weighted", "drop"] = "weighted"
    """The last step of an epoch, if there are too few samples for it: weight each rank's gradient
    by its number of samples, or drop the step."""

    data_dir: Annotated[Path, FREE] = Path("data")
    """Directory of mnist, cifar10 and imagefolder."""

    download: Annotated[bool, FREE] = False
    """Download mnist or cifar10 into the data directory, unless it is there."""

    workers: Annotated[int, FREE] = 0
    """Processes of each rank that read batches ahead; 0 for none."""

    augment: bool = False
    """Vary training images: crop, and flip (mnist, cifar10, imagefolder)."""

    image_size: Annotated[int, FIXED] = 224
    """Pixels of a side to which imagefolder's images are resized and cropped."""

    samples: Annotated[int, FIXED] = 2000
    """Size of the synthetic and toy data, in samples; a fifth is for testing."""

    shape: Annotated[str, FIXED] = "1x8x8"
    """Shape of a sample of the synthetic data; images are channels x height x width."""

    text: Annotated[Path | None, FIXED] = None
    """File whose bytes are the text (default: one that comes with the package)."""

    context: Annotated[int, FIXED] = 128
    """Bytes of a sample of the text."""

    on_bad_sample: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """If a sample cannot be read: end the run, or skip the sample."""

    def __post_init__(self) -> None:
        check_reference("data", self.data, list(DATASETS))
        check("batch_size", self.batch_size >= AUTO_BATCH, "1 or more", self.batch_size)
        check("workers", self.workers >= 0, "0 or more", self.workers)
        check("image_size", self.image_size >= 1, "1 or more pixels", self.image_size)
        check_text(self, "data_dir", "text")
        check("context", self.context >= 1, "1 or more bytes", self.context)
        parse_shape(self.shape)
        check("samples", self.samples >= 2, "2 or more", self.samples)


def parse_shape(text: str) -> tuple[int, ...]:
    """Read ``3x32x32``. Raises ConfigurationError."""
    good = re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})*", text) is not None
    check("shape", good, "sizes such as 3x32x32", text)
    return tuple(map(int, text.split("x")))


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
