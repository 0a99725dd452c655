"""What the fields of a dataclass say about options."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mpiddp.options.checks import describe_choice, quote

T = TypeVar("T")
NUMBERS: Mapping[Any, str] = {int: "an integer", float: "a number"}
METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Argument:
    """A mark in a field's type: what the type does not say about the command line.

    batch_size: Annotated[int, Argument("N", at_least(1))] = 16
    """

    metavar: str = ""
    """How help shows the value; empty for the type's usual one."""
    read: Callable[[str], Any] | None = None
    """Makes the value of a text. Raises ValueError that says what was expected and found."""
    choices: tuple[str, ...] = ()
    """If there is no ``Literal`` that says them."""
    flag: str = ""
    """In place of ``--name``."""
    bare: str | None = None
    """What the option means if no value follows; None if one must follow."""
    is_positional: bool = False
    is_hidden: bool = False
    """Left out of help."""
    is_first: bool = False
    """Read before all others, whose values may depend on it."""
    is_repeated: bool = False
    """Whether a tuple's option is given once for each value, and not once before all of them."""
    more: str = ""
    """What help says behind the text below the field."""
    other_names: tuple[tuple[str, str], ...] = ()
    """Options by which others call it, each with the value to type: ``("-o", "FILE")``."""


@dataclass(frozen=True)
class Field:
    """One option."""

    name: str
    kind: Any
    """bool, int, float, str, Path or, if the mark reads it, anything; of a tuple its elements'."""
    default: Any
    """``dataclasses.MISSING`` if the option must be given."""
    argument: Argument
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    """Whether it may be None."""
    is_several: bool = False
    """Whether it is a tuple."""

    @property
    def flag(self) -> str:
        return self.argument.flag or "--" + self.name.replace("_", "-")

    @property
    def takes_value(self) -> bool:
        return self.kind is not bool

    @property
    def needs_value(self) -> bool:
        """Whether the next word is its value; without, a value may stand behind ``=``."""
        return self.takes_value and self.argument.bare is None

    @property
    def metavar(self) -> str:
        listed = "{" + ",".join(self.choices) + "}" if self.choices else ""
        return self.argument.metavar or listed or METAVARS.get(self.kind, "VALUE")

    def read(self, text: str) -> Any:
        """The value of a text. Raises ValueError that says what was expected and found."""
        if self.argument.read is not None:
            return self.argument.read(text)
        if not text and (self.kind is Path or self.argument.bare is not None):
            # Of a shell's variable that is not set; the path would be the working directory.
            raise ValueError(f"expected {self.metavar}, found {quote(text)}")
        if self.choices and text not in self.choices:
            raise ValueError(describe_choice(text, self.choices))
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"expected {NUMBERS[self.kind]}, found {quote(text)}") from None


def one_of(names: Sequence[str]) -> Argument:
    """The mark of a text that the dataclass checks itself: help lists ``names``."""
    return Argument("{" + ",".join(names) + "}")


def list_fields(kind: type[Any]) -> list[Field]:
    """The options of a dataclass, those of its bases first."""
    hints = get_type_hints(kind, include_extras=True)
    return [_describe(each.name, hints[each.name], each.default) for each in _fields(kind)]


def pick(kind: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass of those ``values`` whose names are its fields'."""
    names = {each.name for each in _fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def read_docstrings(kind: type[Any]) -> dict[str, str]:
    """The text below each field of a dataclass, from its source, on one line.

    Without the source there is none.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:
            continue
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
                plain = re.sub(r"\s+", " ", str(text.value.value).replace("``", ""))
                found[field.target.id] = plain
    return found


def _fields(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _describe(name: str, hint: Any, default: Any) -> Field:
    argument, choices = Argument(), tuple[str, ...]()
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
        argument = next((mark for mark in marks if isinstance(mark, Argument)), argument)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_optional = NoneType in parts
    (hint,) = (part for part in parts if part is not NoneType)
    is_several = get_origin(hint) is tuple
    if is_several:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        choices, hint = get_args(hint), str
    choices = choices or argument.choices
    return Field(name, hint, default, argument, choices, is_optional, is_several)
