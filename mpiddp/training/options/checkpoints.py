"""Options of checkpoints and of plain weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpiddp.launch.preemption_signals import parse_signals
from mpiddp.training.options.checks import check, check_text
from mpiddp.training.save_interval import parse_interval


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is saved, and where a run begins."""

    save_every: str = "15min"
    """How often a checkpoint is made: 500steps, 10epochs, 15min, or never; if not never, also at
    the end."""

    resume: str = "auto"
    """Where a run begins: auto (at its newest valid checkpoint), PATH of one, or never."""

    keep: int = 2
    """How many checkpoints are kept: the newest, and beside them the one with the best test
    accuracy, or the lowest test loss for a task that has no accuracy."""

    checkpoint_dir: Path | None = None
    """Directory of the run's checkpoints (default: checkpoints in the run's directory)."""

    on_save_error: Literal["continue", "stop"] = "continue"
    """Where a checkpoint cannot be written: go on without it, or end the run. The last one must be
    written."""

    preempt_signal: str = "USR2,USR1,TERM"
    """Signals after which all ranks make a checkpoint and leave with exit code 75: USR2, USR1 and
    TERM, or some of them."""

    export: Path | None = None
    """File for the trained weights, a plain state_dict."""

    evaluate_only: bool = False
    """Write predictions for the test samples, from the weights given; nothing is trained."""

    weights: Path | None = None
    """With evaluate_only: a file that export wrote, a checkpoint, or a run's directory."""

    def __post_init__(self) -> None:
        parse_interval(self.save_every)
        check("resume", self.resume != "", "auto, never or a path", self.resume)
        check("keep", self.keep >= 1, "1 or more", self.keep)
        parse_signals(self.preempt_signal)
        check_text(self, "checkpoint_dir", "resume", "export", "weights")
