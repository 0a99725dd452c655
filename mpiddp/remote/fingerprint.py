"""Whether two processes mean the same function by one name.

A rank keeps the modules that it has imported. If a file was edited, and reloaded in the calling
process only, the rank would run the old code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from mpiddp.errors import ConfigurationError
from mpiddp.remote.pickling import describe_function

REWRITTEN = "@py_assert"
"""Names in functions whose assertions pytest has rewritten, in its own process alone."""


def find_code(function: Callable[..., Any]) -> CodeType | None:
    """Of a Python function, without what wraps it."""
    while isinstance(function, functools.partial):
        function = function.func
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return code


def find_fingerprint(function: Callable[..., Any]) -> str:
    """A digest of what a Python function does by itself; empty for what has no code."""
    code = find_code(function)
    if code is None:
        return ""
    parts = list(_list_parts(code))
    if any(REWRITTEN in part for part in parts):
        return ""
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()


def _list_parts(code: CodeType) -> Iterable[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_parts(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def check_function(function: Callable[..., Any], expected: str) -> None:
    """Raise ConfigurationError if a function is not the one whose fingerprint was sent."""
    found = find_fingerprint(function)
    if expected and found and found != expected:
        module = getattr(function, "__module__", "its module")
        raise ConfigurationError(
            f"{describe_function(function)} is another function here than in the process that "
            f"calls it: {module} was edited and reloaded there; restart() reloads it on the "
            "ranks"
        )
