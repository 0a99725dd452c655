"""Files that are written as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, in UTF-8, so that no reader sees half of it, whichever process is killed.

    Raises OSError where it cannot be written; what stood there before stays then.
    """
    # Processes of several hosts may write one file, and a name may be as long as names can be.
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Some systems say only now that the disk is full, or empty the file after a crash.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
