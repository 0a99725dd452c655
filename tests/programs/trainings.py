"""Trainings on the ranks of a pool, one after the other: a launch costs more than a small one."""

import copy
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import mpiddp
import wrong_algorithms
from mistakes import hear
from mpiddp.checkpoints.storage.directory import Staging
from mpiddp.checkpoints.storage.shards import _Writer
from mpiddp.errors import MpiddpError
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.training.evaluation import evaluate_only
from mpiddp.training.options.config import parse
from mpiddp.training.prediction import predict_only
from mpiddp.training.task.task import Task, count_correct
from mpiddp.training.trainer import train
from mpiddp.training.wrapping import batch_size


def read_rows(run: Path, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """What ``metrics.jsonl`` in the run's directory has, without these values."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: each for name, each in row.items() if name not in leave_out} for row in rows]


def make_task() -> Task:
    """One that has no accuracy."""
    return Task(metrics={"hits": count_correct})


class Remembering(nn.Linear):
    """A model with a state that checkpoints cannot hold."""

    def get_extra_state(self) -> object:
        return {1, 2}


def build_remembering(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Remembering(shape[0], classes)


def build_normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model that cannot train on one sample."""
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


def make_sgd(parameters: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """The trainer's own, at the same rate in one group and in another."""
    given = {"momentum": 0.9, "weight_decay": 0.0005, "nesterov": True, "fused": True}
    groups = [{"params": [each]} for each in parameters]
    return torch.optim.SGD(groups, learning_rate, **given)


def fall(step: int, steps: int) -> float:
    """The trainer's cosine without a warm-up."""
    return 0.5 * (1 + math.cos(math.pi * (step - 1) / (steps - 1))) if step else 1.0


class Limited(nn.Linear):
    """A layer that has too little memory for more samples than its limit."""

    limit = 10**9

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and len(inputs) > self.limit:
            raise torch.OutOfMemoryError("no memory is left\nfor them")
        return super().forward(inputs)


def build_limited(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(Limited(shape[0], 8), nn.Dropout(), nn.Linear(8, classes))


def run_limited(session: Session, limits: Sequence[int], words: Sequence[str]) -> str:
    """As ``run``; while a batch size is looked for, each rank has its limit. What is said."""
    settle = batch_size.settle

    def settle_limited(*arguments: Any) -> Any:
        with mock.patch.object(Limited, "limit", limits[session.world.rank]):
            return settle(*arguments)

    with mock.patch.object(batch_size, "settle", settle_limited):
        return hear(lambda: run(session, words))


def run(session: Session, *command_lines: Sequence[str]) -> None:
    # Several threads for so small models only wait for each other on a busy machine.
    torch.set_num_threads(1)
    for words in command_lines:
        train(parse(list(words)), session, find_failure_handler(session))


def predict_within(session: Session) -> dict[str, Any]:
    """Predictions in a loop, and after it was left; and of what a rank's own model makes then."""
    torch.set_num_threads(1)
    options = {"data": "toy", "samples": 200, "epochs": 1, "name": "predict"}
    trainer = mpiddp.training.Trainer(Task(build_normalised), **options)
    samples, found = torch.linspace(-1, 1, 70).view(7, 10), dict[str, Any]()
    for step in trainer.steps():
        step.take()
        if step.number == 2:
            break
    found["own"] = copy.deepcopy(trainer.model).eval()(samples).detach().numpy()
    found["within"] = trainer.predict(samples).numpy()
    found["is training"] = trainer.model.training
    session.do_postponed()
    found["left"] = trainer.predict(samples).numpy()
    found["model"] = trainer.model.eval()(samples).detach().numpy()
    found["said"] = hear(lambda: trainer.predict(samples + session.world.rank))
    return found


def predict_beside_servers(session: Session) -> tuple[str, int]:
    """What a prediction in a loop says that one rank does not run, and the length of one after."""
    torch.set_num_threads(1)
    options = {"data": "toy", "samples": 200, "epochs": 1, "name": "beside"}
    servers = {"sync": "parameter-server", "server_placement": "dedicated"}
    trainer, said = mpiddp.training.Trainer(**options, **servers), ""
    for step in trainer.steps():
        step.take()
        said = hear(lambda: trainer.predict(torch.eye(10)))
    return said, len(trainer.predict(torch.eye(10)))


def run_with_bad_saves(session: Session, words: Sequence[str]) -> str:
    """As ``run``; the writer fails in rank 1's second save, and memory in its third one.

    Returns what the error says that ends the training, if any.
    """
    torch.set_num_threads(1)
    saves = 0
    copy, write = Staging.copy, _Writer.write

    def copy_or_fail(staging: Staging, tensors: Any) -> Any:
        nonlocal saves
        saves += 1
        if session.world.rank == 1 and saves == 3:
            raise MemoryError("no room")
        return copy(staging, tensors)

    def write_or_fail(writer: _Writer, *arguments: Any) -> Any:
        if session.world.rank == 1 and saves == 2:
            raise RuntimeError("torn\napart")
        return write(writer, *arguments)

    with (
        mock.patch.object(Staging, "copy", copy_or_fail),
        mock.patch.object(_Writer, "write", write_or_fail),
    ):
        return hear(lambda: run(session, words))


def evaluate(session: Session, words: Sequence[str]) -> None:
    torch.set_num_threads(1)
    configuration = parse(list(words))
    evaluate = evaluate_only if configuration.predict is None else predict_only
    evaluate(configuration, session, find_failure_handler(session))


def evaluate_compiled(session: Session, words: Sequence[str]) -> list[str]:
    """What is compiled meanwhile; it stays as it is."""
    found = []

    def compile_(given: Any, **_: Any) -> Any:
        found.append(type(given).__name__)
        return given

    with mock.patch.object(torch, "compile", compile_):
        evaluate(session, words)
    return found


def refuse(session: Session, *words: str) -> str:
    """Why this training is refused; every rank must refuse it."""
    try:
        run(session, words)
    except MpiddpError as error:
        return f"{error.exit_code}: {error}"
    raise AssertionError(f"{words} trained")


def refuse_wrong(session: Session, *words: str) -> str:
    """As ``refuse``, where the algorithms of `wrong_algorithms` can be named."""
    with wrong_algorithms.registered():
        return refuse(session, *words)


def refuse_different(session: Session) -> str:
    """As ``refuse``, where each rank is given another number of epochs."""
    return refuse(session, "--data", "toy", "--epochs", str(2 + session.world.rank))
