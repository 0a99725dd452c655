"""``--track``: sends rank 0's metrics to TensorBoard, MLflow or Weights & Biases.

Their libraries do the work, in a thread of their own: a server that does not answer holds up no
training, and an error ends the tracking, with one warning, and nothing else.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from mpiddp.errors import ConfigurationError
from mpiddp.training.records.history import STEPS
from mpiddp.training.records.metrics import Row, StepsRow

PROJECT = "mpiddp"
CLOSE_SECONDS = 60.0
"""How long a tracker may take at the end of a training."""
_UNTRACKED = ("attempt", "kind", "step", "staleness", "network", "parameters")
"""Fields of a row that are no curves."""


@dataclass(frozen=True)
class Run:
    """What is tracked."""

    directory: Path
    configuration: Mapping[str, Any]
    """Options by name, as JSON can hold them."""
    step: int
    """Steps taken before: what was told of later ones, by an earlier attempt, does not count."""


class Client(Protocol):
    """One of the libraries, in the tracker's thread."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Values by name, after so many steps."""

    def close(self, *, is_done: bool) -> None:
        """``is_done``: whether the training was finished."""


class TensorBoard:
    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.directory / "tensorboard")
        self._writer: Any = SummaryWriter(folder, purge_step=run.step + 1)
        options = "\n".join(f"    {name} = {value}" for name, value in run.configuration.items())
        self._writer.add_text("configuration", options, run.step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, is_done: bool) -> None:
        self._writer.close()


class MLflow:
    """A run that is started again goes on under its id. Without MLFLOW_TRACKING_URI the files are
    in ``mlruns``, beside the runs."""

    def __init__(self, run: Run) -> None:
        # By name: the type checker has no need of the library.
        self._mlflow = mlflow = import_module("mlflow")
        if not mlflow.is_tracking_uri_set():
            # MLflow 3 writes to files only if this variable of its settings allows it.
            variables = mlflow.environment_variables
            if hasattr(variables, "MLFLOW_ALLOW_FILE_STORE"):
                variables.MLFLOW_ALLOW_FILE_STORE.set(True)
            mlflow.set_tracking_uri((run.directory.parent / "mlruns").resolve().as_uri())
        experiment = mlflow.set_experiment(PROJECT)
        place = str(run.directory.resolve()).replace("'", "")
        found = mlflow.MlflowClient().search_runs(
            [experiment.experiment_id], f"tags.`mpiddp.directory` = '{place}'", max_results=1
        )
        if found and run.step > 0:
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.start_run(run_name=run.directory.name, tags={"mpiddp.directory": place})
            mlflow.log_params(dict(run.configuration))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, *, is_done: bool) -> None:
        self._mlflow.end_run("FINISHED" if is_done else "KILLED")


class WeightsAndBiases:
    """A run that is started again goes on: its id is the run's name."""

    def __init__(self, run: Run) -> None:
        name = run.directory.name
        self._run = import_module("wandb").init(
            project=PROJECT,
            name=name,
            id="".join(c if c.isalnum() or c in "-_." else "-" for c in name),
            dir=str(run.directory),
            config=dict(run.configuration),
            resume="allow" if run.step > 0 else None,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)


CLIENTS: dict[str, Callable[[Run], Client]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}
"""By the name of the library's module, which is also that of the extra that installs it."""


def check_library(name: str) -> None:
    """Raise ConfigurationError if the library is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigurationError(f"track: {name} is not installed: pip install 'mpiddp[{name}]'")


class Tracker:
    """Of rank 0."""

    def __init__(self, name: str, run: Run, warn: Callable[[str], object]) -> None:
        """``warn``: called with the first error."""
        self._name, self._warn = name, warn
        self._rows: SimpleQueue[Row | StepsRow | bool] = SimpleQueue()
        """Rows, and at the end whether the training was finished."""
        # A daemon: the process can end while a server does not answer.
        self._thread = threading.Thread(
            target=self._work, args=(run,), name="mpiddp-tracker", daemon=True
        )
        self._thread.start()

    def log(self, row: Row | StepsRow) -> None:
        self._rows.put(row)

    def close(self, *, is_done: bool) -> None:
        """Wait until the library has taken all rows, up to CLOSE_SECONDS."""
        self._rows.put(is_done)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"{self._name} did not take all metrics within {CLOSE_SECONDS:g} s")

    def _work(self, run: Run) -> None:
        try:
            client = CLIENTS[self._name](run)
            while not isinstance(row := self._rows.get(), bool):
                client.log(list_values(row), row.step)
            client.close(is_done=row)
        except Exception as error:  # A tracker must not end a training.
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._warn(f"{self._name} does not take the metrics, and gets no more: {text}")


def list_values(row: Row | StepsRow) -> dict[str, float]:
    """The numbers of a row by name; of lists, one for each rank, the mean.

    Those of steps have names of their own, ``steps/loss``, since an epoch may end with them.
    """
    values: dict[str, float] = {}
    if isinstance(row, StepsRow):
        found = row.list_values().items()
        return {f"{STEPS}/{name}": value for name, value in found if name not in _UNTRACKED}
    for name, value in row.list_values().items():
        if name in _UNTRACKED or value is None:
            continue
        if isinstance(value, dict):
            values |= {f"{name}/{part}": each for part, each in value.items()}
        elif isinstance(value, list):
            known = [each for each in value if each is not None]
            if known:
                values[name] = sum(known) / len(known)
        else:
            values[name] = value
    return values
