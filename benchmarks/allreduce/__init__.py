"""``python -m benchmarks allreduce``: one all-reduce beside the others, by size."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables and write what was asked for."""
    # The ranks, which import this package as well, need no part of the command.
    from benchmarks.allreduce import command

    command.main(arguments)
