"""Files that are written as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


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
