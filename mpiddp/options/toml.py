"""Options in TOML: one flat table, whose keys are the names of the options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import read_toml
from mpiddp.options.checks import check_choice, quote
from mpiddp.options.fields import Field

TYPES: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: (int | float, "a number"),
    str: (str, "a string"),
    Path: (str, "a string (a path)"),
}
"""For each type of an option, what TOML holds, and how it is called in a message."""


def read(path: Path, fields: Mapping[str, Field], hint: Callable[[str], str]) -> dict[str, Any]:
    """Return the options in a TOML file, checked for unknown keys and wrong types.

    ``fields``: every option, by its name. ``hint``: what to say of another key. Raises
    ConfigurationError, with the file, the key, what was expected and what was found.
    """
    try:
        values = read_toml(path)
    except OSError as error:
        raise ConfigurationError(f"config: cannot read {path}: {error.strerror}") from None
    except ContentError as error:
        raise ContentError(f"config: {path}: {error}") from None
    for key in values:
        if key not in fields:
            raise ConfigurationError(f"{path}: unknown key {quote(key)}{hint(key)}")
    return {key: convert(f"{path}: {key}", value, fields[key]) for key, value in values.items()}


def write(values: Mapping[str, Any]) -> str:
    """Return a line of TOML for each option that is not None: TOML has no null."""
    # JSON's literals are TOML's too, but for one character that TOML has escaped.
    texts = {
        name: json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
        for name, value in values.items()
        if value is not None
    }
    return "".join(f"{name} = {text}\n" for name, text in texts.items())


def convert(where: str, value: Any, field: Field) -> Any:
    """Return a TOML value as the type of its field. Raises ConfigurationError."""
    if field.argument.read is not None and type(value) in (int, str):
        try:
            return field.argument.read(str(value))
        except ValueError as error:
            raise ConfigurationError(f"{where}: {error}") from None
    accepted, name = TYPES[field.kind]
    if not isinstance(value, accepted) or isinstance(value, bool) is not (field.kind is bool):
        name = f"one of {', '.join(field.choices)}" if field.choices else name
        found = f"{quote(value)} ({type(value).__name__})"
        raise ConfigurationError(f"{where}: expected {name}, found {found}")
    if field.choices:
        check_choice(where, value, field.choices)
    try:
        return field.kind(value)
    except OverflowError:
        raise ConfigurationError(f"{where}: the number is too large") from None
