"""Options on the command line, and ``--help``, for groups of them."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, make_dataclass
from io import StringIO
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from mpiddp.errors import ConfigurationError
from mpiddp.launch.script.other_launchers import find_counterpart
from mpiddp.training.options.groups.checks import did_you_mean, quote

PROGRAM = "python -m mpiddp.train"
HELP = ("-h", "--help")
BARE = {"--profile": "0"}
"""Options that need no value, and what they mean without one."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class ConfigurationFile:
    """Options in a file."""

    config: Path | None = None
    """TOML file with options, written with underscores; the command line wins."""


def find_configuration_file(arguments: Sequence[str]) -> Path | None:
    """Return the value of the last ``--config``; `parse` checks that it has one."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?")
    path: Path | None = parser.parse_known_args(arguments)[0].config
    return path


def parse(
    description: str, defaults: Mapping[str, Any], arguments: Sequence[str], *, show_help: bool
) -> dict[str, Any]:
    """Return the groups of options as a command line has them.

    With ``-h`` or ``--help`` SystemExit(0) is raised, after the help was printed if ``show_help``;
    a group's name after it shows that group alone. Raises ConfigurationError for whatever cannot be
    understood.

    Args:
        description: of the program, for ``--help``.
        defaults: of each group's options, a dataclass, by the group's name.
        arguments: the command line without the program's name.
    """
    group = _find_group(defaults, arguments)
    if group is not None:
        description, defaults, arguments = "", {group: defaults[group]}, ["--help"]
    else:
        description += f" {HELP[-1]} GROUP shows one group of options: {', '.join(defaults)}."
        defaults = {**defaults, "file": ConfigurationFile()}
        _refuse_unknown_options(defaults.values(), arguments)
    parsed = _run_tyro(description, defaults, list(_complete(arguments)), show_help)
    return {name: getattr(parsed, name) for name in defaults if name != "file"}


def _find_group(names: Mapping[str, Any], arguments: Sequence[str]) -> str | None:
    """The word after ``--help``. Raises ConfigurationError if it is no group's name."""
    for option, word in pairwise(arguments):
        if option in HELP and not word.startswith("-"):
            if word not in names:
                raise ConfigurationError(
                    f"--help: expected one of the groups {', '.join(names)}, found {quote(word)}"
                    f"{did_you_mean(word, list(names))}"
                )
            return word
    return None


def _complete(arguments: Sequence[str]) -> Iterator[str]:
    for argument, following in pairwise([*arguments, "--"]):
        yield argument
        if argument in BARE and following.startswith("-"):
            yield BARE[argument]


def _refuse_unknown_options(groups: Iterable[Any], arguments: Sequence[str]) -> None:
    known = []
    for group in groups:
        for name, kind in get_type_hints(type(group)).items():
            known.append(_flag(name))
            if kind is bool:
                known.append(_flag(f"no_{name}"))
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        is_option = flag.startswith("--") and flag not in ("--", "--help")
        if not is_option or flag in known or flag.startswith("--tyro-"):
            continue
        given = argument.partition("=")[0]
        found = find_counterpart(given)
        if found is not None:
            raise ConfigurationError(f"{given} is an option of {found[0]}; for mpiddp, {found[1]}")
        hint = did_you_mean(flag, known) or " (--help lists the options)"
        raise ConfigurationError(f"unknown option {given}{hint}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _run_tyro(
    description: str, defaults: Mapping[str, Any], arguments: Sequence[str], show_help: bool
) -> Any:
    members = [(name, type(group), field(default=group)) for name, group in defaults.items()]
    complaint = StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(complaint))
        if not show_help:
            stack.enter_context(redirect_stdout(StringIO()))
        try:
            return tyro.cli(
                make_dataclass("Options", members),
                args=list(arguments),
                prog=PROGRAM,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
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
