"""What ranks print, cut in any way, comes out as it was, line by line."""

import contextlib
import io
import itertools
import re
import socket
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.remote.channel import MARK, make_mark
from mpiddp.remote.rank_output import OutputReader, write

LABEL = b"[3] "
PIECES = st.sampled_from(
    [b"a", b"line\n", b"\r", b"\r\n", "né".encode(), "né".encode()[1:], b"\xc3", b"\xff", b"\0",
     b"\0mpiddp call ", b"\0mpiddp call 12", b"12\0", b"\0mpiddp\0", b" 50%\r", b"\n\n", b"x" * 50]
)  # fmt: skip


def read_all(writes: list[bytes], label: bytes | None) -> tuple[str, int]:
    """What is printed of one rank's stream that comes in these parts, and its last call."""
    texts: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = OutputReader(ours, label, texts.append)
        for each in writes:
            theirs.sendall(each)
            reader.read()
        theirs.close()
        reader.read()
        assert reader.is_ended
        reader.close()
        return "".join(texts), reader.call


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=12), st.lists(PIECES, max_size=6), st.lists(st.integers(0, 999)))
def test_a_sink_gets_what_was_printed_however_it_is_cut(before, after, places):
    data = [b"".join(part) for part in (before, after)]
    if any(MARK.search(part) for part in (*data, data[0] + b"\0", b"\0" + data[1])):
        return  # A rank that prints marks spoils its own output alone.
    text, call = read_all(cut(data[0] + make_mark(7) + data[1], places), None)
    assert text == "".join(part.decode(errors="replace") for part in data)
    assert call == 7


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 999)))
def test_every_line_has_its_label_however_it_is_cut(pieces, places):
    data = b"".join(pieces)
    if MARK.search(data + b"\0"):
        return
    text, call = read_all(cut(data + make_mark(1), places), LABEL)
    assert call == 1
    for line in re.split(r"\r\n|\n|\r", text):
        assert line == "" or line.startswith("[3] ")
    found = re.sub(r"(^|(?<=[\n\r]))\[3\] ", "", text)
    expected = data.decode(errors="replace")
    assert found.rstrip("\n") == expected.rstrip("\n")


def test_what_looks_like_the_beginning_of_a_mark_is_not_lost():
    assert read_all([b"\0mpiddp call 5"], None) == ("\0mpiddp call 5", 0)
    assert read_all([b"a\0"], LABEL) == ("[3] a\0\n", 0)
    # Marks of several calls in one read.
    found = read_all([b"one\n" + make_mark(1) + b"two" + make_mark(2) + b"three"], LABEL)
    assert found == ("[3] one\n[3] two\n[3] three\n", 2)


def test_a_console_that_has_gone_stops_nothing(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        write("err", "lost")
    # One that is there shows it at once.
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    write("out", "shown")
    assert raw.getvalue() == b"shown"


def test_who_prints_without_end_does_not_hold_up_the_end():
    texts: list[str] = []
    ours, theirs = socket.socketpair()

    def print_more(text: str) -> None:
        """As a process that a rank has left behind."""
        texts.append(text)
        assert len(texts) < 10
        with contextlib.suppress(BrokenPipeError):
            theirs.sendall(b"more\n")

    reader = OutputReader(ours, None, print_more)
    with theirs:
        theirs.sendall(b"hello\n")
        reader.close()
    assert texts == ["hello\n"]
