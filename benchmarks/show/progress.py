"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from tqdm import tqdm


@contextlib.contextmanager
def show_progress(total: int | None, unit: str) -> Iterator[tqdm[NoReturn]]:
    with tqdm(total=total, disable=None, unit=unit, leave=False) as bar:
        yield bar
