"""The trainer's configuration: defaults, then a TOML file, then the command line.

Neither torch, numpy nor mpi4py is imported here: ``python -m mpiddp.train --help`` must be
quick, and must not initialise MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from mpiddp.errors import ConfigurationError
from mpiddp.launch.options import Options
from mpiddp.launch.script.other_words import explain_training
from mpiddp.options import toml
from mpiddp.options.checks import did_you_mean
from mpiddp.options.fields import Argument, Field, list_fields, pick
from mpiddp.options.reader import Reader
from mpiddp.training.options.contradictions import refuse_contradictions
from mpiddp.training.options.groups.checkpoints import CheckpointOptions
from mpiddp.training.options.groups.data import AUTO, DataOptions, ModelOptions, choose_model
from mpiddp.training.options.groups.launch import TrainerLaunchOptions
from mpiddp.training.options.groups.optimisation import LEARNING_RATES, OptimisationOptions
from mpiddp.training.options.groups.output import OutputOptions
from mpiddp.training.options.groups.parallelism import ParallelismOptions
from mpiddp.training.options.groups.synchronisation import SynchronisationOptions

GROUPS: Mapping[str, type[Any]] = {
    "data": DataOptions,
    "model": ModelOptions,
    "optimisation": OptimisationOptions,
    "parallelism": ParallelismOptions,
    "output": OutputOptions,
    "checkpoints": CheckpointOptions,
    "synchronisation": SynchronisationOptions,
    "launch": TrainerLaunchOptions,
}
"""The groups of options, those used most often first; every option's name occurs once."""


@dataclass(frozen=True, kw_only=True)
class Configuration(
    DataOptions,
    ModelOptions,
    OptimisationOptions,
    ParallelismOptions,
    OutputOptions,
    CheckpointOptions,
    SynchronisationOptions,
    TrainerLaunchOptions,
    Options,
):
    """Train a model on all ranks that srun or mpirun started.

    It has the options of all groups. A function that needs those of one group asks for that group.

    Raises ConfigurationError if a value is out of its range.
    """

    def __post_init__(self) -> None:
        for group in GROUPS.values():
            group.__post_init__(self)

    def resolve(self) -> Configuration:
        """Return a copy in which only the name, and ``overlap``, are left to be chosen.

        With ``task``, that decides on more, and `complete` resolves the rest.

        Raises ConfigurationError for options that do not go together.
        """
        refuse_contradictions(vars(self), _DEFAULTS)
        return self if self.task is not None else self.complete()

    def complete(self) -> Configuration:
        """As ``resolve``, once the task has named what it decides."""
        refuse_contradictions(vars(self), _DEFAULTS)
        model = choose_model(self.data) if self.model == AUTO else self.model
        rate = self.learning_rate
        if rate is None:
            rate = LEARNING_RATES.get(self.optimizer)
        if rate is None:
            raise ConfigurationError(
                f"learning_rate: expected a number beside optimizer = {self.optimizer!r}, found "
                "none: give --learning-rate"
            )
        return replace(self, model=model, learning_rate=rate)


_DEFAULTS = {field.name: field.default for field in fields(Configuration)}


@dataclass(frozen=True, kw_only=True)
class ConfigurationFile:
    """Options in a file."""

    config: Annotated[Path | None, Argument("FILE")] = None
    """TOML file with options, written with underscores; the command line wins."""


READER = Reader(
    program="python -m mpiddp.train",
    description="""\
Train a model on all ranks:

  python -m mpiddp -n 4 train --data digits --epochs 5
  srun --mpi=pmix python -m mpiddp.train --config run.toml

"""
    + fill(f"--help GROUP shows one group of options: {', '.join(GROUPS)}."),
    groups={**GROUPS, "file": ConfigurationFile},
    has_negations=True,
    has_group_help=True,
    explain=explain_training,
)


def parse(arguments: Sequence[str], *, show_help: bool = True) -> Configuration:
    """Return the resolved configuration of a command line (without the program's name).

    With ``-h`` or ``--help`` SystemExit(0) is raised, after the help was printed if
    ``show_help``; ``--help GROUP`` shows one group. Raises ConfigurationError for whatever cannot
    be understood.
    """
    given = READER.read(arguments, show_help=show_help)
    path = given.pop("config", None)
    saved = {} if path is None else read_toml(path)
    try:
        for group in GROUPS.values():
            pick(group, saved)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return Configuration(**{**saved, **given}).resolve()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file, checked for unknown keys and wrong types.

    Raises ConfigurationError, with the file, the key, what was expected and what was found.
    """
    return toml.read(path, _list_fields(), _explain)


def from_keywords(values: Mapping[str, Any]) -> Configuration:
    """Return the resolved configuration of a script's keywords: names and types as in TOML.

    None, and a path as a ``Path``, are accepted too. Raises ConfigurationError.
    """
    known = _list_fields()
    found = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(f"unknown option {name}{_explain(name)}")
        if value is not None:
            text = str(value) if isinstance(value, Path) else value
            found[name] = toml.convert(name, text, known[name])
    return Configuration(**found).resolve()


def _explain(name: str) -> str:
    """What to say of an unknown name."""
    explanation = explain_training("--" + name)
    return f": {explanation}" if explanation else did_you_mean(name, _list_fields())


def _list_fields() -> dict[str, Field]:
    return {field.name: field for field in list_fields(Configuration)}


def to_toml(configuration: Configuration) -> str:
    """Return the configuration as TOML that reads back as an equal object.

    A field that is None, its default then, is left out.
    """
    parts = []
    for name, group in GROUPS.items():
        values = {each.name: getattr(configuration, each.name) for each in fields(group)}
        parts.append(f"# {name}\n{toml.write(values)}")
    return "\n".join(parts)
