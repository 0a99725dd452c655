"""Copies of the checkout's files that can be written, also where the checkout cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

OWNER_WRITES = 0o200


def copy(source: Path, target: Path, **options: Any) -> Path:
    """Copy a file or a directory to ``target``, or a file into it; ``options`` are copytree's."""
    if source.is_dir():
        shutil.copytree(source, target, **options)
        paths = [target, *target.rglob("*")]
    else:
        target = target / source.name if target.is_dir() else target
        target.unlink(missing_ok=True)
        shutil.copy(source, target)
        paths = [target]
    for path in paths:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | OWNER_WRITES)
    return target
