"""What each rank runs: its command line, checked before anything is started."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from mpiddp import environment
from mpiddp.errors import FAILURE, ConfigurationError
from mpiddp.front.launch_plan import is_in_allocation
from mpiddp.launch.launcher.programs import READ_EVERYWHERE, find_program
from mpiddp.launch.script.command_line import (
    COMMANDS,
    WITHOUT_RANKS,
    CommandLine,
    describe_missing,
    underscore,
)
from mpiddp.launch.script.front_options import NONE, FrontOptions, split_words


def make_rank_command(line: CommandLine, options: FrontOptions) -> list[str]:
    """The command line of one rank. Raises ConfigurationError if there is nothing to run."""
    wrap = split_words(environment.WRAP, os.environ.get(environment.WRAP, ""))
    if wrap and options.launcher == NONE:
        raise ConfigurationError(
            f"{environment.WRAP} is for scripts whose ranks are started here; this program starts "
            "its own, without it"
        )
    _check_places(line, options)
    if line.ranks and options.launcher == NONE:
        raise ConfigurationError(
            f"{line.ranks[0]} is for ranks that are started here, and with --launcher none the "
            "program starts its own: leave it out"
        )
    if wrap:
        _check_starter(environment.WRAP, wrap[0])
    else:
        _check_starter("--python", options.python or sys.executable)
        _check_program(line)
        if options.python is None:
            _check_syntax(line)
    start = [
        *_block_signals(options),
        *wrap,
        options.python or sys.executable,
        *_interpreter_options(),
    ]
    if options.launcher == NONE and line.command is not None:
        module = COMMANDS[line.command].removesuffix(".__main__")
        return [*start, "-m", module, *line.rest[1:]]
    if options.launcher == NONE:
        return [*start, *_list_program(line)]
    for word in start:
        if word in READ_EVERYWHERE:
            raise ConfigurationError(
                f"{environment.WRAP}, --python or Python's own options have the word {word!r}, "
                "which a launcher reads as its own: write it inside a longer one (sh -c '…')"
            )
    return [*start, "-m", "mpiddp", *underscore([*line.ranks, *_list_program(line)])]


def _check_starter(name: str, program: str) -> None:
    """Raise ConfigurationError if this machine does not have the program that starts ranks.

    In a Slurm job the nodes may have other programs than this one, which may be a login node.
    """
    if not is_in_allocation(os.environ) and find_program(program) is None:
        raise ConfigurationError(
            f"{name} names {program!r} as the program that starts each rank, but there is no such "
            f"program {'at that path' if '/' in program else 'in PATH'}"
        )


def _block_signals(options: FrontOptions) -> Sequence[str]:
    """What starts a rank that a signal of preemption cannot kill before it has a handler."""
    if not options.requeue:
        return ()
    command = ("env", "--block-signal=USR1,USR2")
    try:
        # GNU's env has it since 2019.
        found = subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ()
    return command if found.returncode == 0 else ()


def _list_program(line: CommandLine) -> list[str]:
    if line.module is not None:
        return ["-m", line.module, *line.rest]
    is_like_an_option = line.rest[0].startswith("-") or line.is_marked
    return [*(["--"] if is_like_an_option else []), *line.rest]


def _interpreter_options() -> list[str]:
    """Python's own options, such as -u or -X: the ranks get them too."""
    words = iter(sys.orig_argv[1:])
    found: list[str] = []
    for word in words:
        if not word.startswith("-"):
            break  # The installed command.
        # Letters can stand together (-Bu); a value follows -m, -W and -X (-Xdev or -X dev).
        last = re.match("-[^-cmWX]*([cmWX]?)", word)
        if last is not None and last[1] in ("c", "m"):
            found += [last[0][:-1]] if len(last[0]) > 2 else []
            break
        found.append(word)
        if word == "--check-hash-based-pycs" or (last is not None and last[1] and last[0] == word):
            found.append(next(words))
    return found


def _check_places(line: CommandLine, options: FrontOptions) -> None:
    """Raise ConfigurationError if options stand on the wrong side of the script."""
    line.check_options()
    misplaced = line.find_misplaced()
    if misplaced is not None:
        _check_program(line)  # A word that is no script has no options.
    if misplaced is not None and line.own_program is not None:
        raise ConfigurationError(f"{misplaced} stands after {line.command}: put it before")
    if misplaced is not None:
        raise ConfigurationError(
            f"{misplaced} stands after {line.rest[0]}, so it would go to the script: put it before "
            f"the script, or -- before {line.rest[0]} if it is the script's own"
        )
    if line.module is None and not line.rest:
        raise ConfigurationError(line.describe_no_script())
    if line.command in WITHOUT_RANKS and options.launcher != NONE:
        raise ConfigurationError(f"{line.command} starts no ranks; it takes none of these options")


def _check_syntax(line: CommandLine) -> None:
    """Show a syntax error of what the ranks would run, as Python does, and end with its code.

    What is no file of Python's text, or does not lie still, is left to the ranks.
    """
    if line.command is not None:
        return
    path = _find_module(line.module) if line.module is not None else line.rest[0]
    if path is not None and os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    if path is None or not os.path.isfile(path) or path.endswith((".zip", ".pyz")):
        return
    import warnings

    try:
        with warnings.catch_warnings(), open(path, "rb") as file:
            warnings.simplefilter("ignore")  # The ranks warn.
            compile(file.read(), os.path.abspath(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        import traceback

        traceback.print_exception(error.with_traceback(None))
        raise SystemExit(FAILURE) from None
    except (OSError, ValueError, RecursionError, MemoryError):
        return


def _find_module(name: str) -> str | None:
    """The file of a module, or the directory of a package, found without running anything."""
    places = None if sys.flags.safe_path else [os.getcwd(), *sys.path]
    path = None
    for end in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        path = spec.origin if places is None else next(iter(places), None)
    return path if path is not None and (places is not None or path.endswith(".py")) else None


def _check_program(line: CommandLine) -> None:
    """Raise ConfigurationError if a rank would not find the script or module."""
    if line.command is not None:
        return
    here = os.getcwd()
    if line.module is not None:
        package = line.module.partition(".")[0]
        # The installed command, unlike python -m, does not look in this directory.
        path = sys.path[:]
        sys.path[:0] = [] if sys.flags.safe_path else [here]
        try:
            is_there = bool(package) and importlib.util.find_spec(package) is not None
        finally:
            sys.path[:] = path
        if not is_there:
            raise ConfigurationError(
                f"no module named {package!r} (looked in {here} and {sys.prefix})"
            )
        return
    script = line.rest[0]
    if os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise ConfigurationError(f"{script!r} is a directory without a __main__.py")
    elif script == "-" or os.path.abspath(script).startswith(("/dev/", "/proc/")):
        raise ConfigurationError(
            f"each rank reads the script, and {script!r} is what this process reads alone: save it "
            "to a file, and give its name"
        )
    elif not os.path.exists(script):
        raise ConfigurationError(describe_missing(script))
    elif not os.access(script, os.R_OK):
        raise ConfigurationError(f"the script {script!r} cannot be read")
