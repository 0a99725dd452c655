"""``python -m benchmarks training-step``: what a training step takes, by synchronisation."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables and write what was asked for."""
    # The ranks, which import this package as well, need no part of the command.
    from benchmarks.training_step import command

    command.main(arguments)
