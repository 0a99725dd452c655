"""Has all ranks load the same data set, or refuse it alike."""

from __future__ import annotations

import torch

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.training.config import Configuration
from mpiddp.training.data import DataSet
from mpiddp.training.device_data import place
from mpiddp.training.download import fetch_on_all
from mpiddp.training.factories import failed
from mpiddp.training.reading import Reading
from mpiddp.training.samples import Batch, Key, Samples
from mpiddp.training.task import Task, load_data


def load_on_all(configuration: Configuration, task: Task, session: Session) -> DataSet:
    """Return the task's data. Collective.

    Raises ConfigurationError, on all ranks alike, where one of them cannot load it or has another.
    """
    if configuration.download:
        settle(session, fetch_on_all(configuration.data, configuration.data_dir, session))
    data: DataSet | None = None
    problem = ""
    try:
        data = load_data(task, configuration.seed)
    except ConfigurationError as error:
        problem = str(error)
    except OSError as error:
        problem = f"data: cannot read {configuration.data}: {error}"
    settle(session, problem)
    assert data is not None
    session.agree(data.classes, f"number of classes of the data set {configuration.data}")
    session.agree(data.digest(), f"data set {configuration.data}")
    return data


def settle(session: Session, problem: str) -> None:
    """Raise ConfigurationError on all ranks where any has a problem. Collective."""
    found = session.gather(problem)
    bad = [rank for rank, each in enumerate(found) if each]
    if not bad:
        return
    some = f" (on {len(bad)} of {len(found)} ranks, the first of them rank {bad[0]})"
    only = "" if len(bad) == len(found) else some
    raise ConfigurationError(found[bad[0]] + only)


def choose_samples(
    configuration: Configuration, data: DataSet, device: torch.device
) -> tuple[Samples, Samples]:
    """The training and the test samples, as the options have them read, for this device."""
    skips = configuration.on_bad_sample == "skip"
    return (
        Samples(place(data.train, device), "training", configuration.seed, skips),
        Samples(place(data.test, device), "test", configuration.seed, skips),
    )


def choose_reading(configuration: Configuration, session: Session) -> Reading:
    return Reading(configuration.workers, pins=session.device.type == "cuda")


def read_first(samples: Samples, count: int, session: Session) -> Batch:
    """A batch of the first samples, on the rank's device.

    Raises UnreadableSampleError, and ConfigurationError where samples make no batch of tensors.
    """
    try:
        answer = samples[Key(1, list(range(count)))]
    except Exception as error:  # Each can be read: it is torch's collation that raises.
        raise failed("data", "the first samples do not make a batch", error) from error
    if answer.batch is None:
        assert answer.problem is not None
        raise answer.problem
    for what in ("inputs", "targets"):
        found = getattr(answer.batch, what)
        if not isinstance(found, torch.Tensor):
            raise ConfigurationError(
                f"data: expected a batch whose {what} are one tensor, found {type(found).__name__}"
            )
    return answer.batch.to(session.device)
