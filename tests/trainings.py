"""A program for the ranks of a job: several trainings, one after the other, in one session.

Argument: JSON, a list of the trainer's command lines. A launch costs more than a small training.
"""

from __future__ import annotations

import json
import sys

from mpiddp.launch.failure import WayOut
from mpiddp.launch.session import Options
from mpiddp.launch.startup import start
from mpiddp.training.config import parse


def main(command_lines: list[list[str]]) -> None:
    with WayOut() as way_out, start(Options(timeout=60), way_out) as session:
        # Here, as in mpiddp.train: it imports torch, which start imports while MPI starts.
        from mpiddp.training.trainer import train

        for words in command_lines:
            train(parse(words), session, way_out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
