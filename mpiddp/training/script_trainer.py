"""The trainer for scripts: ``mpiddp.training.Trainer``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mpiddp.errors import ConfigurationError, MpiddpError, PreemptedError
from mpiddp.launch.session import Session, find_failure_handler, find_session
from mpiddp.launch.startup import open_session
from mpiddp.options.fields import list_fields
from mpiddp.process.preemption_signals import PreemptionSignals, find_signals, parse_signals
from mpiddp.training.options.config import Configuration, from_keywords
from mpiddp.training.options.groups.launch import TrainerLaunchOptions
from mpiddp.training.prediction import Predictor, load_predictor, make_predictor
from mpiddp.training.preparation import Training, agree
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.run_directory import find_path
from mpiddp.training.run_output import say
from mpiddp.training.shared_run import describe_finished, find_finished
from mpiddp.training.task.task import Task, find_task, name_own
from mpiddp.training.trainer import RunHandlers, Step, run_steps

COMMAND_ONLY = ("task", "evaluate_only", "log_dir", "console", "label", "quiet", "debug")
"""Options of commands: a script has its output and its task already, and has imported torch."""


class Trainer:
    """Trains in a script as ``python -m mpiddp.train`` does on the command line.

        from mpiddp.training import Task, Trainer
        trainer = Trainer(Task(model=Net), data="digits", epochs=3)
        row = trainer.fit()

    Start the script with ``python -m mpiddp -n 2 script.py``, mpirun or srun. Checkpoints,
    resuming, metrics and the run's directory are those of the command.

    Attributes:
        configuration: the resolved options.
        session: that of `mpiddp.init`. The one that is open is used; if there is none, it is
            started, and closed when the script ends.
        row: the last epoch's metrics, once training has ended; else None.
        model: the trained model.
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        """Collective: every process of the launch makes one.

        Args:
            task: what is trained; what it leaves open is decided by the options.
            options: those of ``python -m mpiddp.train --help``, named as in TOML.

        Raises ConfigurationError.
        """
        self._task = task or Task()
        with named_as_keywords():
            self.configuration = _configure(self._task, options)
        self.session, self._signals = _find_session(self.configuration)
        self.row: Row | None = None
        self._predictor: Predictor | None = None
        self._weights: Path | None = self.configuration.weights
        """Whose they are as long as nothing was trained here."""

    def fit(self) -> Row:
        """Train to the end, and return the last epoch's metrics; collective.

        A run of this name that an earlier job has finished with the same options is not trained
        again: its last row is returned. It is refused with other options, and if this job has
        finished it, or left it before its first epoch's end.

        A job that is preempted ends with exit code 75 once its checkpoint is written. Raises
        ConfigurationError, MpiddpError.
        """
        with named_as_keywords():
            for step in self.steps():
                step.take()
        if self.row is None:
            raise ConfigurationError(
                f"the run {find_path(self.configuration)} was left before its first epoch's end: "
                "resume=PATH goes on from a checkpoint, or choose another name"
            )
        return self.row

    def steps(self) -> Iterator[Step]:
        """Yields this rank's steps, for a loop of the script's own; collective.

            for step in trainer.steps():
                step.take()

        Each step must be taken before the next one. Between them, evaluations, checkpoints and
        metrics are made when they are due. A run that has finished has none. Errors are those of
        `fit`.

        A loop may be left early, by all ranks after the same step: what was trained is saved, and
        the run has ended well, once the session is closed or another training begins.
        """

        def run() -> Generator[Step, None, None]:
            self.session.do_postponed()
            # A script that leaves its loop may keep the iterator, which is not closed then.
            self.session.postpone(partial(_leave, steps))
            with named_as_keywords():
                yield from self._take_steps()

        steps = run()
        return steps

    @property
    def model(self) -> nn.Module:
        """The model that was trained, on this rank's device; collective if it must be loaded.

            model = trainer.model.eval()

        It has the weights that ``export`` writes. With FSDP they are in parts. Before a training
        they are those of the option ``weights``, and those of its last checkpoint if `fit` has
        found the run finished. Raises ConfigurationError if there are none yet.
        """
        return self._find_predictor().module

    def predict(self, data: Any) -> Any:
        """The model's outputs for all samples, in their order; collective.

            scores = trainer.predict(torch.eye(10))
            classes = scores.argmax(dim=1)

        Each rank predicts its share, and all get the whole: a tensor (samples, …) on the CPU, or
        what else the model returns, of such tensors.

        Args:
            data: an array or tensor (samples, …), or any object with ``__len__`` and
                ``__getitem__``, the same on every rank. Its samples are the model's inputs, as in
                the training data; a target, if there is one, is not looked at.

        Raises ConfigurationError.
        """
        with named_as_keywords():
            return self._find_predictor().predict(data)

    def _find_predictor(self) -> Predictor:
        if self._predictor is None:
            if self._weights is None:
                raise ConfigurationError(
                    "model: nothing is trained yet: call fit() first, or give weights=PATH"
                )
            task, configuration = find_task(self.configuration, self._task)
            if self._weights != configuration.weights:
                configuration = replace(configuration, weights_prefix="", weights_except="")
            configuration = replace(configuration, weights=self._weights)
            self._predictor = load_predictor(configuration, task, self.session)
        return self._predictor

    def _note(self, training: Training) -> None:
        self._predictor = make_predictor(training)

    def _take_steps(self) -> Generator[Step, None, None]:
        handler = find_failure_handler(self.session)
        task, configuration = find_task(self.configuration, self._task)
        agree(configuration, self.session)
        finished = find_finished(configuration, self.session, handler)
        if finished is not None:
            say(self.session, describe_finished(finished, configuration))
            self.row, self._weights = finished.row, finished.checkpoint
            self._predictor = None
            return
        try:
            handlers = RunHandlers(handler, self._signals, self._note)
            self.row = yield from run_steps(configuration, task, self.session, handlers)
        except PreemptedError as error:
            self.session.close()
            handler.leave(error.exit_code)


@contextmanager
def named_as_keywords() -> Iterator[None]:
    """Has errors name options as a script's keywords: ``name=``, not ``--name``."""
    try:
        yield
    except MpiddpError as error:
        if error.args:
            error.args = (_name_keywords(str(error.args[0])), *error.args[1:])
        raise


def _name_keywords(text: str) -> str:
    known = {each.flag: each for each in list_fields(Configuration)}

    def name(match: re.Match[str]) -> str:
        flag, space, value = match.groups()
        field = known.get(flag)
        if field is None:
            return match[0]
        if value in (*field.choices, "auto", "never"):
            return f"{field.name}={value!r}"
        space *= value.isalpha() and value.islower()
        return f"{field.name}={space}{value}"

    return re.sub(r"(--[a-z][a-z-]*)( ?)((?<= )\S*[A-Z./]\S*|[a-z]+\b|)", name, text)


def _leave(steps: Generator[Step, None, None]) -> None:
    """End a loop that was left; none while it is running, such as one that is preempted."""
    if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:
        steps.close()


def _configure(task: Task, options: dict[str, Any]) -> Configuration:
    for name in COMMAND_ONLY:
        if options.get(name) is not None:
            raise ConfigurationError(f"{name}: an option of python -m mpiddp.train, not of Trainer")
    return from_keywords({**options, **name_own(task, options)})


def _find_session(configuration: Configuration) -> tuple[Session, PreemptionSignals]:
    """The session that is open, or a new one; and what notes the cluster's requests."""
    launch = {each.name: getattr(configuration, each.name) for each in fields(TrainerLaunchOptions)}
    session = find_session()
    signals = session.signals if session is not None else None
    if session is None or not session.has_group:
        session = open_session(**launch)
    else:
        for each in fields(TrainerLaunchOptions):
            if launch[each.name] != each.default:
                raise ConfigurationError(
                    f"{each.name} = {launch[each.name]!r} comes too late: the session is open; "
                    "give it to mpiddp.init"
                )
    signals = signals or find_signals()
    signals.listen(parse_signals(configuration.preempt_signal))
    return session, signals
