"""``python -m mpiddp``, and the command ``mpiddp``: the front, a rank, or one of mpiddp's commands.

Started by a launcher it is a rank, which runs a script (`launch.script`). Started by hand with one
of the front's options it starts the ranks (`launch.front`). A first word ``train``, ``doctor`` or
``stacks`` is mpiddp's own command. To find out which of them it is takes few imports.
"""

from __future__ import annotations

import os
import sys

from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.command_line import split
from mpiddp.launch.launcher.launcher import find_launcher, has_manager_hint


def main() -> None:
    """Do what the command line and the environment ask for."""
    words = sys.argv[1:]
    if words[:1] in (["train"], ["doctor"], ["stacks"]):
        sys.argv = [f"{sys.argv[0]} {words[0]}", *words[1:]]
        _run_own(words[0])
        return
    try:
        line = split(words)
        is_front = bool(line.front) or line.find_misplaced() is not None
    except ConfigurationError:
        is_front = False
    if is_front and not _is_rank():
        from mpiddp.launch import front

        front.run(line)
    from mpiddp.launch import script

    script.main(hidden_files=(__file__, os.path.abspath(sys.argv[0])))


def _run_own(name: str) -> None:
    if name == "train":
        from mpiddp import train

        train.main()
    elif name == "doctor":
        from mpiddp.doctor.__main__ import main as examine

        examine()
    else:
        from mpiddp.launch import stacks

        stacks.main()


def _is_rank() -> bool:
    try:
        return find_launcher() is not None or has_manager_hint()
    except LaunchError:
        return True  # It says what is wrong.


if __name__ == "__main__":
    main()
