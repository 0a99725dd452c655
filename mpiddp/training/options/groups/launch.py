"""Options of the launch, with what the trainer knows better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mpiddp.launch.options import SECONDS, LaunchOptions


@dataclass(frozen=True, kw_only=True)
class TrainerLaunchOptions(LaunchOptions):
    """How the ranks find each other, and how long they wait."""

    stall_timeout: Annotated[float, SECONDS] = 600.0
    """End the run if no rank has made progress for so long, such as by ending a step; 0 for
    never."""
