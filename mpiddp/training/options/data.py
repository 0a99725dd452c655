"""Options of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mpiddp.training.options.checks import REFERENCE, check, check_reference, one_of
from mpiddp.training.registry import DATASETS


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is trained on."""

    data: Annotated[str, one_of([*DATASETS, REFERENCE])] = "digits"
    """Data set."""

    batch_size: int = 16
    """Batch, in samples per rank and step."""

    last_batch: Literal["weighted", "drop"] = "weighted"
    """The last step of an epoch, where the samples are too few for it: every rank's gradient counts
    by its number of samples, or the step is left out."""

    samples: int = 2000
    """Size of the synthetic and toy data, in samples; a fifth is for testing."""

    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Where a sample cannot be read: end the run, or leave out the sample."""

    def __post_init__(self) -> None:
        check_reference("data", self.data, list(DATASETS))
        check("batch_size", self.batch_size >= 1, "1 or more", self.batch_size)
        check("samples", self.samples >= 2, "2 or more", self.samples)
