"""Standard input reaches rank 0 as a whole, and has an end there and on the other ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import launchers

SECONDS = 120
LAUNCH = """
import os, sys
from mpiddp.front.attempt import Launch
from mpiddp.launch.launcher.programs import OPEN_MPI

code = '''
import os, sys
from mpiddp.process.streams.standard_input import take
assert sys.stdin.read() == ""  # The launcher's.
sys.stderr.write(str(take(os.environ.pop("MPIDDP_STANDARD_INPUT", ""), RANK)))
sys.stdout.write(os.read(0, 100).decode() + os.read(0, 100).decode())
'''.replace("RANK", sys.argv[1])
launch = Launch(OPEN_MPI, starts_ranks=True)
for attempt in range(2):
    launch.run([sys.executable, "-c", code], os.environ, None, offers_input=True)
"""


def launch(stdin, rank: int = 0) -> tuple[str, str]:
    """What a rank gets in two attempts, and what it reports."""
    done = launchers.run_python("-c", LAUNCH, rank, stdin=stdin, check=True)
    return done.stdout, done.stderr


def test_what_each_kind_of_input_becomes(tmp_path):
    (tmp_path / "file").write_text("read text")
    with open(tmp_path / "file", "rb", buffering=0) as source:
        source.seek(5)  # Each attempt begins where the front was given it.
        assert launch(source) == ("texttext", "NoneNone")
        assert launch(source, rank=1) == ("", "NoneNone")
    assert launch(subprocess.DEVNULL) == ("", "NoneNone")
    # What is left in a pipe goes to the next attempt.
    source, end = os.pipe()
    os.write(end, b"x" * 300)
    os.close(end)
    assert launch(source) == ("x" * 300, "NoneNone")
    os.close(source)
    # The writer of a named pipe has gone.
    os.mkfifo(tmp_path / "pipe")
    source = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert launch(source) == ("", "NoneNone")
    os.close(source)
    # A socket is copied.
    own, its = socket.socketpair()
    with own, its:
        own.sendall(b"text")
        own.shutdown(socket.SHUT_WR)
        assert launch(its) == ("text", "NoneNone")


def test_a_closed_standard_input_is_empty():
    command = f"exec {sys.executable} -c '{LAUNCH.replace(chr(39), chr(34))}' 0 <&-"
    done = subprocess.run(
        ["sh", "-c", command], cwd=launchers.ROOT, capture_output=True, timeout=SECONDS, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"NoneNone")


@pytest.mark.parametrize(
    ("offered", "problem"),
    [
        ("/proc/{process}/fd/0 1 1 0", "it belongs to a different process here"),
        ("/proc/0/fd/0 1 1 0", "No such file or directory"),
    ],
)
def test_an_input_that_is_not_here_is_empty(offered, problem):
    code = "import sys; from mpiddp.process.streams.standard_input import take; "
    code += "print(take(sys.argv[1], 0), [sys.stdin.read()])"
    offered = offered.format(process=os.getpid())
    done = launchers.run_python("-c", code, offered, input="text", check=True)
    assert done.stdout == f"{offered.split()[0]} cannot be opened: {problem} ['']\n"
