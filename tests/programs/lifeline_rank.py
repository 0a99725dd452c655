"""A rank that has nothing but a lifeline: it does what the lines of its standard input say.

Each line is a JSON list, a name and its arguments; each answer is one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mpiddp.launch.lifeline.lifeline import Lifeline
from mpiddp.launch.lifeline.membership import Membership


def say(*words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def leave(code: int) -> None:
    """The job ends."""
    say("leave", code)
    os._exit(code)


def main() -> None:
    lifeline = Lifeline(leave, lambda: leave(99))
    libc = ctypes.PyDLL(None)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "listen":
            say(lifeline.listen(*arguments))
        elif name == "join":
            lifeline.join(Membership.unpack(arguments[0]))
            lifeline.note_started()
            say("joined")
        elif name == "fail":
            code, suspects = arguments
            say("verdict", lifeline.ask(code, "its error", suspects_peer=suspects))
        elif name == "lock":
            # Holds the interpreter's lock.
            libc.sleep(1000)
        elif name == "kill":
            os.kill(os.getpid(), arguments[0])
        elif name == "exit":
            os._exit(arguments[0])
        elif name == "close":
            lifeline.close()
            lifeline.wait()
            say("closed")
        elif name == "note_run":
            lifeline.note_run(Path(arguments[0]), arguments[1])
        elif name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            getattr(lifeline, name)(*arguments)
    time.sleep(1000)


if __name__ == "__main__":
    main()
