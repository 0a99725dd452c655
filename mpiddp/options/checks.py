"""Checks of options' values, and the wording of what they refuse."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from mpiddp.errors import ConfigurationError
from mpiddp.wording import fold, print_message

T = TypeVar("T")

REFERENCE = "package.module:factory"
"""How ``--help`` shows the name of a user's function."""


def check(name: str, good: bool, expected: str, found: object) -> None:
    """Raise ConfigurationError unless ``good``."""
    if not good:
        raise ConfigurationError(f"{name}: expected {expected}, found {quote(found)}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigurationError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigurationError(f"{name}: {describe_choice(value, choices)}")


def describe_choice(value: str, choices: Sequence[str]) -> str:
    """What is wrong with a value that is none of ``choices``."""
    hint = did_you_mean(value, choices)
    return f"expected one of {', '.join(choices)}, found {quote(value)}{hint}"


def check_reference(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigurationError unless ``value`` is one of ``choices``, or a reference."""
    if re.fullmatch(r"[\w.]+:[\w.<>]+", value) is None:
        check_choice(name, value, [*choices, REFERENCE])


def check_text(options: object, *names: str) -> None:
    """Raise ConfigurationError if one of these strings or paths cannot be written to a file."""
    for name in names:
        text = str(getattr(options, name) or "")
        check(name, _is_text(text), "text without broken characters", text)


def read_usable(paths: Iterable[Path], read: Callable[[Path], T]) -> list[T]:
    """What ``read`` makes of each path; what it refuses is left out with a line.

    A shell's ``runs/*`` names more than what is meant. Raises ConfigurationError for a path that is
    not there, and if nothing is left.
    """
    found: list[T] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(read(path))
        except ConfigurationError as error:
            if not os.path.lexists(path):
                raise
            problems.append(str(error))
    if not found:
        raise ConfigurationError(fold(problems))
    for problem in problems:
        print_message(f"left out: {problem}")
    return found


def is_positive(value: float) -> bool:
    """True if finite and positive."""
    return value > 0 and math.isfinite(value)


def at_least(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A reader of integers that are not below ``minimum``, nor above ``maximum``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"expected an integer >= {minimum}, found {quote(text)}")
        if maximum is not None and value > maximum:
            raise ValueError(f"expected an integer <= {maximum}, found {quote(text)}")
        return value

    return read


def positive(unit: str, *, zero: bool = False) -> Callable[[str], float]:
    """A reader of numbers from 1e-9 to 1e12, or of 0 as well."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (value >= 1e-9 or (zero and value == 0)):
            raise ValueError(f"expected {unit} {'>=' if zero else '>'} 0, found {quote(text)}")
        if value > 1e12:
            raise ValueError(f"expected {unit} <= 1e12, found {quote(text)}")
        return value

    return read


def quote(value: object) -> str:
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean WORD?)`` if `find_near` finds one, else nothing."""
    near = find_near(word, choices)
    return f" (did you mean {near}?)" if near else ""


def find_near(word: str, choices: Iterable[str]) -> str | None:
    """The one of ``choices`` that is similar, begins with ``word``, or is abbreviated by it."""
    from difflib import get_close_matches  # Only for a message.

    known, bare = list(choices), word.lstrip("-")
    near = [each for each in known if bare and _abbreviate(each) == bare]
    if not near and len(bare) > 2:
        near = sorted((each for each in known if each.lstrip("-").startswith(bare)), key=len)
    return next(iter(near or get_close_matches(word, known, 1, 0.7)), None)


def _abbreviate(name: str) -> str:
    """``lr`` for ``--learning-rate``; empty for a single word."""
    words = re.split(r"[-_]", name.lstrip("-"))
    return "".join(each[:1] for each in words) if len(words) > 1 else ""


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text
