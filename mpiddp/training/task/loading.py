"""Has all ranks load the same data set, or refuse it alike."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import torch

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.training.data.data_sets import DataSet, SampleStream, Split, StreamError, by_position
from mpiddp.training.data.device_data import place
from mpiddp.training.data.download import fetch_on_all
from mpiddp.training.data.factories import call_factory, describe, failed
from mpiddp.training.data.reading import BatchReading
from mpiddp.training.data.samples import Batch, BatchError, Key, Samples, UnreadableSampleError
from mpiddp.training.data.structure import FormError, find_sample_shape, list_leaves
from mpiddp.training.options.config import Configuration
from mpiddp.training.task.task import Task, cross_entropy

IGNORED = -100
"""The label that torch's cross entropy leaves out."""


def load_on_all(configuration: Configuration, task: Task, session: Session) -> DataSet:
    """Return the task's data. Collective.

    Raises ConfigurationError, on all ranks alike, if one of them cannot load it or has another.
    """
    if configuration.download:
        settle(session, fetch_on_all(configuration.data, configuration.data_dir, session))
    data: DataSet | None = None
    problem = digest = ""
    try:
        skips = configuration.on_bad_sample == "skip"
        data = load_data(task, configuration.seed, configuration.data, skips=skips)
        _check_streams(configuration, data)
        digest = data.digest()
    except ConfigurationError as error:
        problem = str(error)
    except (StreamError, FormError) as error:
        problem = f"data: {error}, in {configuration.data}"
    except OSError as error:
        problem = f"data: cannot read {configuration.data}: {error}"
    settle(session, problem)
    assert data is not None
    session.agree(data.classes, f"number of classes of the data set {configuration.data}")
    session.agree(digest, f"data set {configuration.data}")
    return data


def load_data(task: Task, seed: int, name: str = "", *, skips: bool = False) -> DataSet:
    """Raises ConfigurationError, also if a split is empty or its shape cannot be read.

    Args:
        name: of the data, for messages; by default that of the task's function.
        skips: whether samples that cannot be read are left out.
    """
    assert task.data is not None
    data = call_factory("data", task.data, DataSet, seed=seed)
    name = name or describe(task.data)
    _check_sizes(data, name)
    _check_labels(task, data, name)
    train = by_position(data.train, seed)
    data = replace(data, train=train, test=by_position(data.test, seed))
    if data.sample_shape is not None:
        return data
    # Read only until one has been found; an index or a file may be wrong.
    problem: Exception | None = None
    for position in range(len(train)):
        try:
            return replace(data, sample_shape=find_sample_shape(train[position]))
        except FormError as error:
            raise ConfigurationError(f"data: {error} in {name}") from None
        except Exception as error:  # A data set's own.
            problem = problem or error
            if not skips:
                break
    assert problem is not None
    what = "no sample" if skips else "the first sample"
    can = "can" if skips else "cannot"
    raise failed("data", f"{what} of {name} {can} be read", problem) from problem


def _check_sizes(data: DataSet, name: str) -> None:
    for each in ("train", "test"):
        split = getattr(data, each)
        try:
            samples = len(split)
        except Exception as error:  # A data set's own.
            what = f"the samples of {each} of {name} cannot be counted"
            if hasattr(split, "__iter__"):
                what += "; what is iterated needs a __len__, the samples of an iteration"
            raise failed("data", what, error) from error
        if samples == 0:
            raise ConfigurationError(f"data: expected samples, found none in {each} of {name}")
        for features in list_leaves(split.features) if isinstance(split, Split) else []:
            if len(features) != samples:
                raise ConfigurationError(
                    f"data: expected as many features as labels in {each} of {name}, found "
                    f"{len(features)} and {samples}"
                )
    classes: Any = data.classes
    if not isinstance(classes, Integral) or int(classes) < 0:
        raise ConfigurationError(
            f"data: expected the number of classes (0 for none) of {name}, found {classes!r}"
        )


def _check_streams(configuration: Configuration, data: DataSet) -> None:
    """Raises ConfigurationError for options that iterable data cannot have."""
    if not any(isinstance(each, SampleStream) for each in (data.train, data.test)):
        return
    if configuration.workers > 1:
        raise ConfigurationError(
            "workers: expected at most 1 for iterable data, since each would iterate over all "
            f"samples, found {configuration.workers}"
        )
    if configuration.on_bad_sample == "skip":
        raise ConfigurationError(
            "on_bad_sample: expected stop for iterable data, since an exception ends the "
            "iteration, found skip: catch it in __iter__"
        )


def _check_labels(task: Task, data: DataSet, name: str) -> None:
    """Of data in memory. On a GPU a wrong one would end the run without its place."""
    if task.loss is not cross_entropy or data.classes == 0:
        return
    for what in ("train", "test"):
        split = getattr(data, what)
        labels = split.labels if isinstance(split, Split) else np.zeros(0)
        if labels.dtype != np.int64:
            continue
        bad = labels[((labels < 0) & (labels != IGNORED)) | (labels >= data.classes)]
        if bad.size:
            raise ConfigurationError(
                f"data: expected labels from 0 to {data.classes - 1} in {what} of {name}, found "
                f"{bad[0]}"
            )


def settle(session: Session, problem: str) -> None:
    """Raise ConfigurationError on all ranks if any has a problem. Collective."""
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
    skips, seed = configuration.on_bad_sample == "skip", configuration.seed
    return (
        Samples(place(by_position(data.train, seed), device), "training", seed, skips),
        Samples(place(by_position(data.test, seed), device), "test", seed, skips),
    )


def choose_reading(configuration: Configuration, session: Session) -> BatchReading:
    return BatchReading(configuration.workers, pins=session.device.type != "cpu")


def read_first(samples: Samples, count: int, session: Session) -> Batch:
    """A batch of the first samples, on the rank's device.

    If samples that cannot be read are left out, it has others in their place, if there are any.
    Raises UnreadableSampleError, and ConfigurationError if samples make no batch.
    """
    positions = list(range(count))
    answer = samples[Key(1, positions)]
    if isinstance(answer.problem, UnreadableSampleError) and samples.skips:
        positions = samples.find_readable(Key(1, list(range(len(samples.split)))), count)
        answer = samples[Key(1, positions)] if positions else answer
    if isinstance(answer.problem, BatchError):
        raise ConfigurationError(f"data: {answer.problem}")
    if answer.batch is None:
        assert answer.problem is not None
        raise answer.problem
    return answer.batch.to(session.device)
