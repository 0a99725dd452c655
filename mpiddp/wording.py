"""Messages: counts, ranges of numbers, what an error says; and how one is printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

PLAIN = {
    "…": "...", "×": "x", "·": ".", "−": "-", "–": "-", "—": "-", "→": "->", "≈": "~", "±": "+-",
    "≤": "<=", "≥": ">=", "²": "^2", "√": "sqrt", "‖": "||", "\u00a0": " ", "₁": "1", "₂": "2",
    "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "█": "#", "▓": "*", "▒": "+", "░": ":",
    "─": "-", "│": "|", "├": "+", "└": "+", "Σ": "sum", "µ": "u", "α": "alpha", "β": "beta",
    "γ": "gamma", "ν": "nu", "ρ": "rho", "σ": "sigma",
}  # fmt: skip
"""What is printed instead of a character that the console's encoding lacks."""


def fold_numbers(numbers: Iterable[int], *, width: int = 1, most: int | None = None) -> str:
    """``0-3,8``: numbers that are not negative, sorted, each once.

    Args:
        width: digits that every number is filled up to with zeros.
        most: how many ranges are written out; an ellipsis stands for those that follow.
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [
        f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}"
        for low, high in ranges
    ]
    shown = texts if most is None else texts[:most]
    return ",".join(shown) + (",…" if len(shown) < len(texts) else "")


def count_noun(number: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def describe_size(size: int) -> str:
    """``512 B``, ``64 MiB``, ``23.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 2``, ``ranks 0-1``."""
    numbers = sorted(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {fold_numbers(numbers)}"


def fold(lines: Sequence[str]) -> str:
    """``the first line, and 2 more``; of no lines, nothing."""
    more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def describe_error(error: OSError) -> str:
    """The name of the file, if there is one, and what is wrong."""
    named = f"{error.filename}: " if error.filename else ""
    return f"{named}{error.strerror or error}"


def fit(text: str, stream: TextIO | None, errors: str = "") -> str:
    """``text`` with other characters for those that the stream's encoding lacks.

    ``errors`` (default: the stream's own) decides on what has no plain form, such as the bytes in
    a file's name that are no text.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    errors = errors or getattr(stream, "errors", None) or "strict"

    def replace(letter: str) -> str:
        for each, handling in ((letter, "strict"), (PLAIN.get(letter, letter), errors)):
            with contextlib.suppress(UnicodeError):
                each.encode(encoding, handling)
                return each
        return ascii(letter)[1:-1]

    try:
        text.encode(encoding)
    except UnicodeError:
        return "".join(map(replace, text))
    return text


def encode(text: str, stream: TextIO | None) -> bytes:
    """``text`` as bytes for the stream's descriptor; what was no text stays as it is."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return fit(text, stream, "surrogateescape").encode(encoding, "surrogateescape")


def print_text(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on standard output, or on ``stream``, whatever its encoding is."""
    stream = sys.stdout if stream is None else stream
    print(*(fit(line, stream) for line in lines), sep="\n", file=stream, flush=True)


def print_message(text: str) -> None:
    """Print a line of mpiddp's own on standard error."""
    print_text(f"mpiddp: {text}", stream=sys.stderr)


def read_message(error: BaseException) -> str:
    """What ``error`` says of itself; that it cannot be read, if its ``__str__`` fails."""
    try:
        return str(error)
    except BaseException as problem:  # A ``__str__`` may raise anything.
        return f"its message cannot be read ({type(problem).__name__} in __str__)"
