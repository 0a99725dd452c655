"""The trainer's configuration: defaults, then a TOML file, then the command line.

Neither torch, numpy nor mpi4py is imported here: ``python -m mpiddp.train --help`` must be
quick, and must not initialise MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from mpiddp.errors import ConfigurationError
from mpiddp.training.options import command_line, toml
from mpiddp.training.options.contradictions import refuse_contradictions
from mpiddp.training.options.groups.checkpoints import CheckpointOptions
from mpiddp.training.options.groups.checks import did_you_mean
from mpiddp.training.options.groups.data import DataOptions
from mpiddp.training.options.groups.launch import LaunchOptions
from mpiddp.training.options.groups.model import AUTO, ModelOptions, choose_model
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
    "launch": LaunchOptions,
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
    LaunchOptions,
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

        With ``task``, that decides on an open model.

        Raises ConfigurationError for options that do not go together.
        """
        refuse_contradictions(vars(self), _DEFAULTS)
        is_open = self.model == AUTO and self.task is None
        model = choose_model(self.data) if is_open else self.model
        rate = self.learning_rate
        return replace(
            self,
            model=model,
            learning_rate=LEARNING_RATES[self.optimizer] if rate is None else rate,
        )


_DEFAULTS = {field.name: field.default for field in fields(Configuration)}


def parse(arguments: Sequence[str], *, show_help: bool = True) -> Configuration:
    """Return the resolved configuration of a command line (without the program's name).

    With ``-h`` or ``--help`` SystemExit(0) is raised, after the help was printed if
    ``show_help``; ``--help GROUP`` shows one group. Raises ConfigurationError for whatever cannot
    be understood.
    """
    path = command_line.find_configuration_file(arguments)
    values = {} if path is None else read_toml(path)
    try:
        defaults = {name: _select(group, values) for name, group in GROUPS.items()}
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    description = (Configuration.__doc__ or "").partition("\n")[0]
    groups = command_line.parse(description, defaults, arguments, show_help=show_help)
    found = {name: value for group in groups.values() for name, value in vars(group).items()}
    return Configuration(**found).resolve()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file, checked for unknown keys and wrong types.

    Raises ConfigurationError, with the file, the key, what was expected and what was found.
    """
    return toml.read(path, get_type_hints(Configuration))


def from_keywords(values: Mapping[str, Any]) -> Configuration:
    """Return the resolved configuration of a script's keywords: names and types as in TOML.

    None, and a path as a ``Path``, are accepted too. Raises ConfigurationError.
    """
    types = get_type_hints(Configuration)
    found = {}
    for name, value in values.items():
        if name not in types:
            raise ConfigurationError(f"unknown option {name}{did_you_mean(name, list(types))}")
        if value is not None:
            text = str(value) if isinstance(value, Path) else value
            found[name] = toml.convert(name, text, types[name])
    return Configuration(**found).resolve()


def to_toml(configuration: Configuration) -> str:
    """Return the configuration as TOML that reads back as an equal object.

    A field that is None, its default then, is left out.
    """
    parts = []
    for name, group in GROUPS.items():
        values = {each.name: getattr(configuration, each.name) for each in fields(group)}
        parts.append(f"# {name}\n{toml.write(values)}")
    return "\n".join(parts)


def _select(group: type[Any], values: Mapping[str, Any]) -> Any:
    """The group of options with those of ``values`` that are its own."""
    names = [field.name for field in fields(group)]
    return group(**{name: values[name] for name in names if name in values})
