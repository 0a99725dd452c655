"""Processes of this machine, by their parents and by what stands in their environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from mpiddp.process.rank_process import read_stat


@dataclass(frozen=True)
class Relative:
    """A process, and where it comes from."""

    parent: int
    session: int
    is_marked: bool
    """Whether the mark that was looked for stands in its environment."""


def list_children(process: int) -> list[int]:
    """Its children that live or have not been waited for; none if it has gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as children:
                found += map(int, children.read().split())
    return found


def has_variable(process: int, starts: Iterable[bytes]) -> bool:
    """Whether a process was started with a variable of which this is the name, or the beginning.

    False for one that has ended, and for another user's.
    """
    with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
        variables = b"\0" + file.read()
        return any(b"\0" + start in variables for start in starts)
    return False


def survey(mark: bytes) -> dict[int, Relative]:
    """This user's processes that have not ended. ``mark``: for `has_variable`; empty for none.

    Those that are older than this process are not marked.
    """
    user, found, begin = os.geteuid(), {}, int(read_stat("self")[19])
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            process = int(name)
            if os.stat(f"/proc/{name}").st_uid != user:
                continue
            stat = read_stat(process)
            if stat[0] not in "ZX":
                is_young = int(stat[19]) >= begin
                is_marked = is_young and bool(mark) and has_variable(process, [mark])
                found[process] = Relative(int(stat[1]), int(stat[3]), is_marked)
    return found


def find_descendants(roots: Iterable[int], relatives: dict[int, Relative]) -> set[int]:
    """These processes, and all below them."""
    children: dict[int, list[int]] = {}
    for process, relative in relatives.items():
        children.setdefault(relative.parent, []).append(process)
    found: set[int] = set()
    left = [process for process in roots if process in relatives]
    while left:
        process = left.pop()
        if process not in found:
            found.add(process)
            left += children.get(process, ())
    return found
