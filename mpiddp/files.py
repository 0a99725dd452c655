"""Files that are written and read as a whole, and values of declared types that they hold.

    table = read_json(Path("tuning.json"), Table)

A type is a frozen dataclass or a ``msgspec.Struct``, and what such types are made of. Whatever does
not fit it is one line that names the file and the field:

    plan.json: gpus[3].threadblocks[0].id: expected a whole number of 0 or more, found 'abc'

Numbers are finite: NaN and infinities, which JSON does not have and Python writes, are texts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from mpiddp.errors import ConfigurationError, ContentError, UnwritableError
from mpiddp.wording import describe_size

T = TypeVar("T")

MOST_BYTES = 1 << 26
"""Of a file that is read as a whole, unless its reader says otherwise: 64 MiB."""
MOST_DEPTH = 64
"""Levels of lists and objects in each other, or of elements; real files have fewer than ten."""
TOO_DEEP = f"expected at most {MOST_DEPTH} levels of lists and objects"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers of a full disk, and of a quota that is used up."""
LOCAL_FILE_SYSTEMS = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
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
"""Patterns of msgspec's messages, and our wording of each."""

_OTHERS = bytes(set(range(256)) - set(b'"[]{}'))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_MESSAGE = re.compile(r"(.*?)(?:, got `(\w+)`)?(?: - at (`key` in )?`\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def explain_unwritable(error: OSError, path: Path, needed: int = 0) -> str:
    """Why ``path`` cannot be written: ``No space left on device (2 GiB needed, 6 MiB free)``.

    ``needed``: bytes; 0 if they are not known. Of a full disk it tells what is free there now, and
    of a file that is too large what its limit is.
    """
    details = [f"{describe_size(needed)} needed"] if needed else []
    if isinstance(error, UnwritableError) or error.errno not in (*NO_ROOM, errno.EFBIG):
        details = []
    elif error.errno == errno.EFBIG:
        import resource  # Most processes need none.

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            details.append(f"ulimit -f allows {describe_size(limit)}")
    else:
        with contextlib.suppress(OSError):
            found = os.statvfs(path if path.is_dir() else path.parent)
            details.append(f"{describe_size(found.f_bavail * found.f_frsize)} free")
            if found.f_files and not found.f_favail:
                details.append("no file more")
    reason = error.strerror or str(error)
    return f"{reason} ({', '.join(details)})" if details else reason


def find_cause(error: BaseException) -> OSError | None:
    """The OSError behind ``error``: libraries have errors of their own for a full disk."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


@contextlib.contextmanager
def refused(path: Path, needed: int = 0) -> Iterator[None]:
    """Raises UnwritableError for an OSError in the body, or an error that an OSError caused.

    ``needed``: bytes that are written to ``path``; 0 if they are not known.
    """
    try:
        yield
    except Exception as error:  # Libraries raise their own types.
        cause = find_cause(error)
        if cause is None:
            raise
        reason = explain_unwritable(cause, path, needed)
        raise UnwritableError(cause.errno or errno.EIO, reason, str(path)) from None


@contextlib.contextmanager
def replaced(path: Path, needed: int = 0) -> Iterator[Path]:
    """Yields the path of a file to be made in the body, which then takes the place of ``path``.

    No reader sees half of it, whichever process is killed. Raises as `refused` if it cannot take
    that place; after that and any other error what stood there before stays.
    """
    # Processes of several hosts may write one file, and a name may be as long as names can be.
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    with refused(path, needed):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, as `replaced` does; a link stays, and leads to it.

    A device or a pipe is written as it is. Raises UnwritableError.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with refused(path):
            path.write_bytes(data)
        return
    target = path.resolve() if path.is_symlink() else path
    with replaced(target, len(data)) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        # Some systems say only now that the disk is full, or empty the file after a crash.
        os.fsync(file.fileno())


def read_whole(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file. Nothing is waited for, as the writer of a pipe would be.

    Raises OSError if it cannot be read, and ContentError if it is no regular file, or has more than
    ``most`` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        # A socket, and a link to itself: no file comes of waiting.
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise ContentError(f"expected a file: {error.strerror}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        found = "a directory" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise ContentError(f"expected a file, found {found}")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ContentError(f"expected at most {most} bytes, found more")
    return data


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's table. Raises OSError, and ContentError if it is none."""
    import tomllib  # Most processes read none.

    data = read_whole(path)
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ContentError(f"not valid TOML: {error}") from None


# Files of others


def read_json(path: Path, kind: type[T]) -> T:
    """The value that a file holds. Raises ConfigurationError, which names the file."""
    try:
        return decode(read_whole(path), kind)
    except ContentError as error:
        raise ContentError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None


def decode(data: bytes | str, kind: type[T]) -> T:
    """The value of a JSON document. Raises ContentError, which names the field."""
    try:
        # A parser that is given bytes takes other encodings, too.
        text = data if isinstance(data, str) else data.decode()
        _check_depth(text.encode(errors="surrogatepass"))
        value = json.loads(text, parse_constant=str, parse_float=_read_float)
    except ContentError:
        raise
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
    except UnicodeError:
        raise ContentError("a text has half of a character, which no encoding has") from None


def _check_depth(data: bytes) -> None:
    """Raise ContentError if too much is nested; what is no JSON may pass."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Quotes that are next to each other end one text and begin another, or hold nothing.
    brackets = data.translate(_ALIKE, _OTHERS).replace(b'""', b"")
    brackets = re.sub(rb'"[^"]*"', b"", brackets)
    for _ in range(MOST_DEPTH):
        before, brackets = brackets, brackets.replace(b"[]", b"")
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
    """The places that a path may mean, and their values; msgspec names no key of a mapping."""
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


class _Elements:
    """Makes a dict of each element: its attributes, and the elements in it by their tags."""

    def __init__(self) -> None:
        self._path: list[dict[str, Any]] = [{}]

    def start(self, tag: str, fields: dict[str, Any]) -> None:
        if len(self._path) > MOST_DEPTH:
            raise ContentError(f"expected at most {MOST_DEPTH} levels of elements")
        others = self._path[-1].setdefault(tag, [])
        if not isinstance(others, list):
            raise ContentError(f"{tag} is both an element and a field")
        others.append(fields)
        self._path.append(fields)

    def end(self, tag: str) -> None:
        self._path.pop()

    def doctype(self, name: str, *_: object) -> None:
        # Its entities may grow without end.
        raise ContentError(f"expected no document type, found {name!r}")

    def close(self) -> dict[str, Any]:
        return self._path[0]


def decode_xml(data: bytes, tag: str, kind: type[T]) -> T:
    """The value of an XML document: attributes are fields, and so are the elements of each tag.

    ``kind``, of the outermost element, has a list of values for each tag. Text between elements is
    left out. Raises ContentError.
    """
    from xml.etree import ElementTree

    parser = ElementTree.XMLParser(target=_Elements())
    try:
        parser.feed(data)
        root: Any = parser.close()
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        said = "" if isinstance(error, ContentError) else "expected XML: "
        raise ContentError(f"{said}{error}") from None
    if tag not in root:
        raise ContentError(f"expected an element {tag}, found {next(iter(root))}")
    return convert(root[tag][0], kind, strict=False)


def is_local(path: Path) -> bool:
    """Whether a file, or the directory that it would be in, is on a disk of this machine."""
    place = os.path.realpath(path)
    try:
        rows = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # The innermost mount counts, and of those at one place the last.
    point, kind = "", ""
    for row in rows:
        left, _, right = row.partition(" - ")
        found = unescape(left.split(" ")[4])
        if f"{place}/".startswith(f"{found.rstrip('/')}/") and len(found) >= len(point):
            point, kind = found, right.partition(" ")[0]
    return kind in LOCAL_FILE_SYSTEMS


def unescape(text: str) -> str:
    r"""A path of mountinfo, in which a space is ``\040`` (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
