"""From what others have written, JSON or XML, to a value of a declared type.

    table = read_json(Path("tuning.json"), Table)

A type is a frozen dataclass or a ``msgspec.Struct``, and what such types are made of. Whatever does
not fit it is one line that names the file and the field:

    plan.json: gpus[3].threadblocks[0].id: expected a whole number of 0 or more, found 'abc'

Numbers are finite: NaN and infinities, which JSON does not have and Python writes, are texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar
from xml.parsers import expat

from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import MOST_BYTES, read_whole

T = TypeVar("T")

MOST_DEPTH = 64
"""Levels of lists and objects in each other, or of elements; real files have fewer than ten."""
TOO_DEEP = f"expected at most {MOST_DEPTH} levels of lists and objects"
SHOWN = 40
"""Characters of a value in a message."""
KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
    "null": "null", "array": "a list", "object": "an object",
}  # fmt: skip
TYPES = {
    "int": int, "float": float, "str": str, "bool": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip
WORDS = (
    (r"^Expected ", "expected "),
    (r"(?<!length) >= (\S+)$", r" of \1 or more"),
    (r"(?<!length) <= (\S+)$", r" of at most \1"),
    (r"^Object missing required field `(.*)`$", r"lacks \1"),
    (r"^Object contains unknown field `(.*)`$", r"has a field that is not known: \1"),
    (r"^Invalid enum value (.*)$", r"\1 is not known"),
    (r"^(Number|Integer value) out of range$", "expected a smaller number"),
)
"""What msgspec says, in our words."""

_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
_MESSAGE = re.compile(r"(.*?)(?:, got `(\w+)`)?(?: - at (`key` in )?`\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def read_json(path: Path, kind: type[T], most: int = MOST_BYTES) -> T:
    """The value that a file holds. Raises ConfigurationError, which names the file."""
    try:
        return decode(read_whole(path, most), kind)
    except ContentError as error:
        raise ContentError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None


def decode(data: bytes | str, kind: type[T]) -> T:
    """The value of a JSON document. Raises ContentError, which names the field."""
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    _check_depth(text)
    try:
        value = json.loads(data, parse_constant=str, parse_float=_read_float)
    except ValueError as error:
        raise ContentError(f"expected JSON: {error}") from None
    except RecursionError:
        raise ContentError(TOO_DEEP) from None
    return convert(value, kind)


def _read_float(text: str) -> float | str:
    value = float(text)
    return value if isfinite(value) else text


def convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """The value of what a parser made: dicts, lists, texts, numbers. Raises ContentError.

    ``strict``: a text is no number.
    """
    import msgspec  # Who reads nothing does not wait for it.

    try:
        return msgspec.convert(value, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        raise ContentError(_explain(str(error), value)) from None


def _check_depth(data: bytes) -> None:
    """Raise ContentError if too much is nested; what is no JSON may pass."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Quotes that are next to each other end one text and begin another, or hold nothing.
    brackets = re.sub(rb'"[^"]*"', b"", data.translate(None, _OTHERS).replace(b'""', b""))
    for _ in range(MOST_DEPTH):
        before, brackets = brackets, brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(brackets) == len(before):
            return
    if brackets:
        raise ContentError(TOO_DEEP)


def _explain(message: str, value: Any) -> str:
    """What msgspec says, with the place and what stands there instead."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    text, got, is_key, path = match.groups()
    for pattern, words in WORDS:
        text = re.sub(pattern, words, text)
    text = re.sub(r"`([^`]*)`", _name_kinds, text)
    found = list(_find(value, _STEP.findall(path or "")))
    if got and not is_key:
        found = [each for each in found if type(each[1]) is TYPES.get(got)]
    if len(found) > 1 and not got:
        return f"{path.lstrip('.').replace('...', '…')}: {text}"
    place, value = found[0] if found else (path or "", value)
    shows = text.startswith("expected") and ", found" not in text and not is_key and found
    shown = f", found {_show(value)}" if shows else ""
    name = f"a key of {place.lstrip('.')}" if is_key else place.lstrip(".")
    return f"{name}: {text}{shown}" if name else f"{text}{shown}"


def _name_kinds(match: re.Match[str]) -> str:
    return " or ".join(KINDS.get(each, each) for each in match[1].split(" | "))


def _show(value: Any) -> str:
    if isinstance(value, list | dict):
        return KINDS["array" if isinstance(value, list) else "object"] if value else str(value)
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _find(value: Any, path: list[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Where a path may lead, and what is there; msgspec does not say which key of a mapping."""
    if not path:
        yield "", value
        return
    (name, place), *rest = path
    keys: list[Any] = [name]
    if place:
        keys = list(value) if isinstance(value, dict) else [int(place)]
    for key in keys:
        own = f".{key}" if name else f"[{key!r}]"
        yield from ((own + where, found) for where, found in _find(value[key], rest))


def decode_xml(data: bytes, tag: str, kind: type[T]) -> T:
    """The value of an XML document: attributes are fields, and so are the elements of each tag.

    ``kind`` has a list of values for each tag. Text between elements is left out. Raises
    ContentError, also for a document type, since its entities may grow without end.
    """
    root: dict[str, Any] = {}
    path = [root]

    def begin(name: str, fields: dict[str, Any]) -> None:
        if len(path) > MOST_DEPTH:
            raise ContentError(f"expected at most {MOST_DEPTH} levels of elements")
        others = path[-1].setdefault(name, [])
        if not isinstance(others, list):
            raise ContentError(f"{name} is both an element and a field")
        others.append(fields)
        path.append(fields)

    def refuse(name: str, *_: object) -> None:
        raise ContentError(f"expected no document type, found {name!r}")

    parser = expat.ParserCreate()
    parser.StartElementHandler = begin
    parser.EndElementHandler = lambda _: path.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise ContentError(f"expected XML: {error}") from None
    if tag not in root:
        raise ContentError(f"expected an element {tag}, found {next(iter(root))}")
    return convert(root[tag][0], kind, strict=False)
