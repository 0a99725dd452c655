"""Command lines whose mistakes leave through the way out."""

from __future__ import annotations

import argparse
from typing import NoReturn

from mpiddp.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigurationError instead of printing and exiting.

    So the ranks agree on a mistake, and one of them prints it.
    """

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; {self.prog} --help shows the options")
