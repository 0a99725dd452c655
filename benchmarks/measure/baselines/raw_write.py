"""The least that putting bytes on a disk takes: one file, written in one piece, then flushed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import xxhash


def time_write(path: Path, content: memoryview) -> float:
    """Seconds of writing a new file and having it on the disk. The file is removed afterwards."""
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        done = 0
        while done < len(content):
            # A raw write may take only a part.
            done += file.write(content[done:]) or 0
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def time_digest(content: memoryview) -> float:
    """Seconds of the digest of the bytes in memory that a checkpoint's files have."""
    begin = time.perf_counter()
    xxhash.xxh3_128_digest(content)
    return time.perf_counter() - begin
