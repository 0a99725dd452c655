"""``--profile``: a trace of some steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mpiddp.files import replaced

FOLDER = "profile"
WAIT, WARM_UP, ACTIVE = 3, 2, 5
"""Steps that are left out, that warm the profiler up, and that are recorded."""


class StepProfiler:
    """Of one rank: operators with shapes and memory, and on a GPU its kernels."""

    def __init__(self, path: Path, device: torch.device, warn: Callable[[str], object]) -> None:
        """``path``: the trace. ``warn``: called with the reason if it cannot be written."""
        self._path, self._warn = path, warn
        self._steps = 0
        activities = [ProfilerActivity.CPU]
        if device.type != "cpu":
            activities.append(ProfilerActivity[device.type.upper()])
        self._profile: profile | None = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._profile.start()

    def step(self) -> None:
        """After a training step."""
        if self._profile is None:
            return
        self._steps += 1
        self._profile.step()
        if self._steps == WAIT + WARM_UP + ACTIVE:
            self.close()

    def close(self) -> None:
        """Write what was recorded of a training that had fewer steps."""
        if self._profile is None:
            return
        found, self._profile = self._profile, None
        found.stop()
        if self._steps <= WAIT + WARM_UP:
            self._warn(f"no profile: it begins after {WAIT + WARM_UP} steps")

    def _write(self, found: profile) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            with replaced(self._path) as partial:
                found.export_chrome_trace(str(partial))
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._warn(f"{self._path} could not be written: {reason}")
