"""A notebook's cell as a function: `%%ranks` runs it on ranks, in their ``__main__`` module."""

from __future__ import annotations

import ast
import linecache
import pprint
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

from mpiddp.launch.session import find_session

WIDTH = 79
LONGEST_TEXT = 20_000
"""Characters that are shown of a value."""


@dataclass(frozen=True)
class Cell:
    """A compiled cell."""

    name: str
    """Of its file, in tracebacks."""
    lines: tuple[str, ...]
    ranks: frozenset[int]
    """The ranks that run it."""
    body: CodeType
    last: CodeType | None
    """The last expression, whose value is shown; None if there is none, or ``;`` follows it."""

    @classmethod
    def compile(cls, source: str, name: str, ranks: frozenset[int]) -> Cell:
        """Raises SyntaxError."""
        compile(source, name, "exec", dont_inherit=True)
        tree, last = ast.parse(source, name), None
        found = tree.body[-1] if tree.body else None
        if isinstance(found, ast.Expr) and not source.rstrip().endswith(";"):
            del tree.body[-1]
            last = compile(ast.Expression(found.value), name, "eval", dont_inherit=True)
        body = compile(tree, name, "exec", dont_inherit=True)
        return cls(name, tuple(source.splitlines(keepends=True)), ranks, body, last)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self) -> str | None:
        """Run it on this rank; the value of its last expression as text, None for none."""
        session = find_session()
        if session is None or session.world.rank not in self.ranks:
            return None
        linecache.cache[self.name] = (sum(map(len, self.lines)), None, [*self.lines], self.name)
        namespace = vars(sys.modules["__main__"])
        exec(self.body, namespace)
        value = eval(self.last, namespace) if self.last is not None else None
        return None if value is None else describe_value(value)


def describe_value(value: Any) -> str:
    """The ``repr``, over several lines if it is long."""
    is_plain = isinstance(value, str)
    text = repr(value) if is_plain else pprint.pformat(value, width=WIDTH, sort_dicts=False)
    rest = len(text) - LONGEST_TEXT
    return text if rest <= 0 else f"{text[:LONGEST_TEXT]}… ({rest} more characters)"
