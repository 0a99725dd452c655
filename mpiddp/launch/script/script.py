"""A rank of ``python -m mpiddp SCRIPT``: runs a script written for torchrun, unchanged, under MPI.

The script finds torchrun's environment, and ``init_process_group()`` in it connects to a store
that runs already. Everything else is as in plain Python: ``sys.argv``, ``__main__``, the path,
tracebacks and exit codes.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.launcher import find_rank, is_first
from mpiddp.launch.options import Options
from mpiddp.launch.script import silence
from mpiddp.launch.script.command_line import OWN_OPTIONS, describe_missing, read_ranks, split
from mpiddp.launch.startup import start
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.process.streams.console import write_console
from mpiddp.process.streams.output import redirect
from mpiddp.process.streams.standard_input import take


def parse(
    arguments: Sequence[str], *, show_help: bool = True
) -> tuple[Options, str | None, list[str]]:
    """Split the command line into mpiddp's options, the module (or None), and the rest.

    The rest begins with the script's path where no module is named. ``--help`` raises
    SystemExit(0), after it was printed if ``show_help``.
    """
    line = split(arguments)
    line.check_options()
    options = read_ranks(line, show_help=show_help)
    if line.front:
        raise ConfigurationError(
            f"{line.front[0][0]} is for what starts ranks, and this process is one, which a "
            "launcher such as srun has started: type python -m mpiddp without the launcher, or "
            "use the launcher's own option, if it has one"
        )
    if line.module is None and not line.rest:
        raise ConfigurationError(line.describe_no_script())
    return options, line.module, list(line.rest)


def prepare_script(path: str, arguments: Sequence[str]) -> Callable[[], object]:
    """What runs a file as ``__main__``. Raises ConfigurationError if it cannot be read."""
    if os.path.isdir(path):
        return _prepare_folder(path, arguments)
    try:
        with io.open_code(path) as source:
            text = source.read()
    except FileNotFoundError:
        raise ConfigurationError(describe_missing(path)) from None
    except OSError as error:
        raise ConfigurationError(f"the script {path!r} cannot be read: {error.strerror}") from None
    if path.endswith((".zip", ".pyz")):
        return _prepare_archive(path, arguments)
    # As in plain Python, __file__ is absolute and sys.argv[0] is what was typed.
    location = os.path.join(os.getcwd(), path)
    return _prepare_text(
        text, location, os.path.dirname(os.path.realpath(path)), [path, *arguments]
    )


def _prepare_text(
    text: bytes, location: str, folder: str, words: list[str]
) -> Callable[[], object]:
    """What runs the text of a file at ``location``, with ``folder`` first in the path."""

    def run() -> None:
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=location,
            __cached__=None,
            __builtins__=builtins,
            __loader__=SourceFileLoader("__main__", location),
        )
        sys.argv = words
        _set_first_path(folder)
        # Pickle looks the script's names up here, and so do the answers of spawned workers,
        # under an alias that multiprocessing made when it was imported.
        sys.modules["__main__"] = main
        if "__mp_main__" in sys.modules:
            sys.modules["__mp_main__"] = main
        exec(compile(text, location, "exec", dont_inherit=True), main.__dict__)

    return run


def _prepare_folder(path: str, arguments: Sequence[str]) -> Callable[[], object]:
    """A directory with a ``__main__.py``."""
    folder = os.path.join(os.getcwd(), path)
    location = os.path.join(folder, "__main__.py")
    try:
        text = Path(location).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"directory {path!r} has no __main__.py that can be read: {error.strerror}"
        ) from None
    return _prepare_text(text, location, folder, [path, *arguments])


def _prepare_archive(path: str, arguments: Sequence[str]) -> Callable[[], object]:
    """A zip file with a ``__main__.py``, which runpy knows how to run."""

    def run() -> None:
        sys.argv = [path, *arguments]
        # run_path puts the archive first itself.
        if not sys.flags.safe_path:
            sys.path.pop(0)
        runpy.run_path(path, run_name="__main__")

    return run


def prepare_module(name: str, arguments: Sequence[str]) -> Callable[[], object]:
    """What runs a module as ``python -m`` does. Raises ConfigurationError if it is not there."""
    package = name.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"no module named {package!r} (looked in {os.getcwd()} and {sys.prefix})"
        )

    def run() -> None:
        sys.argv = [name, *arguments]
        _set_first_path(os.getcwd())
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except ImportError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename != runpy.run_module.__code__.co_filename:
                raise
            raise ConfigurationError(f"-m {name}: {error}") from None  # runpy finds no module.

    return run


def _set_first_path(folder: str) -> None:
    """Put ``folder`` where ``python -m mpiddp`` put its own, unless -P asked for nothing there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _note_options(script: str, *words: str) -> None:
    """Say which option of mpiddp's alone the script gets, if its text does not know it."""
    names = [word.partition("=")[0] for word in words]
    found = next((name for name in names if name.replace("_", "-") in OWN_OPTIONS), None)
    # A pipe's text can be read only once, and is the script's.
    if found is None or split(sys.argv[1:]).is_marked or not Path(script).is_file():
        return
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return
    if found.strip("-").replace("_", "-") not in text.replace("_", "-"):
        write_console(
            f"mpiddp: {found} stands after {script}, so the script gets it; an option of mpiddp "
            "stands before the script\n"
        )


def main(hidden_files: tuple[str, ...] = ()) -> None:
    """Start the launch, run the script in it, and leave with the script's exit code.

    ``hidden_files``: source files that are left out at the top of a traceback.
    """
    hidden = (__file__, runpy.__file__, "<frozen runpy>", *hidden_files)
    with FailureHandler(hidden) as failure_handler:
        signals = PreemptionSignals()
        options, module, rest = parse(sys.argv[1:], show_help=is_first())
        failure_handler.redirect(redirect(options, find_rank()))
        problem = take(os.environ.pop(environment.STANDARD_INPUT, ""), find_rank())
        if problem is not None:
            write_console(
                f"mpiddp: rank 0 has no standard input: {problem}; give the script a file's name\n"
            )
        if is_first() and module is None:
            _note_options(*rest)
        run = prepare_script(rest[0], rest[1:]) if module is None else prepare_module(module, rest)
        session = start(options, failure_handler, makes_group=False, signals=signals)
        is_silent = silence.watch(session)

        def close() -> None:
            has_talked = not failure_handler.is_own_process() or not is_silent()
            session.close()
            # All ranks have come to a good end.
            if not has_talked:
                write_console(silence.describe(session.world.size))

        # Registered before the script's own functions, it runs after them and after its threads.
        atexit.register(close)
        failure_handler.begin_script()
        signals.hand_over()
        run()
