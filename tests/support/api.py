"""Writes docs/api.md from the public names, their signatures and docstrings.

python tests/support/api.py > docs/api.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import mpiddp
from mpiddp.options.fields import read_docstrings

HEAD = """# API

The public names of `mpiddp`. This file is made by `python tests/support/api.py > docs/api.md`.
"""


def describe() -> str:
    """The whole text."""
    names = sorted([*mpiddp.__all__, "models"])
    lines = (line for name in names for line in _describe(name, getattr(mpiddp, name)))
    return "\n".join([HEAD, *lines])


def _describe(name: str, found: Any) -> Iterator[str]:
    if inspect.ismodule(found):
        yield f"## module `{name}`\n"
        yield _format(found)
        for key in found.__all__:
            if key not in mpiddp.__all__:
                yield from _describe(f"{name}.{key}", getattr(found, key))
        return
    if not inspect.isclass(found):
        yield f"## `{name}{_sign(found)}`\n"
        yield _format(found)
        return
    name = found.__name__
    yield f"## class `{name}`\n"
    if issubclass(found, mpiddp.MpiddpError):
        yield f"Base class: `{found.__base__.__name__}`. The job's exit code: {found.exit_code}.\n"
    yield _format(found)
    if dataclasses.is_dataclass(found):
        texts = {} if "Attributes:" in found.__doc__ else read_docstrings(found)
        for each in dataclasses.fields(found):
            text = f": {texts[each.name]}" if each.name in texts else ""
            yield f"- `{each.name}: {each.type}`{text}"
        yield ""
    elif not issubclass(found, Exception):
        for key, value in inspect.getmembers(found, _is_member):
            if not key.startswith("_"):
                yield f"### `{name}.{key}{_sign_member(value)}`\n"
                yield _format(value)


def _is_member(found: object) -> bool:
    return inspect.isfunction(found) or isinstance(found, property)


def _sign_member(found: Any) -> str:
    if not isinstance(found, property):
        return _sign(found)
    return f": {inspect.get_annotations(found.fget)['return']}"


def _sign(function: Callable[..., Any]) -> str:
    # Annotations are strings, which are shown in quotes.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    return re.sub(r"\bself, |\bself\b", "", text)


def _format(found: object) -> str:
    """A docstring in Markdown, in which what is indented is an example or a list."""
    text = inspect.getdoc(found) or ""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    blocks = re.split(r"\n\n", text)
    return "\n\n".join(_format_block(block) for block in blocks) + "\n"


def _format_block(block: str) -> str:
    lines = block.splitlines()
    if all(line.startswith("    ") for line in lines):
        return "\n".join(["```", *(line[4:] for line in lines), "```"])
    if not re.match(r"(Args|Raises|Attributes)\b.*:$", lines[0]):
        return block
    items = "\n".join(line[4:] for line in lines[1:])
    items = re.sub(r"\n {4,}", " ", items)
    return f"{lines[0]}\n\n" + re.sub(r"(?m)^([\w.]+): ", r"- `\1`: ", items)


if __name__ == "__main__":
    print(describe(), end="")
