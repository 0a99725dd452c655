"""Options of checkpoints and of plain weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mpiddp.launch.preemption_signals import parse_signals
from mpiddp.training.options.checks import check, check_text
from mpiddp.training.options.effects import FREE
from mpiddp.training.save_interval import parse_interval


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is saved, and where a run begins."""

    save_every: Annotated[str, FREE] = "15min"
    """How often a checkpoint is made: 500steps, 10epochs, 15min, or never; if not never, also at
    the end."""

    resume: Annotated[str, FREE] = "auto"
    """Where a run begins: auto (at its newest valid checkpoint), PATH of one, or never."""

    keep: Annotated[int, FREE] = 2
    """How many checkpoints are kept: the newest, and beside them the one with the best test
    accuracy, or the lowest test loss for a task that has no accuracy."""

    checkpoint_dir: Annotated[Path | None, FREE] = None
    """Directory of the run's checkpoints (default: checkpoints in the run's directory)."""

    on_save_error: Annotated[Literal["continue", "stop"], FREE] = "continue"
    """Where a checkpoint cannot be written: go on without it, or end the run. The last one must be
    written."""

    preempt_signal: Annotated[str, FREE] = "USR2,USR1,TERM"
    """Signals after which all ranks make a checkpoint and leave with exit code 75: USR2, USR1 and
    TERM, or some of them."""

    export: Annotated[Path | None, FREE] = None
    """File for the trained weights, a plain state_dict."""

    evaluate_only: Annotated[bool, FREE] = False
    """Write predictions for the test samples, from the weights given; nothing is trained."""

    weights: Annotated[Path | None, FREE] = None
    """With evaluate_only: a file that export wrote, a checkpoint, or a run's directory."""

    def __post_init__(self) -> None:
        parse_interval(self.save_every)
        check("resume", self.resume != "", "auto, never or a path", self.resume)
        check("keep", self.keep >= 1, "1 or more", self.keep)
        parse_signals(self.preempt_signal)
        check_text(self, "checkpoint_dir", "resume", "export", "weights")
