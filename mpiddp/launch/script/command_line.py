"""The parts of a command line of ``python -m mpiddp``: the front's, the ranks', the program's.

Options stand before the program. Some are the front's, which starts the ranks (`front`); the others
go to each rank as they are (`script`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpiddp.errors import ConfigurationError
from mpiddp.launch.options import Options
from mpiddp.launch.script.front_options import FrontOptions
from mpiddp.launch.script.other_words import explain, explain_command
from mpiddp.options.fields import list_fields, pick
from mpiddp.options.reader import HELP, Reader, name_as_typed

FRONT = {field.flag: field.needs_value for field in list_fields(FrontOptions)}
"""The front's options, and whether a value follows."""
OF_SCRIPTS = frozenset({"backend"})
"""Options of a launch that the script's own ``init_process_group`` decides on."""
RANKS = {
    **{each.flag: each.needs_value for each in list_fields(Options) if each.name not in OF_SCRIPTS},
    **dict.fromkeys(HELP, False),
}
"""The ranks' options, and whether a value follows."""
OWN_OPTIONS = frozenset(
    {
        "--collectives", "--tuning", "--port-range", "--lifeline-timeout", "--stall-timeout",
        "--allow-shared-gpu", "--launcher-options", "--restarts", "--restart-window", "--min-nodes",
        "--requeue", "--job-log", "--dry-run", "--site-defaults",
    }
)  # fmt: skip
"""Those that scripts seldom have, and torchrun's for -n."""
JOINED = "--launcher-options"
"""May be given several times."""

DOCTOR = "doctor"
COMMANDS = {
    "train": "mpiddp.train",
    DOCTOR: "mpiddp.doctor.__main__",
    "stacks": "mpiddp.stacks",
    "plot": "mpiddp.plot",
    "export": "mpiddp.export",
    "checkpoints": "mpiddp.checkpoints.__main__",
    "bench": "mpiddp.checkout.bench",
    "jobs": "mpiddp.checkout.scripts",
}
"""Words in place of a script, and the module whose ``main()`` each one is. A file of that name is
``./train``."""
LAUNCHING = frozenset({"mpiddp.remote.rank"})
"""Modules that start a launch themselves, as train does, and have no word."""
OWN_MODULES = {module.removesuffix(".__main__"): word for word, module in COMMANDS.items()}
"""What ``-m MODULE`` is for each of these modules: its word."""
WITHOUT_RANKS = frozenset(COMMANDS) - {"train", DOCTOR}
UNDERSCORED, UNDERSCORE = "--underscored", "_"
"""Before the words that the front hands to a rank, and at the beginning of each of them."""
MOST_WORDS = 900
"""Of a launcher's line. Intel MPI's mpiexec 2021.19 crashes if a program has 1,000."""

USAGE = """\
python -m mpiddp [OPTIONS] SCRIPT [ARGS…]
       python -m mpiddp [OPTIONS] -m MODULE [ARGS…]
       python -m mpiddp [OPTIONS] train [ITS OPTIONS…]
       python -m mpiddp doctor [OPTIONS] [ITS OPTIONS…]   what is wrong here
       python -m mpiddp stacks [--full] [JOB|LOG-DIR]     where a job hangs
       python -m mpiddp plot RUN… [--output FILE]         curves of runs
       python -m mpiddp checkpoints DIR                   which are whole
       python -m mpiddp export RUN [--output FILE]        plain weights
       python -m mpiddp bench COMMAND [ITS OPTIONS…]      the laboratory
       python -m mpiddp jobs DIR                          write job scripts"""
DESCRIPTION = """\
Run a script written for torchrun, unchanged, on several ranks that MPI starts:

  python -m mpiddp -n 4 script.py --its-own options
  python -m mpiddp -n auto -m package.module --its-own options
  srun --mpi=pmix python -m mpiddp script.py      (srun or mpirun starts the ranks)

Options of mpiddp stand before the script. What stands after it goes to the script, options of the
same names included. train and doctor have options of their own, which stand after the word; doctor
takes those of the first group there, too. Without an option of the first group, and outside of a
scheduler's job, there is one rank."""
READER = Reader(
    program="python -m mpiddp",
    description=DESCRIPTION,
    groups={"how ranks are started": FrontOptions, "the ranks": Options},
    usage=USAGE,
    without=OF_SCRIPTS,
    explain=explain,
)


@dataclass(frozen=True)
class CommandLine:
    """The parts of a command line."""

    front: tuple[tuple[str, str], ...]
    """Options and their values."""
    ranks: tuple[str, ...]
    module: str | None
    rest: tuple[str, ...]
    """The script, if there is no module, and the program's arguments."""
    is_marked: bool = False
    """Whether -- stands before the script."""

    @property
    def command(self) -> str | None:
        """The word in place of a script that is one of mpiddp's own commands."""
        if self.module is not None or self.is_marked or not self.rest:
            return None
        return self.rest[0] if self.rest[0] in COMMANDS else None

    @property
    def own_module(self) -> str | None:
        """The module of mpiddp whose ``main()`` this is, if it is no script."""
        return self.module if self.module in LAUNCHING else COMMANDS.get(self.command or "")

    @property
    def own_program(self) -> str | None:
        """The module of mpiddp that the ranks run in place of a script."""
        if self.command is None or self.command in WITHOUT_RANKS:
            return None
        return COMMANDS[self.command].removesuffix(".__main__")

    def find_rank_option(self, name: str) -> str | None:
        """The value of an option of the ranks, which stands after the word if that is a command;
        the last one if it is given twice."""
        words = self.ranks if self.own_program is None else self.rest[1:]
        return dict(_pair(words)).get(name)

    def check_options(self) -> None:
        """Raise ConfigurationError for an option that does not belong before what is run."""
        for name, _ in _pair(self.ranks):
            if name not in RANKS:
                READER.refuse(name, "; options of the script come after the script; python -m "
                              "mpiddp --help shows those of mpiddp")  # fmt: skip
        if slip := self._explain_slip():
            raise ConfigurationError(slip)
        if self.own_program is not None and self.ranks and HELP.isdisjoint(self.ranks):
            raise ConfigurationError(
                f"{self.ranks[0]} belongs after {self.rest[0]}, whose option it is"
            )

    def describe_no_script(self) -> str:
        """That there is nothing to run, and which option has taken a script for its value."""
        taken = [
            f": {value} was taken for the value of {name}"
            for name, value in (*self.front, *_pair(self.ranks))
            if value and value.endswith(".py")
        ]
        return f"no SCRIPT given{''.join(taken[:1])}; python -m mpiddp --help shows what to type"

    def _explain_slip(self) -> str | None:
        """What to type if the word in the script's place is the rest of an option's value."""
        script = self.rest[0] if self.rest and self.module is None else ""
        if self.ranks[-1:] == ("--site-defaults",) and script.endswith(".toml"):
            return f"{script} stands where the script does: type --site-defaults={script}"
        hosts = dict(self.front).get("--hosts")
        if hosts and re.fullmatch(r"[\w.\[\]-]+:[0-9]+", script):
            return f"{script} stands where the script does: type --hosts {hosts},{script}"
        return None

    def find_misplaced(self) -> str | None:
        """An option of the front's among the script's arguments, where only one of these is meant.

        A script may have options of the same name: -- before it says so.
        """
        words = () if self.is_marked or self.front else self.rest[1:]
        for word, following in zip(words, [*words[1:], ""], strict=False):
            is_count = word == "-n" and (following.isdigit() or following == "auto")
            if is_count or word.partition("=")[0] in ("--launcher", "--ranks-per-node"):
                return word
        return None


def underscore(words: Sequence[str]) -> list[str]:
    """The words for a rank, in a form of which no launcher takes one for its own.

    A launcher reads the program's words too: all of them take ``:`` for the end of a command, and
    Open MPI 5 writes ``--mapby`` for ``--map-by``. None has words that begin like this. If there
    are very many, several are one word, as JSON.
    """
    each = -(-len(words) // MOST_WORDS)
    if each > 1:
        parts = (words[at : at + each] for at in range(0, len(words), each))
        return [UNDERSCORED, *(json.dumps([*part], ensure_ascii=False) for part in parts)]
    return [UNDERSCORED, *(UNDERSCORE + word for word in words)]


def take_words(words: Sequence[str]) -> list[str]:
    """A rank's words, as they were before `underscore`; what a person has typed stays."""
    if words[:1] != [UNDERSCORED]:
        return list(words)
    if words[1:2] and words[1].startswith("["):
        return [word for part in words[1:] for word in json.loads(part)]
    return [word.removeprefix(UNDERSCORE) for word in words[1:]]


def split(words: Sequence[str]) -> CommandLine:
    """Cut before the script or after ``-m MODULE``, as Python itself does.

    Raises ConfigurationError for an option without its value; the ranks' options are not judged.
    """
    front: list[tuple[str, str]] = []
    ranks: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word = words[at]
        if word.startswith("-m") and word[2:3] != "-":
            at += 1 if word[2:] else 2
            if at > len(words):
                raise ConfigurationError("-m expects the name of a module")
            module, rest = word[2:] or words[at - 1], tuple(words[at:])
            command = OWN_MODULES.get(module)
            if command is not None:
                return _make_line(front, ranks, (command, *rest))
            return CommandLine(tuple(front), tuple(ranks), module, rest)
        name, value = _split_option(word)
        takes_value = FRONT.get(name, RANKS.get(name, False))
        at += 1
        if takes_value and value is None:
            if at == len(words):
                READER.refuse_missing(name)
            value = words[at]
            at += 1
            ranks += [word, value] if name not in FRONT else []
        elif name not in FRONT:
            ranks.append(word)
        elif value is not None and not takes_value:
            raise ConfigurationError(f"{name} takes no value, found {value!r}")
        if name in FRONT:
            _add(front, name, value)
    if words[at : at + 1] == ["--"]:
        rest = tuple(words[at + 1 :])
        return CommandLine(tuple(front), tuple(ranks), None, rest, is_marked=True)
    return _make_line(front, ranks, tuple(words[at:]))


def _add(front: list[tuple[str, str]], name: str, value: str | None) -> None:
    if name != JOINED and name in dict(front):
        raise ConfigurationError(f"{name} is given twice")
    front.append((name, value or ""))


def _make_line(
    front: Sequence[tuple[str, str]], ranks: Sequence[str], rest: tuple[str, ...]
) -> CommandLine:
    """With the front's options also from behind ``doctor``, which has none of these names."""
    found, kept = [*front], list(rest[:1])
    words = iter(rest[1:])
    for word in words:
        name, value = _split_option(word)
        if rest[0] != DOCTOR or name not in FRONT:
            kept.append(word)
            continue
        if FRONT[name] and value is None:
            value = next(words, None)
            if value is None:
                READER.refuse_missing(name)
        _add(found, name, value)
    return CommandLine(tuple(found), tuple(ranks), None, tuple(kept))


def _pair(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options of the ranks and their values."""
    left = iter(words)
    for word in left:
        name, value = _split_option(word)
        if value is None and RANKS.get(name):
            value = next(left, None)
        yield name, value


def describe_missing(script: str) -> str:
    """That there is no file of this name, and what to type if it is a word of others."""
    return f"there is no script {script!r} in {os.getcwd()}{explain_command(script, COMMANDS)}"


def read_front(line: CommandLine) -> FrontOptions:
    """The front's options. Raises ConfigurationError for a value that is out of range."""
    joined = " ".join(value for name, value in line.front if name == JOINED)
    words = [f"{name}={value}" if FRONT[name] else name for name, value in line.front]
    with name_as_typed(words):
        return pick(FrontOptions, {**READER.read(words), "launcher_options": joined})


def read_ranks(line: CommandLine, *, show_help: bool) -> Options:
    """The ranks' options. Raises ConfigurationError, and SystemExit(0) after ``--help``."""
    words = [name if value is None else f"{name}={value}" for name, value in _pair(line.ranks)]
    with name_as_typed(words):
        return pick(Options, READER.read(words, show_help=show_help))


def _split_option(word: str) -> tuple[str, str | None]:
    """``--name=value``, ``-n4``, ``-nauto``; not mpirun's ``-np``."""
    if word.startswith("-n") and not word.startswith("-np") and word != "-n":
        return "-n", word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    hyphened = name.replace("_", "-")
    known = hyphened in FRONT or hyphened in RANKS
    return hyphened if known else name, value if equals else None
