"""A rank that has nothing but a lifeline: it does what the lines of its standard input say.

Each line is a JSON list, a name and its arguments; each answer is one JSON line. The program's
argument is Python for the companion, which changes more of `LIMITS`.
"""

import ctypes
import json
import operator
import os
import pickle
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.lifeline import lifeline as lifelines
from mpiddp.lifeline.lifeline import Lifeline
from mpiddp.lifeline.membership import Entrance, Membership

LIMITS = (
    "from mpiddp.lifeline import companion, decision, requests; "
    "from mpiddp.lifeline.stacks import answers, dump; "
    "companion.LEAVE_SECONDS = dump.LONGEST_SECONDS = answers.RECORD_SECONDS = 5.0; "
    "requests.ANSWER_SECONDS = 8.0"
)
"""Of companions, longer than on an idle machine."""


def say(*words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def leave(code: int) -> None:
    say("leave", code)
    os._exit(code)


def recurse(depth: int = 0) -> None:
    recurse(depth + 1)


def open_lifeline(rank: int, entrance: Entrance) -> Lifeline:
    return Lifeline(entrance, rank, leave, lambda: leave(99))


def main() -> None:
    # What a decision takes is looked at, not how busy the machine is.
    lifelines.ANSWER_SECONDS = 20.0
    lifelines.PROGRAM = lifelines.PROGRAM.replace("main()", f"{LIMITS}; {sys.argv[1]}; main()")
    lifeline: Any = None
    libc = ctypes.PyDLL(None)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "start":
            enter = partial(open_lifeline, arguments[0])
            lifeline = lifelines.start_companion(enter)
            entrance = lifeline.entrance
            say(entrance.address, entrance.token)
        elif name == "enter":
            lifeline = open_lifeline(arguments[0], Entrance(*arguments[1:]))
            say("entered")
        elif name == "listen":
            say(lifeline.listen(*arguments))
        elif name == "join":
            lifeline.join(Membership.unpack(arguments[0]) if arguments[0] else None)
            lifeline.note_started()
            say("joined")
        elif name == "fail":
            code, origin = arguments
            say("decision", lifeline.ask(code, "its error", origin))
        elif name == "lock":
            say("locking")
            # Holds the interpreter's lock. The question's signal would end a sleep, and then others
            # could have it.
            libc.read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        elif name == "settle":
            # What was said before has reached the companion.
            lifeline._ask("ask", "position", lifelines.ANSWER_SECONDS)
            say("settled")
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
        elif name == "raise":
            sys.setrecursionlimit(20000)
            try:
                recurse()
            except RecursionError as error:
                lifeline.note_failure(error)
        elif name == "fake_record":
            # As torch's module, with one collective in the flight recorder.
            dump = pickle.dumps({"entries": [{**arguments[0], "time_created_ns": time.time_ns()}]})
            module = types.SimpleNamespace(_dump_nccl_trace=lambda *_, dump=dump: dump)
            sys.modules["torch._C._distributed_c10d"] = module
        else:
            operator.attrgetter(name)(lifeline)(*arguments)
    time.sleep(1000)


if __name__ == "__main__":
    main()
