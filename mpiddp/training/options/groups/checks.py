"""Checks of options' values, and the wording of what they refuse."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tyro

from mpiddp.errors import ConfigurationError

REFERENCE = "package.module:factory"
"""How ``--help`` shows the name of a user's function."""
_REFERENCE = re.compile(r"[\w.]+:[\w.<>]+")


def one_of(names: Sequence[str]) -> Any:
    """The annotation of a string option that is one of ``names``: ``--help`` lists them."""
    return tyro.conf.arg(metavar="{" + ",".join(names) + "}")


def check(name: str, good: bool, expected: str, found: object) -> None:
    """Raise ConfigurationError unless ``good``."""
    if not good:
        raise ConfigurationError(f"{name}: expected {expected}, found {quote(found)}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigurationError unless ``value`` is one of ``choices``."""
    if value not in choices:
        found = f"{quote(value)}{did_you_mean(value, choices)}"
        raise ConfigurationError(f"{name}: expected one of {', '.join(choices)}, found {found}")


def check_reference(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigurationError unless ``value`` is one of ``choices``, or a reference."""
    if _REFERENCE.fullmatch(value) is None:
        check_choice(name, value, [*choices, REFERENCE])


def check_text(options: object, *names: str) -> None:
    """Raise ConfigurationError if one of these strings or paths cannot be written to a file."""
    for name in names:
        text = str(getattr(options, name) or "")
        check(name, _is_text(text), "text without broken characters", text)


def is_positive(value: float) -> bool:
    """Whether it is finite, too."""
    return value > 0 and math.isfinite(value)


def quote(value: object) -> str:
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: str, choices: Sequence[str]) -> str:
    bare = word.lstrip("-")
    short = [each for each in choices if _abbreviate(each) == bare]
    near = short or get_close_matches(word, choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


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
