"""``python -m mpiddp``, and the command ``mpiddp``: the front, a rank, or one of mpiddp's commands.

Started by a launcher it is a rank, which runs a script (`launch.script`). Started by hand with one
of the front's options, or in a Slurm job, it starts the ranks (`mpiddp.front`). A first word
that `command_line.COMMANDS` lists is a command of mpiddp. Finding out takes few imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import mpiddp
from mpiddp import environment
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.failure import early
from mpiddp.launch.launcher.exported_variables import forget_inherited, forget_launch
from mpiddp.launch.launcher.launcher import find_launcher, has_manager_hint
from mpiddp.launch.script.command_line import WITHOUT_RANKS, CommandLine, split, take_words
from mpiddp.options.reader import HELP
from mpiddp.wording import print_text


def main() -> None:
    """Do what the command line and the environment ask for."""
    is_started_by_rank = forget_inherited()
    sys.argv[1:] = words = take_words(sys.argv[1:])
    line: CommandLine | None = None
    with contextlib.suppress(ConfigurationError):  # `script` says what is wrong.
        line = split(words)
    if line is not None and ("--version", "") in line.front:
        print_text(f"mpiddp {mpiddp.__version__}")
        return
    if line is not None and _is_front(line, is_started_by_rank):
        if is_started_by_rank or _find_size() is not None:
            forget_launch()
        from mpiddp.front import front

        front.run(line, find_check(line))
    if line is not None and line.own_module is not None and not (line.front or line.ranks):
        name = f"{sys.argv[0]} {line.command or ''}".rstrip()
        sys.argv = [name, *line.rest[line.module is None :]]
        program = importlib.import_module(line.own_module)
        early.forget()
        program.main()
        return
    from mpiddp.launch.script import script

    script.main(hidden_files=(__file__, os.path.abspath(sys.argv[0])))


def find_check(line: CommandLine) -> Callable[[Sequence[str]], object] | None:
    """What refuses the words after one of mpiddp's own programs, without any rank."""
    if line.own_program is None or line.own_module is None:
        return None
    module = line.own_module

    def check(words: Sequence[str]) -> None:
        # Imported only if it is asked: --dry-run does without.
        getattr(importlib.import_module(module), "check", lambda words: None)(words)

    return check


def _is_front(line: CommandLine, is_started_by_rank: bool = False) -> bool:
    """Whether this process starts the ranks: no launcher has started it, and there are some.

    It starts them, too, if a rank has started it, or a launcher has started a single process, as
    ``srun --pty bash`` does, and the command line asks for ranks.
    """
    is_own = not line.front and not line.ranks and line.own_program is not None
    if HELP & {*line.ranks, *(line.rest[1:] if is_own else ())}:
        return False
    if line.front and is_started_by_rank:
        return True
    size = _find_size()
    if size is not None:
        return bool(line.front) and size == 1
    if line.front:
        return True
    if line.command in WITHOUT_RANKS:
        return False
    return environment.is_set(environment.OF_SCHEDULERS) or line.find_misplaced() is not None


def _find_size() -> int | None:
    """How many processes this one's launcher has started; 0 if it does not say, or contradicts
    itself, which a rank then says. None without a launcher."""
    try:
        launcher = find_launcher()
    except LaunchError:
        return 0
    if launcher is None:
        return 0 if has_manager_hint() else None
    return launcher.size or 0


if __name__ == "__main__":
    main()
