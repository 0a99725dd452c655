"""Command lines: their mistakes are errors like others, and a launch has one set of options."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Options
from mpiddp.process.streams.output import Output


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
            "--port-range",
            default=Options().port_range,
            metavar="LOW-HIGH",
            help="ports that mpiddp may listen on (default: any, or MPIDDP_PORT_RANGE)",
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
            help="after which a silent node is considered lost (default: %(default)g)",
        )

    def add_stall_option(self) -> None:
        """Add after how long a job has stalled."""
        self.add_argument(
            "--stall-timeout",
            type=float,
            default=Options().stall_timeout,
            metavar="SECONDS",
            help="end a job in which no rank's main thread has moved for so long (default: never)",
        )

    def add_binding_option(self) -> None:
        """Add how ranks are bound to cores."""
        self.add_argument(
            "--bind",
            default=Options().bind,
            metavar="KIND",
            help="bind ranks to cores: auto, none, cores or numa (default: %(default)s)",
        )

    def add_output_options(self) -> None:
        """Add options of `Output`."""
        add = self.add_argument
        add("--log-dir", type=Path, metavar="DIR", help="write rank-N.out and rank-N.err there")
        add(
            "--console",
            default=Output().console,
            metavar="RANKS",
            help="ranks that print to the console: all, none, or ranks as 0,3-5 (default: all)",
        )
        add("--label", action="store_true", help="put [rank@host] before each line on the console")


@contextmanager
def name_as_typed(words: Iterable[str]) -> Iterator[None]:
    """Let a ConfigurationError name options as they stand in ``words``, and not as keys of TOML."""
    try:
        yield
    except ConfigurationError as error:
        message = str(error)
        for option in {word.partition("=")[0] for word in words if word.startswith("--")}:
            key = re.escape(option[2:].replace("-", "_"))
            message = re.sub(rf"^{key}(?=: )|(?<![-\w]){key}(?= = )", option, message)
        error.args = (message,)
        raise


def make_parser(program: str, description: str, usage: str | None = None) -> Parser:
    """A parser whose help keeps the lines of ``description``."""
    plain = argparse.RawDescriptionHelpFormatter
    return Parser(program, usage, description, formatter_class=plain, allow_abbrev=False)


def read_options(values: argparse.Namespace) -> Options:
    """The options that were added; the others have their defaults."""
    given = vars(values)

    def pick(kind: type[Any]) -> dict[str, Any]:
        return {each.name: given[each.name] for each in fields(kind) if each.name in given}

    with name_as_typed(f"--{name.replace('_', '-')}" for name in given):
        return Options(output=Output(**pick(Output)), **pick(Options))
