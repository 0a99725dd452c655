"""Options of the run's directory and of what ranks print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mpiddp.options.checks import check, check_text
from mpiddp.options.fields import Argument
from mpiddp.process.streams.output import RankOutput, parse_ranks
from mpiddp.training.options.groups.effects import FREE


@dataclass(frozen=True, kw_only=True)
class OutputOptions(RankOutput):
    """What a run is called, and what it writes."""

    name: Annotated[str | None, FREE] = None
    """Name of the run and of its directory (default: the Slurm job's name and id, or the time)."""

    runs_dir: Annotated[Path, FREE] = Path("runs")
    """Directory that holds one directory per run."""

    log_every: Annotated[int, FREE] = 0
    """Steps between two lines with the loss, on rank 0's console and in each rank's log, and two
    such rows of metrics.jsonl and the tracker; 0 for none."""

    track: Annotated[Literal["tensorboard", "mlflow", "wandb"] | None, FREE] = None
    """Tracker to which rank 0 also sends the metrics; each is an extra of mpiddp."""

    track_network: Annotated[bool, FREE] = False
    """Compare the bytes that network interfaces sent with those that ranks counted: after each
    epoch, in a line and in metrics.jsonl, for each node."""

    profile: Annotated[str, Argument("RANKS", bare="0"), FREE] = "none"
    """Ranks that write a trace of some steps: all, none, or ranks such as 0,3-5; rank 0 if the
    command line names none."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check("name", _is_file_name(self.name), "a name for a directory, no path", self.name)
        check("log_every", self.log_every >= 0, "0 or more", self.log_every)
        RankOutput.__post_init__(self)
        parse_ranks(self.profile, "--profile")
        check_text(self, "name", "runs_dir", "log_dir")


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in "/\0\n" for c in name) and len(name) < 200
