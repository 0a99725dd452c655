"""What the commands share: their command lines, and one line for what goes wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import requirements
from state import ClusterError, Machine, Shape, demand_shape, locked


def main(work: Callable[[], None]) -> None:
    """Run a command; what goes wrong becomes one line and exit code 1."""
    # Users of the cluster read its configuration, and munged wants its socket to be reached.
    os.umask(0o022)
    try:
        work()
    except (ClusterError, OSError) as error:
        sys.exit(f"jobs/cluster/{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser that calls the program by its place in the checkout."""
    name = f"jobs/cluster/{Path(sys.argv[0]).name}"
    return argparse.ArgumentParser(prog=name, description=description, allow_abbrev=False)


def parse_nothing(description: str) -> None:
    """The command line of a command without arguments."""
    parser(description).parse_args()


def for_node(description: str, work: Callable[[Shape, Machine], None]) -> None:
    """A whole command for one node: read the command line, then work with nobody beside."""
    reader = parser(description)
    reader.add_argument("node", metavar="NODE", help="as node2")
    name = reader.parse_args().node
    requirements.check_root()
    with locked():
        shape = demand_shape()
        work(shape, shape.find(name))
