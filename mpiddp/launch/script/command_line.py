"""The parts of a command line of ``python -m mpiddp``: the front's, the ranks', the program's.

Options stand before the program. Some are the front's, which starts the ranks (`front`); the others
go to each rank as they are (`script`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpiddp.errors import ConfigurationError

FRONT = {
    "-n": "N",
    "--launcher": "NAME",
    "--launcher-options": "TEXT",
    "--nodes": "N",
    "--ranks-per-node": "N",
    "--dry-run": "",
    "--restarts": "N",
    "--restart-window": "SECONDS",
    "--min-nodes": "N",
    "--requeue": "",
    "--job-log": "DIR",
    "--python": "PROGRAM",
    "--version": "",
}
"""The front's options, and their value; empty for those without one."""
HIDDEN = frozenset({"--python"})
"""Those of the job scripts: the program that runs each rank, instead of this Python."""
FRONT_HELP = """\
  -n N                     ranks; or auto (the default): one per GPU, else one per core; in a
                           Slurm job as many tasks as it has, else one per GPU, else one per node
  --launcher NAME          auto (the default), mpirun, mpiexec, srun, a program, or none for a
                           program that starts ranks itself; auto is srun in a Slurm job
  --launcher-options TEXT  more options for it, quoted as in a shell
  --nodes N                nodes of the Slurm job to use (default: all)
  --ranks-per-node N       on each node of the Slurm job
  --dry-run                print the command line instead of running it
  --restarts N             how often all ranks are started again after a failure (default: 0)
  --restart-window SECONDS count from 0 again after a longer attempt (default: never)
  --min-nodes N            do not restart on fewer nodes of the Slurm job (default: 1)
  --requeue                have Slurm requeue the batch job after exit code 75
  --job-log DIR            write all ranks' output to DIR/NAME-JOB.out and .err, and tell what is
                           started and how it ends
  --version                print the version of mpiddp
"""

RANKS = {
    "--timeout": True,
    "--interface": True,
    "--port-range": True,
    "--allow-shared-gpu": False,
    "--lifeline-timeout": True,
    "--stall-timeout": True,
    "--bind": True,
    "--log-dir": True,
    "--console": True,
    "--label": False,
    "-h": False,
    "--help": False,
}
"""The ranks' options (`arguments`), and whether they take a value."""

HELP = frozenset({"-h", "--help"})

COMMANDS = {
    "train": "mpiddp.train",
    "doctor": "mpiddp.doctor.__main__",
    "stacks": "mpiddp.stacks",
    "plot": "mpiddp.plot",
    "export": "mpiddp.export",
    "checkpoints": "mpiddp.checkpoints.__main__",
}
"""Words in place of a script, and the module whose ``main()`` each one is. A file of that name is
``./train``."""
WITHOUT_RANKS = frozenset({"stacks", "plot", "export", "checkpoints"})


@dataclass(frozen=True)
class CommandLine:
    """The parts of a command line."""

    front: tuple[tuple[str, str], ...]
    """Options and their values."""
    ranks: tuple[str, ...]
    module: str | None
    rest: tuple[str, ...]
    """The script, where there is no module, and the program's arguments."""
    is_marked: bool = False
    """Whether -- stands before the script."""

    @property
    def command(self) -> str | None:
        """The word in place of a script that is one of mpiddp's own commands."""
        if self.module is not None or self.is_marked or not self.rest:
            return None
        return self.rest[0] if self.rest[0] in COMMANDS else None

    @property
    def own_program(self) -> str | None:
        """The module of mpiddp that the ranks run in place of a script."""
        if self.command is None or self.command in WITHOUT_RANKS:
            return None
        return COMMANDS[self.command].removesuffix(".__main__")

    def find_rank_option(self, name: str) -> str | None:
        """The value of an option of the ranks; the last one where it is given twice."""
        found = [value for each, value in _pair(self.ranks) if each == name]
        return found[-1] if found else None

    def check_options(self) -> None:
        """Raise ConfigurationError for an option before the script that mpiddp does not have."""
        for name, _ in _pair(self.ranks):
            if name in RANKS:
                continue
            from mpiddp.launch.script.other_launchers import find_counterpart

            found = find_counterpart(name)
            if found is not None:
                raise ConfigurationError(
                    f"{name} is an option of {found[0]}; for mpiddp, {found[1]}"
                )
            shown = [each for each in (*FRONT, *RANKS) if each not in HIDDEN]
            raise ConfigurationError(
                f"{name} is no option of mpiddp{suggest(name, shown)}; options of the script come "
                "after the script; python -m mpiddp --help shows those of mpiddp"
            )

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


def split(words: Sequence[str]) -> CommandLine:
    """Cut before the script or after ``-m MODULE``, as Python itself does.

    Raises ConfigurationError for an option without its value; the ranks' options are not judged.
    """
    front: list[tuple[str, str]] = []
    ranks: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        word = words[at]
        if word.startswith("-m") and word[2:3] != "-":
            at += 1 if word[2:] else 2
            if at > len(words):
                raise ConfigurationError("-m expects the name of a module")
            return CommandLine(
                tuple(front), tuple(ranks), word[2:] or words[at - 1], tuple(words[at:])
            )
        name, value = _split_option(word)
        takes_value = bool(FRONT[name]) if name in FRONT else RANKS.get(name, False)
        at += 1
        if takes_value and value is None:
            if at == len(words):
                raise ConfigurationError(f"{name} expects a value; python -m mpiddp --help")
            value = words[at]
            at += 1
            ranks += [word, value] if name not in FRONT else []
        elif name not in FRONT:
            ranks.append(word)
        elif value is not None and not takes_value:
            raise ConfigurationError(f"{name} takes no value, found {value!r}")
        if name in FRONT:
            front.append((name, value or ""))
    is_marked = at < len(words) and words[at] == "--"
    rest = tuple(words[at + is_marked :])
    return CommandLine(tuple(front), tuple(ranks), None, rest, is_marked)


def _pair(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options of the ranks and their values."""
    left = iter(words)
    for word in left:
        name, value = _split_option(word)
        if value is None and RANKS.get(name):
            value = next(left)
        yield name, value


def suggest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean WORD?)`` where one of ``known`` is similar, else nothing."""
    from difflib import get_close_matches  # Only for a message.

    found = get_close_matches(word, list(known), 1, 0.7)
    return f" (did you mean {found[0]}?)" if found else ""


def _split_option(word: str) -> tuple[str, str | None]:
    """``--name=value``, ``-n4``, ``-nauto``; not mpirun's ``-np``."""
    if word.startswith("-n") and not word.startswith("-np") and word != "-n":
        return "-n", word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    return name, value if equals else None
