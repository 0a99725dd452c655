"""Notes which functions of mpiddp a program enters, each once, in the order of their first calls.

Arguments: a file for the names; then a script, or a module, and its arguments, of which rank 0 is
followed; or ``lose``, to have the last rank killed and rank 0's companion followed; or ``call``, to
call a function on a rank, which is followed in a second file.
"""

import atexit
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = str(Path(__file__).parents[2]) + os.sep


def follow(file: str, begin: str = "") -> None:
    """From here on, in all threads, until this process ends in good order.

    ``begin``: a function; what was entered before its last call is forgotten.
    """
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in seen:
            seen[frame.f_code] = None
        if event == "call" and begin and frame.f_code.co_qualname == begin:
            seen.clear()
            seen[frame.f_code] = None

    def write() -> None:
        sys.setprofile(None)
        found = [each for each in seen if each.co_filename.startswith(PACKAGE + "mpiddp" + os.sep)]
        lines = [f"{each.co_filename.removeprefix(PACKAGE)}: {each.co_qualname}" for each in found]
        Path(file).write_text("\n".join(lines))

    atexit.register(write)
    threading.setprofile(note)
    sys.setprofile(note)


def lose(file: str) -> None:
    import mpiddp
    from mpiddp.lifeline import lifeline

    here = str(Path(__file__).parent)
    begin = f"import sys; sys.path.insert(0, {here!r}); import followed; "
    lifeline.PROGRAM = f"{begin}followed.follow({file!r}); {lifeline.PROGRAM}"
    with mpiddp.init() as session:
        session.gather(0)
        if session.world.rank == session.world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)


def call(file: str) -> None:
    """Start a rank, and call two functions on it: one that follows the rank, and another one."""
    import mpiddp

    follow(file)
    with mpiddp.ranks(1) as ranks:
        ranks.run(follow, f"{file}-rank", "CallServer._do")
        ranks.run(time.sleep, 0)


def main() -> None:
    file, program, *arguments = sys.argv[1:]
    if program == "call":
        call(file)
        return
    if program == "lose":
        lose(file)
        return
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        # Nothing of mpiddp is in this import, which takes twice as long if it is followed.
        import torch.distributed  # noqa: F401 - see above

        follow(file)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
