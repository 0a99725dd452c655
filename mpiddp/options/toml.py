"""TOML: options in one flat table, whose keys are their names, and rows of dataclasses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import read_toml
from mpiddp.options.checks import check_choice, did_you_mean, quote
from mpiddp.options.fields import Field, list_fields

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
    values = _load(path, "config")
    for key in values:
        if key not in fields:
            raise ConfigurationError(f"{path}: unknown key {quote(key)}{hint(key)}")
    return {key: convert(f"{path}: {key}", value, fields[key]) for key, value in values.items()}


def read_rows(path: Path, kinds: Mapping[str, type[Any]], what: str) -> dict[str, tuple[Any, ...]]:
    """Return the rows ``[[name]]`` of a TOML file, by name, as the dataclasses that ``kinds`` says.

    A row's keys are the fields of its dataclass. ``what``: the option that names the file. Raises
    ConfigurationError, with the file, the row, the key, what was expected and what was found.
    """
    rows: dict[str, tuple[Any, ...]] = {}
    for name, found in _load(path, what).items():
        if name not in kinds:
            hint = did_you_mean(name, kinds)
            raise ConfigurationError(f"{path}: unknown key {quote(name)}{hint}")
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise ConfigurationError(f"{path}: {name}: expected rows, each below [[{name}]]")
        fields = {field.name: field for field in list_fields(kinds[name])}
        rows[name] = tuple(
            kinds[name](**_read_row(f"{path}: {name}[{place}]", row, fields))
            for place, row in enumerate(found)
        )
    return rows


def _read_row(where: str, row: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    for key in row:
        if key not in fields:
            hint = did_you_mean(key, fields)
            raise ConfigurationError(f"{where}: unknown key {quote(key)}{hint}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in row:
            raise ConfigurationError(f"{where}: lacks {name}")
    return {key: _convert_some(f"{where}.{key}", row[key], fields[key]) for key in row}


def _convert_some(where: str, value: Any, field: Field) -> Any:
    if not field.is_several:
        return convert(where, value, field)
    if not isinstance(value, list):
        raise ConfigurationError(f"{where}: expected a list, found {quote(value)}")
    return tuple(convert(f"{where}[{place}]", each, field) for place, each in enumerate(value))


def _load(path: Path, what: str) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigurationError(f"{what}: cannot read {path}: {error.strerror}") from None
    except ContentError as error:
        raise ContentError(f"{what}: {path}: {error}") from None


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
