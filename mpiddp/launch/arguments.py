"""Command lines: their mistakes are errors like others, and a launch has one set of options."""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NoReturn

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Options


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigurationError instead of printing and exiting.

    So the ranks agree on a mistake, and one of them prints it.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; {self.prog} --help shows the options")

    def read(self, arguments: Sequence[str], *, show_help: bool) -> argparse.Namespace:
        """Raises ConfigurationError, and SystemExit(0) after ``--help``.

        Help is printed only if ``show_help``.
        """
        with redirect_stdout(sys.stdout if show_help else io.StringIO()):
            return self.parse_args(arguments)

    def add_launch_options(self, seconds: float, what: str) -> None:
        """Add options of `Options`. ``seconds``: the default timeout of ``what``."""
        self.add_argument(
            "--timeout",
            type=float,
            default=seconds,
            metavar="SECONDS",
            help=f"for each {what} (default: %(default)g)",
        )
        self.add_argument(
            "--interface",
            default="auto",
            metavar="NAME",
            help="auto, NAME, HOST=NAME,… or NCCL's syntax (^docker,lo) (default: auto)",
        )
        self.add_argument(
            "--allow-shared-gpu", action="store_true", help="let several ranks use one GPU"
        )

    def add_lifeline_option(self) -> None:
        """Add the option of `Options` that only a launch that does work has."""
        self.add_argument(
            "--lifeline-timeout",
            type=float,
            default=Options().lifeline_timeout,
            metavar="SECONDS",
            help="after which a node that nothing is heard of is lost (default: %(default)g)",
        )


def make_parser(program: str, description: str, usage: str | None = None) -> Parser:
    """A parser whose help keeps the lines of ``description``."""
    plain = argparse.RawDescriptionHelpFormatter
    return Parser(program, usage, description, formatter_class=plain, allow_abbrev=False)


def read_options(values: argparse.Namespace) -> Options:
    """The options that were added; the others have their defaults."""
    names = [field.name for field in dataclasses.fields(Options) if hasattr(values, field.name)]
    return Options(**{name: getattr(values, name) for name in names})
