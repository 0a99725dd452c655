"""From which checkpoint a training goes on, and which options must be those of its run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.checkpoints.state import read_values
from mpiddp.checkpoints.storage.directory import CheckpointDirectory, CheckpointSource
from mpiddp.checkpoints.storage.finding import Found, Survey, find_valid, read_together
from mpiddp.checkpoints.storage.manifest import CHECKPOINTS
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.errors import CheckpointError, ConfigurationError
from mpiddp.files import decode
from mpiddp.launch.session import Session
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.checkpoints import AUTO, NEVER
from mpiddp.training.options.groups.data import AUTO_BATCH
from mpiddp.training.options.groups.effects import FIXED, FREE, list_options
from mpiddp.training.options.groups.synchronisation import PARAMETER_SERVER
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.run_directory import find_path
from mpiddp.training.run_state import Position
from mpiddp.wording import count_noun

ADVICE = "choose another --checkpoint-dir, or begin from it with --resume {path}"
MEASURED = {"overlap": "auto", "batch_size": AUTO_BATCH}
"""Options that are to be chosen by measurement if they have this value."""


@dataclass(frozen=True)
class Beginning:
    """Where training begins, and what was found there."""

    ranks: RankGroup
    directory: CheckpointDirectory | None
    """Of the run, if its name is known already."""
    survey: Survey | None
    """What is in the directory; None if that is not known yet."""
    found: Found | None
    """The checkpoint to go on from."""
    configuration: Configuration
    """With what was chosen by measurement when the checkpoint's run began."""
    changed: list[str]
    """Options that decide the result and have changed since."""
    position: Position
    """Where training begins."""

    @property
    def taken(self) -> int | None:
        """Samples of its first epoch that were trained on before; None if the run is new."""
        return None if self.found is None else self.position.samples


def look_for_checkpoint(configuration: Configuration, session: Session) -> Beginning:
    """Find the checkpoint to go on from; collective.

    The directory is locked from now on; nothing else is changed.

    Raises CheckpointError if there are checkpoints, but none can be used, StorageError if one
    cannot be read now, and ConfigurationError if the directory is another run's or no epoch is
    left.
    """
    ranks, directory, survey = RankGroup(), None, None
    path = configuration.checkpoint_dir
    if path is None and (run := find_path(configuration)) is not None:
        path = run / CHECKPOINTS
    path = session.broadcast(path)
    if path is not None:
        source = make_source(configuration, path, "")
        directory = CheckpointDirectory(path, ranks, source, configuration.keep)
        if configuration.resume != NEVER or environment.is_restarted():
            survey = directory.look()
    found = _choose(configuration, ranks, directory, survey)
    changed, position = list[str](), Position()
    if found is not None:
        configuration = keep_measured(configuration, found.manifest.configuration)
        values = name_values(configuration)
        changed = check_fit(found, values)
        position = read_together(found, ranks, partial(read_position, found))
        if position.epoch > configuration.epochs:
            _check_end(values, found, position, changed)
    return Beginning(ranks, directory, survey, found, configuration, changed, position)


def _choose(
    configuration: Configuration,
    ranks: RankGroup,
    directory: CheckpointDirectory | None,
    survey: Survey | None,
) -> Found | None:
    """The checkpoint that --resume names if the run begins there; its own newest if it goes on.

    Only a job's first attempt starts over, or goes on from an older checkpoint of its own. Later
    attempts go on from what this job has saved.
    """
    newest = None if survey is None else survey.newest
    if configuration.resume == AUTO or (newest is not None and _is_this_jobs(newest)):
        return newest
    if configuration.resume == NEVER:
        return None
    demanded = Path(configuration.resume)
    is_own = directory is not None and demanded.resolve().parent == directory.path.resolve()
    if newest is not None and not is_own:
        return newest
    return find_valid(demanded, ranks)[0]


def _is_this_jobs(found: Found) -> bool:
    """Whether this is a later attempt of the job that wrote it."""
    if not environment.is_restarted():
        return False  # The script itself has trained this run before, and asks for another start.
    front = os.environ.get(environment.JOB_DIRECTORY)
    if front and found.manifest.front == front:
        return True
    job = environment.job_identity(os.environ)
    is_requeued = environment.read_count(environment.SLURM_RESTART_COUNT) > 0
    return is_requeued and job is not None and found.manifest.job == job


def find_directory(configuration: Configuration, run: Path) -> Path:
    """Where the checkpoints of a run are, whose directory is ``run``."""
    return configuration.checkpoint_dir or run / CHECKPOINTS


def make_source(configuration: Configuration, path: Path, attempt: str) -> CheckpointSource:
    """Whose checkpoints they are: the run's by its name, else those with equal options."""
    is_within_run = configuration.checkpoint_dir is None
    values, open_ones = name_values(configuration), list_open(configuration)
    return CheckpointSource(
        run=path.parent.name if is_within_run else configuration.name,
        attempt=attempt,
        configuration=values,
        identity={name: values[name] for name in list_deciding() if name not in open_ones},
        advice=ADVICE,
        options=("--keep", "--checkpoint-dir"),
        replaces=configuration.resume == NEVER,
    )


def _check_end(
    values: Mapping[str, Any], found: Found, position: Position, changed: Sequence[str]
) -> None:
    """No epoch is left: raise ConfigurationError if the checkpoint is not these options' result."""
    row, least, where = position.row, position.epoch, ""
    if row is None:
        where = f"within epoch {position.epoch}"
    elif row.test_loss is None:
        where = "of an epoch without a test"
    elif row.epoch > values["epochs"]:
        least, where = row.epoch, f"of the end of epoch {row.epoch}"
    if where:
        raise ConfigurationError(
            f"epochs: expected {least} or more, since the checkpoint {found.path} is {where}, "
            f"found {values['epochs']}"
        )
    others = [name for name in changed if name != "epochs"]
    if others:
        listed = describe_changes(others, found.manifest.configuration, values)
        raise ConfigurationError(
            f"the checkpoint {found.path} ends a training with other options ({listed}), and no "
            f"epoch is left: choose another --name or --checkpoint-dir, or more than "
            f"{position.epoch - 1} --epochs"
        )


def describe_resumption(
    found: Found, position: Position, attempt: int, changed: Sequence[str]
) -> str:
    """The console's line."""
    since = f"; changed since then: {', '.join(changed)}" if changed else ""
    return (
        f"Resumed from {found.path}: step {position.step}, epoch {position.epoch}, "
        f"attempt {attempt}, written by {count_noun(found.manifest.world, 'rank')}{since}"
    )


def name_values(configuration: Any) -> dict[str, Any]:
    """The options, as JSON can hold them."""
    return decode(json.dumps(asdict(configuration), default=str), dict[str, Any])


def read_position(found: Found) -> Position:
    """How far the run was. Not collective. Raises CheckpointError, or OSError."""
    try:
        values = read_values(found)["given"]
        row = values.pop("row")
        return Position(**values, row=None if row is None else Row(**row))
    except OSError:
        raise  # It says nothing about the checkpoint.
    except Exception as error:  # Whatever names and contents lead to.
        raise CheckpointError(
            f"the checkpoint {found.path} is not one of a training of mpiddp.train: {error}"
        ) from error


def check_fit(found: Found, values: Mapping[str, Any]) -> list[str]:
    """The options that differ from the checkpoint's. Raises CheckpointError if one must not."""
    before = found.manifest.configuration
    changed = list_changed(before, values)
    fixed = {*list_options(Configuration, FIXED), *_list_server_options(before, values)}
    if refused := [name for name in changed if name in fixed]:
        listed = describe_changes(refused, before, values)
        raise CheckpointError(
            f"the checkpoint {found.path} is of another training ({listed}): choose another "
            "--name or --checkpoint-dir, or start over with --resume never"
        )
    return changed


def _list_server_options(before: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Options that must not change, since parameter servers hold parts of the optimizer's state."""
    are_serving = [each.get("sync") == PARAMETER_SERVER for each in (before, values)]
    if not any(are_serving):
        return []
    return ["servers"] if all(are_serving) else ["sync"]


def describe_changes(
    names: Iterable[str], before: Mapping[str, Any], values: Mapping[str, Any]
) -> str:
    """The values of these options ``before`` and now, for a message."""
    return ", ".join(f"{name} {before.get(name)!r}, now {values[name]!r}" for name in names)


def list_deciding() -> list[str]:
    """The options that decide the result."""
    free = set(list_options(Configuration, FREE))
    return [each.name for each in fields(Configuration) if each.name not in free]


def list_changed(before: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The options that decide the result, and differ from ``before``."""
    return [name for name in list_deciding() if values[name] != before.get(name)]


def keep_measured(configuration: Configuration, before: Mapping[str, Any]) -> Configuration:
    """The configuration with what was chosen by measurement ``before``, if it is still open."""
    known = {name: before[name] for name in list_open(configuration) if name in before}
    return replace(configuration, **known)


def list_open(configuration: Configuration) -> list[str]:
    """The options that are to be chosen by measurement."""
    return [name for name, word in MEASURED.items() if getattr(configuration, name) == word]
