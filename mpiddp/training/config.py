"""The trainer's configuration: defaults, then a TOML file, then the command line.

Neither torch, numpy nor mpi4py is imported here: ``python -m mpiddp.train --help`` must be
quick, and must not initialise MPI.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from io import StringIO
from itertools import dropwhile, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from mpiddp.errors import ConfigurationError
from mpiddp.launch.output import parse_ranks
from mpiddp.training.registry import DATASETS, MODELS
from mpiddp.training.straggler import parse_straggler

FRAMEWORK = "framework"
"""The synchronisation that is DDP's own."""
PARAMETER_SERVER = "parameter-server"
UNLIMITED = "unlimited"
"""The staleness that has no bound."""
LEARNING_RATES = {"sgd": 0.05, "adamw": 0.003}
"""What ``learning_rate`` becomes where it is not given, per optimizer."""

_TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: (int | float, "a number"),
    str: (str, "a string"),
    Path: (str, "a string (a path)"),
}
"""For each type of a field, what TOML holds, and how it is called in a message."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def _one_of(names: Sequence[str]) -> Any:
    return tyro.conf.arg(metavar="{" + ",".join(names) + "}")


@dataclass(frozen=True)
class Configuration:
    """Train a model on all ranks that srun or mpirun started, with DDP.

    Raises ConfigurationError where a value is out of its range.
    """

    name: str | None = None
    """Name of the run and of its directory (default: the Slurm job's name and id, or the time)."""

    runs_dir: Path = Path("runs")
    """Directory that holds one directory per run."""

    data: Annotated[str, _one_of(list(DATASETS))] = "digits"
    """Data set."""

    samples: int = 2000
    """Size of the synthetic and toy data, in samples; a fifth is for testing."""

    model: Annotated[str, _one_of(["auto", *MODELS])] = "auto"
    """Model; auto takes the one that fits the data."""

    epochs: int = 15
    """Passes over the training data, in epochs."""

    batch_size: int = 16
    """Batch, in samples per rank and step."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""

    learning_rate: float | None = None
    """Peak learning rate, after a short warm-up (default: 0.05 with sgd, 0.003 with adamw)."""

    momentum: float = 0.9
    """Nesterov momentum of sgd, or adamw's first beta; 0 to below 1."""

    weight_decay: float = 0.0005
    """Weight decay, per step and unit of learning rate."""

    seed: int = 0
    """Seed of initial parameters, order of samples and made-up data."""

    evaluate_every: int = 5
    """Epochs between two evaluations; the last epoch is always evaluated."""

    sync: str = "framework"
    """How gradients become one: framework, auto, an algorithm (as ring), or parameter-server."""

    transport: Literal["auto", "shared-memory", "shared-memory+mpi", "mpi", "torch"] = "auto"
    """What carries gradients, with sync auto or an algorithm."""

    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """In which type gradients travel, with sync auto or an algorithm; auto is their own."""

    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether gradients travel during the backward pass, with sync auto or an algorithm."""

    servers: int = 1
    """Servers that share the weights, with sync parameter-server."""

    server_placement: Literal["colocated", "dedicated"] = "colocated"
    """Whether the ranks that serve compute, too, with sync parameter-server."""

    staleness: str = "0"
    """Steps that a worker may be ahead of the slowest, or unlimited, with sync parameter-server."""

    straggler: str | None = None
    """Slow a worker's passes on purpose: RANK=FACTOR, or random=FACTOR, drawn for each step."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication; auto takes nccl where every rank has its own GPU."""

    interface: str = "auto"
    """Network interface: auto, NAME, or host=NAME,host=NAME."""

    timeout: float = 300.0
    """Deadline of each phase of start-up and of each collective, in seconds."""

    lifeline_timeout: float = 30.0
    """Seconds after which a node that nothing is heard of is lost."""

    allow_shared_gpu: bool = False
    """Let several ranks share one GPU: with gloo, or with NCCL 2.30 or newer and
    NCCL_MULTI_RANK_GPU_ENABLE=1."""

    stall_timeout: float = 600.0
    """End the run when no rank's main thread has moved for so many seconds; 0 for never."""

    bind: Literal["auto", "none", "cores", "numa"] = "auto"
    """Bind ranks that no launcher has bound to cores of their own, or to a NUMA node; auto: to
    cores, where each rank has at least two."""

    log_dir: Path | None = None
    """Directory for what each rank prints: rank-N.out and rank-N.err."""

    console: str = "all"
    """Ranks that print to the console: all, none, or ranks such as 0,3-5."""

    label: bool = False
    """Put [rank@host] before each line on the console."""

    def __post_init__(self) -> None:
        _check_choice("data", self.data, list(DATASETS))
        _check_choice("model", self.model, ["auto", *MODELS])
        for name in ("epochs", "batch_size", "evaluate_every"):
            _check(name, getattr(self, name) >= 1, "1 or more", getattr(self, name))
        _check("samples", self.samples >= 2, "2 or more", self.samples)
        _check("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1", self.seed)
        rate = self.learning_rate
        _check("learning_rate", rate is None or _is_positive(rate), "above 0", rate)
        _check("momentum", 0 <= self.momentum < 1, "0 to below 1", self.momentum)
        decay = self.weight_decay
        _check("weight_decay", decay >= 0 and math.isfinite(decay), "0 or more", decay)
        for name in ("timeout", "lifeline_timeout"):
            _check(name, _is_positive(getattr(self, name)), "above 0 seconds", getattr(self, name))
        _check("interface", self.interface != "", "auto, NAME or host=NAME,…", self.interface)
        _check_sync(self.sync)
        _check("servers", self.servers >= 1, "1 or more", self.servers)
        good = self.staleness == UNLIMITED or self.staleness.isdecimal()
        _check("staleness", good, "a number of steps, or unlimited", self.staleness)
        if self.straggler is not None:
            parse_straggler(self.straggler)
        if self.name is not None:
            _check("name", _is_file_name(self.name), "a name for a directory, no path", self.name)
        good = self.stall_timeout >= 0 and math.isfinite(self.stall_timeout)
        _check("stall_timeout", good, "0 or more seconds", self.stall_timeout)
        parse_ranks(self.console)
        for name in ("name", "interface", "runs_dir", "log_dir"):
            text = str(getattr(self, name) or "")
            _check(name, _is_text(text), "text without broken characters", text)

    def resolve(self) -> Configuration:
        """Return a copy in which only the name, and ``overlap``, are left to be chosen.

        Raises ConfigurationError for options that do not go together.
        """
        _check_effects(self)
        model = DATASETS[self.data].model if self.model == "auto" else self.model
        rate = self.learning_rate
        return dataclasses.replace(
            self,
            model=model,
            learning_rate=LEARNING_RATES[self.optimizer] if rate is None else rate,
        )


_FIELDS = dataclasses.fields(Configuration)


@dataclass(frozen=True)
class CommandLine(Configuration):
    """Train a model on all ranks that srun or mpirun started, with DDP."""

    config: Path | None = None
    """TOML file with options, written with underscores; the command line wins."""


def parse(arguments: Sequence[str], *, show_help: bool = True) -> Configuration:
    """Return the resolved configuration of a command line (without the program's name).

    With ``-h`` or ``--help`` SystemExit(0) is raised, after the help was printed if
    ``show_help``. Raises ConfigurationError for whatever cannot be understood.
    """
    _refuse_unknown_options(arguments)
    path = _find_configuration_file(arguments)
    values = {} if path is None else read_toml(path)
    try:
        defaults = CommandLine(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    parsed = _parse_with_tyro(arguments, defaults, show_help)
    return Configuration(**{field.name: getattr(parsed, field.name) for field in _FIELDS}).resolve()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file, checked for unknown keys and wrong types.

    Raises ConfigurationError, with the file, the key, what was expected and what was found.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"config: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: expected UTF-8 text: {error.reason}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from None
    types = _field_types()
    for key in values:
        if key not in types:
            hint = _did_you_mean(key, list(types))
            raise ConfigurationError(f"{path}: unknown key {_quote(key)}{hint}")
    return {key: _convert(f"{path}: {key}", value, types[key]) for key, value in values.items()}


def to_toml(configuration: Configuration) -> str:
    """Return the configuration as TOML that reads back as an equal object.

    TOML knows no null: a field that is None, its default then, is left out.
    """
    values = {field.name: getattr(configuration, field.name) for field in _FIELDS}
    # JSON's literals are TOML's too, but for one character that TOML has escaped.
    texts = {
        name: json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
        for name, value in values.items()
        if value is not None
    }
    return "".join(f"{name} = {text}\n" for name, text in texts.items())


def _check_sync(sync: str) -> None:
    if sync in (FRAMEWORK, "auto", PARAMETER_SERVER):
        return
    # They need NumPy, for which --help does not wait.
    from mpiddp.schedules import registry

    try:
        registry.parse(sync)
    except ConfigurationError as error:
        expected = "expected framework, auto, parameter-server, or an algorithm"
        raise ConfigurationError(f"sync: {expected}: {error}") from None


def _check_effects(configuration: Configuration) -> None:
    """Refuse options that would be without effect."""
    sync = configuration.sync
    groups = (
        (
            ("transport", "wire_dtype", "overlap"),
            sync not in (FRAMEWORK, PARAMETER_SERVER),
            "gradients that mpiddp averages: give --sync auto, or --sync ALGORITHM",
        ),
        (
            ("servers", "server_placement", "staleness"),
            sync == PARAMETER_SERVER,
            "parameter servers: give --sync parameter-server",
        ),
    )
    usual = {field.name: field.default for field in _FIELDS}
    for names, applies, purpose in groups:
        for name in names:
            value = getattr(configuration, name)
            if not applies and value != usual[name]:
                raise ConfigurationError(f"{name}: {_quote(value)} is for {purpose}")


def _is_positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in "/\0\n" for c in name) and len(name) < 200


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _check(name: str, good: bool, expected: str, found: object) -> None:
    if not good:
        raise ConfigurationError(f"{name}: expected {expected}, found {_quote(found)}")


def _check_choice(name: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        found = f"{_quote(value)}{_did_you_mean(value, choices)}"
        raise ConfigurationError(f"{name}: expected one of {', '.join(choices)}, found {found}")


def _quote(value: object) -> str:
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _did_you_mean(word: str, choices: Sequence[str]) -> str:
    near = get_close_matches(word, choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_unknown_options(arguments: Sequence[str]) -> None:
    switches = [name for name, kind in _field_types().items() if kind is bool]
    known = [_flag(field.name) for field in dataclasses.fields(CommandLine)]
    known += [_flag(f"no_{name}") for name in switches]
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        is_option = flag.startswith("--") and flag not in ("--", "--help")
        if not is_option or flag in known or flag.startswith("--tyro-"):
            continue
        hint = _did_you_mean(flag, known) or " (--help lists the options)"
        raise ConfigurationError(f"unknown option {argument.partition('=')[0]}{hint}")


def _find_configuration_file(arguments: Sequence[str]) -> Path | None:
    """Return the value of the last ``--config``; that it has one is checked by tyro."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?")
    path: Path | None = parser.parse_known_args(arguments)[0].config
    return path


def _parse_with_tyro(
    arguments: Sequence[str], defaults: CommandLine, show_help: bool
) -> CommandLine:
    complaint = StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(complaint))
        if not show_help:
            stack.enter_context(redirect_stdout(StringIO()))
        try:
            return tyro.cli(
                CommandLine,
                args=list(arguments),
                default=defaults,
                prog="python -m mpiddp.train",
            )
        except SystemExit as exit_:
            if not exit_.code:
                raise
    raise ConfigurationError(_shorten(complaint.getvalue())) from None


def _shorten(complaint: str) -> str:
    """Return tyro's boxed message as one line: its first paragraph, without the frame."""
    lines = _ESCAPE.sub("", complaint).splitlines()
    bare = [line.strip().removeprefix("│").removesuffix("│").strip() for line in lines]
    after_title = dropwhile(_is_rule, bare[1:])
    paragraph = takewhile(lambda line: not _is_rule(line), after_title)
    text = " ".join(paragraph) or "the command line cannot be understood"
    return f"{text.removesuffix('.')} (see --help)"


def _is_rule(line: str) -> bool:
    return not line.strip("─-╰╯")


@cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(Configuration)


def _convert(where: str, value: Any, expected: Any) -> Any:
    """Return a TOML value as the type of its field, or raise ConfigurationError."""
    choices: list[str] = []
    if get_origin(expected) is Literal:
        choices, expected = list(get_args(expected)), str
    elif get_origin(expected) in (Union, UnionType):
        (expected,) = (kind for kind in get_args(expected) if kind is not NoneType)
    accepted, name = _TYPES[expected]
    if not isinstance(value, accepted) or isinstance(value, bool) is not (expected is bool):
        name = f"one of {', '.join(choices)}" if choices else name
        found = f"{_quote(value)} ({type(value).__name__})"
        raise ConfigurationError(f"{where}: expected {name}, found {found}")
    if choices:
        _check_choice(where, value, choices)
    try:
        return expected(value)
    except OverflowError:
        raise ConfigurationError(f"{where}: the number is too large") from None
