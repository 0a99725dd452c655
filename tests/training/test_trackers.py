"""Metrics reach TensorBoard, MLflow and Weights & Biases, and their errors reach nobody."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_metrics import ROW

from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.training.options.config import parse
from mpiddp.training.records import trackers
from mpiddp.training.records.trackers import Run, Tracker, list_values
from mpiddp.training.trainer import train

COSTS = {"stages": {"read": 0.5}, "sent_bytes": [10, 30], "bandwidth": [None, 5.0]}
TIMED = replace(ROW, **COSTS)


def test_the_numbers_of_a_row_have_names() -> None:
    values = list_values(TIMED)
    assert values["loss"] == ROW.loss and values["accuracy"] == ROW.metrics["accuracy"]
    assert values["stages/read"] == 0.5
    assert values["sent_bytes"] == 20 and values["bandwidth"] == 5
    assert "test_loss" not in values and "parameters" not in values and "step" not in values


# A library that is made up


class Client:
    """Notes what it is told; fails, or does not answer, where it is to."""

    def __init__(self, run: Run) -> None:
        self.logged: list[tuple[Mapping[str, float], int]] = []
        self.ends: list[bool] = []
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.answers.wait(30)
        if self.error is not None:
            raise self.error
        self.logged.append((values, step))

    def close(self, *, is_done: bool) -> None:
        self.ends.append(is_done)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    made = Client(Run(Path(), {}, 0))
    monkeypatch.setitem(trackers.CLIENTS, "wandb", lambda run: made)
    yield made
    made.answers.set()


def make_tracker(warnings: list[str]) -> Tracker:
    return Tracker("wandb", Run(Path("runs/first"), {}, 0), warnings.append)


def test_an_error_is_one_warning_and_ends_the_tracking(client: Client) -> None:
    warnings: list[str] = []
    client.error = OSError("no\nnetwork")
    tracker = make_tracker(warnings)
    for _ in range(3):
        tracker.log(TIMED)
    tracker.close(is_done=True)
    assert warnings == ["wandb does not take the metrics, and gets no more: OSError: no"]


def test_a_server_that_does_not_answer_holds_up_nothing(client, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
    warnings: list[str] = []
    client.answers.clear()
    tracker = make_tracker(warnings)
    tracker.log(TIMED)
    tracker.close(is_done=False)
    assert warnings == ["wandb did not take all metrics within 0.1 s"]


def test_weights_and_biases_is_called_as_its_documentation_says(monkeypatch):
    """https://docs.wandb.ai/ref/python/init/ and /run/: `init`, `Run.log`, `Run.finish`."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, arguments, options))
            return run

        return call

    run = types.SimpleNamespace(log=note("log"), finish=note("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=note("init")))
    for step, resume in ((0, None), (45, "allow")):
        calls.clear()
        client = trackers.WeightsAndBiases(Run(Path("runs/a b#1"), {"epochs": 2}, step))
        client.log({"loss": 1.0}, 90)
        client.close(is_done=False)
        given = {
            "project": "mpiddp", "name": "a b#1", "id": "a-b-1", "dir": "runs/a b#1",
            "config": {"epochs": 2}, "resume": resume,
        }  # fmt: skip
        assert calls == [
            ("init", (), given),
            ("log", ({"loss": 1.0},), {"step": 90}),
            ("finish", (), {"exit_code": 1}),
        ]


# From the trainer


def run_trainer(session: Session, folder: Path, *words: str) -> None:
    common = ["--data", "toy", "--samples", "200", "--epochs", "2", "--name", "first"]
    configuration = parse([*common, "--runs-dir", str(folder), *words])
    train(configuration, session, FailureHandler())


def test_the_trainer_tells_each_epoch(client, session, tmp_path, monkeypatch):
    monkeypatch.setattr("mpiddp.training.shared_run.check_library", lambda name: None)
    run_trainer(session, tmp_path, "--track", "wandb", "--log-every", "5")
    assert [step for _, step in client.logged] == [5, 10, 10, 15, 20, 20]
    assert client.logged[5][0]["test_accuracy"] > 0.5
    names = {"steps/epochs", "steps/loss", "steps/accuracy", "steps/learning_rate", "steps/epoch"}
    assert client.logged[3][0].keys() == names
    assert client.ends == [True]


# The libraries themselves


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_tensorboard_holds_the_rows(session: Session, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run_trainer(session, tmp_path, "--track", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "first" / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("loss")] == [10, 20]
    assert [each.step for each in events.Scalars("stages/forward")] == [10, 20]
    assert "configuration/text_summary" in events.Tags()["tensors"]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_mlflow_holds_the_rows_of_all_attempts(session: Session, tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed")
    run_trainer(session, tmp_path, "--track", "mlflow")
    (tmp_path / "first" / "outcome.json").unlink(missing_ok=True)
    run_trainer(session, tmp_path, "--track", "mlflow", "--epochs", "3")
    (run,) = mlflow.search_runs(experiment_names=["mpiddp"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["data"] == "toy"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [each.step for each in history] == [10, 20, 30]
