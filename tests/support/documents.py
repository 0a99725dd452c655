"""Reads Markdown: the fenced blocks that the tests of README run, its links and headings.

The convention, which CONTRIBUTING.md explains:

- a ``bash`` block is run, a ``python`` block is run as a script, in the order of the text and
  in one copy of the checkout; one that submits jobs has ended when they have;
- a ``text`` block right after a block that is run is what that block prints: each line must be
  found in the output, where a number stands for any number and ``…`` for anything;
- ``<!-- no-test: REASON -->`` before a block leaves it out, and is counted and printed.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import launchers

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(\S*)")
EXCUSE = re.compile(r"^\s*<!--\s*no-test:\s*(.*?)\s*-->\s*$")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
INLINE_CODE = re.compile(r"(`+).+?\1")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s*\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
ATTRIBUTE = re.compile(r"""\b(?:src|href)=["']([^"']+)["']""")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


README = launchers.ROOT / "README.md"


@dataclass(frozen=True)
class Block:
    """One fenced block: where it begins, its language, its text, why it is left out."""

    line: int
    language: str
    text: str
    excuse: str | None
    follows: bool
    """Whether nothing but blank lines is between this block and the one before."""


def find_blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    blocks: list[Block] = []
    excuse, follows = None, False
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if fence := FENCE.match(line):
            body = _read_body(lines, fence[1], number)
            blocks.append(Block(number, fence[2], body, excuse, follows))
            excuse, follows = None, True
        elif found := EXCUSE.match(line):
            excuse = found[1]
        elif line.strip():
            if excuse is not None:
                raise ValueError(f"line {number}: no-test stands before no block")
            follows = False
    return blocks


def _read_body(lines: Iterator[tuple[int, str]], fence: str, begin: int) -> str:
    body = []
    for _, line in lines:
        if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            return "".join(f"{item}\n" for item in body)
        body.append(line)
    raise ValueError(f"line {begin}: the block has no end")


def _outside_blocks(text: str) -> Iterator[str]:
    fence = ""
    for line in text.splitlines():
        found = FENCE.match(line)
        if fence:
            fence = "" if found and found[1].startswith(fence) and not found[2] else fence
        elif found:
            fence = found[1]
        else:
            yield line


def find_links(text: str) -> list[str]:
    """The targets of links and images, Markdown's and HTML's, outside code and comments."""
    lines = (INLINE_CODE.sub("", line) for line in _outside_blocks(text))
    bare = COMMENT.sub("", "\n".join(lines))
    found = LINK.findall(bare) + REFERENCE.findall(bare) + ATTRIBUTE.findall(bare)
    return [unquote(target) for target in found]


def find_anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    slugs: Counter[str] = Counter()
    anchors = set()
    for line in _outside_blocks(text):
        if found := HEADING.match(line):
            plain = re.sub(r"[`*]|\]\([^)]*\)|[\[\]]", "", found[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            anchors.add(f"{slug}-{slugs[slug]}" if slugs[slug] else slug)
            slugs[slug] += 1
    return anchors


def match_line(expected: str, printed: str) -> bool:
    """Whether ``printed`` contains ``expected``: numbers are alike, ``…`` stands for anything."""
    parts = []
    for piece in " ".join(expected.split()).split("…"):
        literals = (re.escape(literal) for literal in NUMBER.split(piece))
        parts.append(NUMBER.pattern.join(literals))
    pattern = ".*".join(parts)
    return re.search(pattern, " ".join(printed.split())) is not None


def missing_lines(excerpt: str, output: str) -> list[str]:
    """The lines of an excerpt that the output does not have, in the order of the excerpt."""
    printed = output.splitlines()
    wanted = [line for line in excerpt.splitlines() if line.strip(" …")]
    return [line for line in wanted if not any(match_line(line, other) for other in printed)]


def read_command(beginning: str) -> list[str]:
    """The words that follow ``beginning`` in the one block of README that is such a command."""
    blocks = find_blocks(README.read_text(encoding="utf-8"))
    (text,) = [block.text for block in blocks if block.text.startswith(beginning + " ")]
    return shlex.split(text.removeprefix(beginning).replace("\\\n", " "))
