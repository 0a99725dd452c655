"""Reads command lines: groups of options, each a dataclass; mistakes are ConfigurationErrors."""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, takewhile
from typing import Any, NoReturn, TypeVar

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import did_you_mean, find_near, quote
from mpiddp.options.fields import Field, list_fields, pick, read_docstrings
from mpiddp.wording import fit

T = TypeVar("T")
HELP = frozenset({"-h", "--help"})


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A command line's options; of one that is given several times, the last counts."""

    program: str
    """As it is typed."""
    description: str
    groups: Mapping[str, type[Any]]
    """Dataclasses, by the title that help shows; of a field in several, the first one counts."""
    epilog: str = ""
    usage: str = ""
    """If empty, positional arguments, then options."""
    without: Collection[str] = ()
    """Fields that are no options of this command line."""
    has_negations: bool = False
    """Whether ``--no-NAME``, or None in place of a value that may be None, takes an option back."""
    has_group_help: bool = False
    """Whether ``--help TITLE`` shows one group alone."""
    explain: Callable[[str], str | None] = lambda option: None
    """What to say of an option that only other programs have."""

    def read(self, words: Sequence[str], *, show_help: bool = True) -> dict[str, Any]:
        """The options that were given, by their fields' names.

        After ``--help`` SystemExit(0) is raised, and the help printed if ``show_help``. Raises
        ConfigurationError.
        """
        typed = dict(zip(_use_hyphens(words), words, strict=True))
        words = list(_use_hyphens(words))
        wanted = self._find_group(words)
        if wanted is not None:
            words = ["--help"]
        groups = self._list()
        for field in chain.from_iterable(groups.values()):
            if field.argument.is_first:
                early = _Parser(self.program, add_help=False, allow_abbrev=False)
                self._add(early, field, "")
                early.parse_known_args(words)
        parser = self._make_parser(
            {title: fields for title, fields in groups.items() if wanted in (None, title)},
            is_whole=wanted is None,
            shows_help=not HELP.isdisjoint(words),
        )
        try:
            with redirect_stdout(sys.stdout if show_help else io.StringIO()):
                values, rest = parser.parse_known_args(_join_negative(words, groups))
        except _MissingValueError as error:
            self.refuse_missing(str(error))
        except ConfigurationError:
            # Its value may be what was taken for another argument.
            known = {*self._known(), *(field.flag for field in chain(*groups.values()))}
            for word in takewhile(lambda word: word != "--", words):
                if re.match(r"--?[A-Za-z]", word) and word.partition("=")[0] not in known:
                    self.refuse(typed[word])
            raise
        rest = [word for word in rest if word != "--"]
        if rest:
            word = next((word for word in rest if word.startswith("-")), rest[0])
            self.refuse(typed.get(word, word))
        return {
            name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
            for name, value in vars(values).items()
        }

    def refuse(self, word: str, advice: str = "") -> NoReturn:
        """Raise ConfigurationError for a word that has no place on the command line."""
        option = word.partition("=")[0]
        fields = list(chain.from_iterable(self._list().values()))
        if not word.startswith("-"):
            taken = next((each.flag for each in fields if _takes_file(each, word)), "")
            hint = f" (did you mean {taken} {word}?)" if taken else ""
            advice = advice or ("" if hint else self._advice)
            raise ConfigurationError(f"unexpected argument {quote(word)}{hint}{advice}")
        name = option.replace("_", "-")
        for field in fields:
            for other, value in field.argument.other_names:
                if name == other:
                    more = f"; {field.argument.more}" if value == field.metavar else ""
                    raise ConfigurationError(
                        f"unknown option {option}: type {field.flag} {value}{more}"
                    )
        explanation = self.explain(option)
        if explanation is not None:
            raise ConfigurationError(explanation)
        known = self._known()
        places = {f"--{field.name}": field for field in fields if field.argument.is_positional}
        near = find_near(name, [*known, *places])
        hint = f" (did you mean {near}?)" if near else ""
        if near in places:
            hint = f": {places[near].metavar} is typed without an option"
        advice = advice or ("" if hint else self._advice)
        raise ConfigurationError(f"unknown option {option}{hint}{advice}")

    def refuse_missing(self, flag: str) -> NoReturn:
        """Raise ConfigurationError for an option without its value, with what that can be."""
        kind, field = next(
            (self.groups[title], field)
            for title, fields in self._list().items()
            for field in fields
            if field.flag == flag
        )
        text = read_docstrings(kind).get(field.name, "").partition(". ")[0].removesuffix(".")
        values = re.sub(r"{(.*)}", r"one of \1", field.metavar).replace(",", ", ")
        raise ConfigurationError(f"{flag} expects a value, {values}{f': {text}' if text else ''}")

    @property
    def _advice(self) -> str:
        return f"; {self.program} --help shows the options"

    def _list(self) -> dict[str, list[Field]]:
        """The options by the title of their group."""
        taken = set(self.without)
        groups: dict[str, list[Field]] = {}
        for title, kind in self.groups.items():
            groups[title] = [field for field in list_fields(kind) if field.name not in taken]
            taken |= {field.name for field in groups[title]}
        return groups

    def _known(self) -> list[str]:
        fields = chain.from_iterable(self._list().values())
        return [*HELP, *(flag for field in fields for flag in self._flags(field))]

    def _flags(self, field: Field) -> Iterator[str]:
        if not field.argument.is_positional and not field.argument.is_hidden:
            yield field.flag
            if self.has_negations and not field.takes_value:
                yield "--no-" + field.flag.removeprefix("--")

    def _find_group(self, words: Sequence[str]) -> str | None:
        """The title after ``--help``. Raises ConfigurationError if it is none."""
        for option, word in pairwise(words if self.has_group_help else ()):
            if option in HELP and not word.startswith("-"):
                if word not in self.groups:
                    titles = list(self.groups)
                    raise ConfigurationError(
                        f"--help: expected one of the groups {', '.join(titles)}, found "
                        f"{quote(word)}{did_you_mean(word, titles)}"
                    )
                return word
        return None

    def _make_parser(
        self, groups: Mapping[str, list[Field]], *, is_whole: bool, shows_help: bool
    ) -> argparse.ArgumentParser:
        parser = _Parser(
            self.program,
            (self.usage or self._make_usage(groups)).replace("%", "%%"),
            self.description if is_whole else "",
            self.epilog if is_whole else "",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        for title, fields in groups.items():
            kind = self.groups[title]
            text = (kind.__doc__ or "").partition("\n")[0]
            about = None if text.lower().startswith(title) else text
            target = parser.add_argument_group(title, about) if len(self.groups) > 1 else parser
            texts = read_docstrings(kind) if shows_help else {}
            for field in fields:
                self._add(target, field, texts.get(field.name, ""))
        return parser

    def _make_usage(self, groups: Mapping[str, list[Field]]) -> str:
        fields = list(chain.from_iterable(groups.values()))
        places = [field for field in fields if field.argument.is_positional]
        words = [
            field.metavar + ("…" if field.is_several else "")
            if field.default is dataclasses.MISSING
            else f"[{field.metavar}{' …' if field.is_several else ''}]"
            for field in places
        ]
        options = ["[OPTION …]"] if len(places) < len(fields) else []
        return " ".join([self.program, *words, *options])

    def _add(self, target: Any, field: Field, text: str) -> None:
        argument = field.argument
        is_required = field.default is dataclasses.MISSING
        text = "; ".join(filter(None, [text.removesuffix("."), argument.more]))
        about = (text + _describe_default(field, text)).replace("%", "%%")
        settings: dict[str, Any] = {
            "help": argparse.SUPPRESS if argument.is_hidden else about,
            "default": argparse.SUPPRESS,
        }
        if not argument.is_positional:
            settings |= {"dest": field.name, "required": is_required}
        if not field.takes_value:
            negatable = argparse.BooleanOptionalAction if self.has_negations else "store_true"
            target.add_argument(field.flag, action=negatable, **settings)
            return
        settings |= {"type": partial(self._read, field), "metavar": field.metavar}
        if argument.is_repeated:
            settings["action"] = "append"
        elif field.is_several:
            settings["nargs"] = "*" if argument.is_positional and not is_required else "+"
        elif argument.bare is not None:
            settings |= {"nargs": "?", "const": field.read(argument.bare)}
        elif argument.is_positional and not is_required:
            settings["nargs"] = "?"
        target.add_argument(field.name if argument.is_positional else field.flag, **settings)

    def _read(self, field: Field, text: str) -> Any:
        if text is argparse.SUPPRESS:  # Of a positional argument that was not given.
            return text
        if self.has_negations and field.is_optional and text == "None":
            return None
        try:
            return field.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def read(kind: type[T], words: Sequence[str] | None, program: str, description: str) -> T:
    """The options of a command that one dataclass describes.

    ``words``: None for those of this process's command line. Raises ConfigurationError, and
    SystemExit(0) after ``--help``, which is printed.
    """
    words = sys.argv[1:] if words is None else words
    reader = Reader(program=program, description=description, groups={"options": kind})
    with name_as_typed(words):
        return pick(kind, reader.read(words))


@contextmanager
def name_as_typed(words: Iterable[str]) -> Iterator[None]:
    """Let a ConfigurationError name options as they stand in ``words``, and not as keys of TOML."""
    try:
        yield
    except ConfigurationError as error:
        message = str(error)
        for option in {word.partition("=")[0] for word in words if word.startswith("--")}:
            key = re.escape(option[2:].replace("-", "_"))
            message = re.sub(rf"^{key}(?=: )|(?<![-\w]){key}(?= = )", option, message)
        error.args = (message,)
        raise


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """A list of choices is long enough once."""
        text = super()._format_args(action, default_metavar)
        return re.sub(r"^({\S+}) \[\1 \.\.\.\]$", r"\1 ...", text)


class _MissingValueError(ConfigurationError):
    """Its message is the option."""


class _Parser(argparse.ArgumentParser):
    """Raises ConfigurationError instead of printing and exiting: the ranks agree on a mistake."""

    def _print_message(self, message: str, file: Any = None) -> None:
        file = file or sys.stdout
        super()._print_message(fit(message, file), file)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        if match := re.fullmatch(r"(-\S+): expected (one|at least one) argument", text):
            raise _MissingValueError(match[1])
        refused = r"(/--no-\S+)?: ignored explicit argument (.*)"
        text = re.sub(refused, r" takes no value, found \2", text)
        advice = "" if "found " in text else f"; {self.prog} --help shows the options"
        raise ConfigurationError(text + advice)


def _use_hyphens(words: Iterable[str]) -> Iterator[str]:
    """``--batch_size=a_b`` as ``--batch-size=a_b``."""
    is_over = False
    for word in words:
        is_over |= word == "--"
        name, equals, value = word.partition("=")
        is_option = word.startswith("--") and not is_over
        yield name.replace("_", "-") + equals + value if is_option else word


def _join_negative(words: Iterable[str], groups: Mapping[str, list[Field]]) -> list[str]:
    """``--rate -1e3`` as ``--rate=-1e3``: argparse would take the number for an option."""
    fields = chain.from_iterable(groups.values())
    known = {each.flag for each in fields if each.takes_value and not each.is_several}
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in known and re.match(r"-\.?\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _takes_file(field: Field, word: str) -> bool:
    """Whether ``word`` looks like a file of this option, ``--output FILE``."""
    with suppress(ValueError):
        return bool(field.argument.other_names and field.read(word))
    return False


def _describe_default(field: Field, text: str) -> str:
    """What help says after ``text``; nothing if that says it."""
    default = field.default
    is_nothing = any(default is each for each in (None, False, dataclasses.MISSING))
    if is_nothing or default in ("", ()) or "default" in text:
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    shown = f"{shown:g}" if isinstance(shown, float) else shown
    return f"{' ' if text else ''}(default: {shown})"
