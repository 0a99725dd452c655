"""What is printed where the console's encoding lacks a character."""

from __future__ import annotations

import io
import sys

import pytest

import launchers
from mpiddp.process.streams.console import write_console
from mpiddp.wording import encode, fit, print_text


def make_stream(encoding: str, errors: str = "strict") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding, errors)


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("utf-8", "strict", "2–64 × 3 µs… 語 \\udcff"),
        ("utf-8", "surrogateescape", "2–64 × 3 µs… 語 \udcff"),
        ("latin-1", "strict", "2-64 × 3 µs... \\u8a9e \\udcff"),
        ("ascii", "strict", "2-64 x 3 us... \\u8a9e \\udcff"),
        ("ascii", "surrogateescape", "2-64 x 3 us... \\u8a9e \udcff"),
        # Python's own standard error.
        ("ascii", "backslashreplace", "2-64 x 3 us... 語 \udcff"),
    ],
)
def test_other_characters_stand_for_those_that_an_encoding_lacks(encoding, errors, shown):
    text = "2–64 × 3 µs… 語 \udcff"
    stream = make_stream(encoding, errors)
    assert fit(text, stream) == shown
    print_text(text, "-", stream=stream)
    stream.seek(0)
    assert stream.read() == shown.encode(encoding, errors).decode(encoding, errors) + "\n-\n"


def test_bytes_that_are_no_text_stay_past_a_stream_and_reports_fit_into_it(monkeypatch):
    assert encode("a…\udcff語", make_stream("ascii")) == b"a...\xff\\u8a9e"
    assert encode("a…\udcffé", make_stream("latin-1")) == b"a...\xff\xe9"
    assert encode("a…\udcff", None) == "a…".encode() + b"\xff"
    stream = make_stream("ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    write_console("rank 0 → rank 1\n")
    stream.seek(0)
    assert stream.read() == "rank 0 -> rank 1\n"


COMMANDS = {
    "--help": "[ARGS...]",
    "train --help": "HOST=NAME,...",
    "stacks --help": "[OPTION ...]",
    "bench prove ring --ranks 4": "1-4 ",
    "doctor": "0 failures",
}
"""With what they print; the last one ends its process."""
IN_TURN = """
import contextlib, sys
from mpiddp.__main__ import main
for words in sys.argv[1:]:
    sys.argv = ["mpiddp", *words.split()]
    with contextlib.suppress(SystemExit):
        main()
"""


def test_each_command_prints_on_a_console_that_knows_ascii_alone(tmp_path):
    env = {"PYTHONIOENCODING": "ascii"}
    done = launchers.run_python("-c", IN_TURN, *COMMANDS, env=env, cwd=tmp_path).expect(0)
    assert all(shown in done.stdout for shown in COMMANDS.values()), done
    assert done.stdout.isascii() and not done.stderr


def test_a_script_prints_into_streams_as_python_makes_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.stdout.errors, sys.stderr.errors)\nprint('…')\n")
    variables = {"PYTHONIOENCODING": "latin-1"}
    plain = launchers.run_python(script, env=variables)
    done = launchers.run_python("-m", "mpiddp", script, env=variables)
    assert (done.returncode, done.stdout) == (1, plain.stdout)
    assert "can't encode character '\\u2026'" in done.stderr
