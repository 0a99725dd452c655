"""Options of checkpoints and of plain weights."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import REFERENCE, check, check_reference, check_text
from mpiddp.options.fields import Argument
from mpiddp.process.preemption_signals import parse_signals
from mpiddp.training.options.groups.effects import FREE

AUTO, NEVER = "auto", "never"
SHARE = 0.01
"""Of the time, that writing checkpoints at the end of epochs may take with ``auto``."""


@dataclass(frozen=True)
class Interval:
    """Between two checkpoints; what is None does not count."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    share: float | None = None
    """Of the time, that those after epochs may take."""


def parse_interval(text: str) -> Interval | None:
    """The interval that ``500steps``, ``10epochs``, ``15min`` or ``auto`` means; None for
    ``never``.

    Raises ConfigurationError.
    """
    if text == NEVER:
        return None
    if text == AUTO:
        return Interval(epochs=1, seconds=15 * 60.0, share=SHARE)
    match = re.fullmatch(r"(\d+) ?(steps?|epochs?|min)", text)
    if match is None or int(match[1]) == 0:
        raise ConfigurationError(
            "save_every: expected, for example, 500steps, 10epochs, 15min, auto or never, found "
            f"{text!r}"
        )
    number, unit = int(match[1]), match[2]
    if unit == "min":
        return Interval(seconds=60.0 * number)
    return Interval(steps=number) if unit.startswith("step") else Interval(epochs=number)


def describe_interval(text: str) -> str:
    """The console's line."""
    if text == NEVER:
        return "Checkpoints: none"
    every = re.sub(r"^(\d+) ?", r"every \1 ", text)
    if text == AUTO:
        every = f"after each epoch if writing takes up to {SHARE:.0%} of the time, every 15 min"
    return f"Checkpoints: {every}, and at the end (--save-every {text})"


PLACES = ("{epoch}", "{step}")
"""In the name of the file to export: each checkpoint leaves one."""


def has_places(path: Path) -> bool:
    return any(place in path.name for place in PLACES)


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is saved, and where a run begins."""

    save_every: Annotated[str, Argument("INTERVAL"), FREE] = AUTO
    """Interval between checkpoints: 500steps, 10epochs, 15min, or never; auto: after each epoch,
    unless writing takes more than 1% of the time, and every 15min. Unless never, there is one at
    the end, too."""

    resume: Annotated[str, Argument("auto|never|PATH"), FREE] = "auto"
    """Where to start: at the run's newest valid checkpoint (auto), at the one at PATH (of a run's
    directory, its newest one), or from the beginning (never)."""

    keep: Annotated[int, FREE] = 2
    """Number of newest checkpoints to keep, beside the one with the best test accuracy, or the
    lowest test loss for a task that has no accuracy."""

    checkpoint_dir: Annotated[Path | None, FREE] = None
    """Directory of the run's checkpoints (default: checkpoints in the run's directory)."""

    on_save_error: Annotated[Literal["continue", "stop"], FREE] = "continue"
    """If a checkpoint cannot be written: go on without it, or end the run. The last one must be
    written."""

    preempt_signal: Annotated[str, Argument("SIGNALS"), FREE] = "USR2,USR1,TERM"
    """Signals of a preemption, after which all ranks save a checkpoint and leave with exit code 75:
    USR2, USR1 and TERM, or some of them."""

    export: Annotated[Path | None, FREE] = None
    """File for the trained weights, a plain state_dict; FILE.safetensors for that format. With
    {epoch} or {step} in its name, such as weights-{epoch}.pt, each checkpoint leaves one, and
    latest.pt leads to the newest."""

    evaluate_only: Annotated[bool, FREE] = False
    """Write predictions for the test samples, from the weights given; nothing is trained."""

    predict: Annotated[str | None, Argument("FILE.npy|" + REFERENCE), FREE] = None
    """With evaluate_only: samples to predict in place of the test samples, without targets; an
    array (samples, …), or a function that returns samples by position."""

    weights: Path | None = None
    """Weights to begin with, or for evaluate_only: a state_dict (.pt, .safetensors), a checkpoint,
    or a run's directory, for its newest one. A run that resumes does not read them again."""

    weights_prefix: Annotated[str, Argument("PREFIX")] = ""
    """Of weights, take only the tensors whose names begin with this and a dot, and cut it off: with
    encoder, encoder.conv.bias becomes conv.bias."""

    weights_except: Annotated[str, Argument("NAMES")] = ""
    """Tensors that the model does not take from weights and keeps as they are, such as those of a
    new head: names or patterns, with commas (fc.*,norm.bias)."""

    def __post_init__(self) -> None:
        parse_interval(self.save_every)
        check("resume", self.resume != "", "auto, never or a path", self.resume)
        check("keep", self.keep >= 1, "1 or more", self.keep)
        parse_signals(self.preempt_signal)
        check_text(self, "checkpoint_dir", "resume", "export", "weights", "weights_prefix")
        if self.predict is not None and not self.predict.endswith(".npy"):
            check_reference("predict", self.predict, ["FILE.npy"])
        _check_export(self.export)


def _check_export(path: Path | None) -> None:
    text = "" if path is None else str(path)
    is_known = set(re.findall(r"\{.*?\}", os.path.basename(text))) <= set(PLACES)
    is_known &= "{" not in os.path.dirname(text)
    check("export", is_known, f"no braces but {' and '.join(PLACES)}, in the file's name", text)
