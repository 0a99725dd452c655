"""Reads Markdown: the fenced blocks that tests run, and names of code.

The conventions, which CONTRIBUTING.md explains:

- a ``bash`` block is run, a ``python`` block is run as a script, in the order of the document and
  in one copy of the checkout per document; one that submits jobs has ended when they have;
- a ``text`` block right after a block that is run is what that block prints: each line must be
  found in the output, where a number stands for any number and ``…`` for anything;
- ``<!-- no-test: REASON -->`` before a block leaves it out, and is counted and printed;
- ```` `FOLDER/FILE.py: NAME` ```` names a function, class, method or constant of a file.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import launchers

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(\S*)")
EXCUSE = re.compile(r"^\s*<!--\s*no-test:\s*(.*?)\s*-->\s*$")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
CODE_NAME = re.compile(r"`([\w-]+(?:/[\w.-]+)*\.(?:py|sh|toml|sbatch))(?:: ([\w.]+))?`")

README = launchers.ROOT / "README.md"
CHAPTERS = sorted((launchers.ROOT / "docs").rglob("*.md"))
DOCUMENTS = [README, *CHAPTERS]
"""What is followed from top to bottom, each in a copy of its own."""


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


def find_text(text: str) -> Iterator[str]:
    """The lines outside blocks."""
    fence = ""
    for line in text.splitlines():
        found = FENCE.match(line)
        if fence:
            fence = "" if found and found[1].startswith(fence) and not found[2] else fence
        elif found:
            fence = found[1]
        else:
            yield line


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


def find_code_names(text: str) -> list[tuple[str, str]]:
    """The files that a text names, each with the name inside the file, or an empty string."""
    return [(found[1], found[2] or "") for found in CODE_NAME.finditer(text)]


def defines(path: Path, name: str) -> bool:
    """Whether a Python file defines ``name``: a function, class or constant, or CLASS.METHOD."""
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in scope if part in _defined_by(node)]
        if not found:
            return False
        scope = getattr(found[0], "body", [])
    return True


def _defined_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {each.id for each in targets if isinstance(each, ast.Name)}


def read_blocks(path: Path) -> list[Block]:
    return find_blocks(path.read_text(encoding="utf-8"))


def read_command(beginning: str, document: str = "") -> list[str]:
    """The words that follow ``beginning`` in the one block that begins so, and is run.

    ``document``: the end of a path, if blocks of others begin so, too.
    """
    paths = [path for path in DOCUMENTS if str(path).endswith(document)]
    blocks = [block for path in paths for block in read_blocks(path) if block.excuse is None]
    (text,) = [block.text for block in blocks if block.text.startswith(beginning + " ")]
    return shlex.split(text.removeprefix(beginning).replace("\\\n", " "))
