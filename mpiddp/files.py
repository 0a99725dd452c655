"""Files that are written, and read, as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpiddp.errors import ContentError

MOST_BYTES = 1 << 26
"""Of a file that is read as a whole, unless its reader says otherwise: 64 MiB."""


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields the path of a file to be made in the body, which then takes the place of ``path``.

    No reader sees half of it, whichever process is killed. Raises OSError if it cannot take that
    place; after that and any other error what stood there before stays.
    """
    # Processes of several hosts may write one file, and a name may be as long as names can be.
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file, in UTF-8, as `replaced` does. Raises OSError."""
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
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
