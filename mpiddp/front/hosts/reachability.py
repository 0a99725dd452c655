"""Whether each host of a list can take part: all are asked at once, before any rank is started.

A host is asked as the launcher will reach it: over SSH, by the user's own keys and settings, or by
what there is in its place. It must not ask back, and answer within `ANSWER_SECONDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.front.hosts.agents import USUAL, Agent
from mpiddp.front.hosts.parallel_runs import Ended, run_each
from mpiddp.launch.launcher.hostnames import fold_hostnames, is_host
from mpiddp.launch.launcher.programs import find_program
from mpiddp.wording import count_noun

CONNECT_SECONDS, PEER_SECONDS, ANSWER_SECONDS = 10, 5, 60
TIMEOUT = ("timeout", "--signal=KILL", str(ANSWER_SECONDS))
"""Ends ssh and what it has started, even if this process has gone."""
SLOW = f"no answer within {ANSWER_SECONDS} s"
MOST_AT_ONCE = 256
"""Each waits most of the time, and has three files open here."""
SILENT = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
"""Options by which ssh asks nothing."""
SSH_FAILED, NOT_FOUND, NOT_RUNNABLE = 255, 127, 126
"""Exit codes of ssh itself, and of a shell."""
KILLED = 128 + signal.SIGKILL
SHOWN_CHARACTERS, SHOWN_LINES = 200, 30
ANY_HOST = "HOST"
"""In a line about several hosts, each one's name."""


@dataclass(frozen=True)
class Question:
    """What every host is asked."""

    starter: tuple[str, ...]
    """The words that start Python in a rank."""
    files: tuple[str, ...] = ()
    """What must be the same everywhere, such as the script."""
    agent: Agent = USUAL
    """What reaches them."""
    needs_room: bool = False
    """Whether the launcher needs room for temporary files."""
    is_examination: bool = False
    """Whether hosts that cannot take part are told, and left out of the first start."""


@dataclass(frozen=True)
class Answers:
    """What hosts have said."""

    found: Mapping[str, Mapping[str, Any]]
    """By name, the answers of `probe.answer`."""
    problems: Mapping[str, tuple[str, ...]]
    """Why a host cannot take part."""

    @property
    def _count(self) -> int:
        return len({*self.found, *self.problems})

    def check(self) -> None:
        """Raise ConfigurationError with a line for each problem, if there is one."""
        if self.problems:
            raise ConfigurationError(self.describe_problems())

    def encode(self) -> str:
        """For `doctor.node.launching.judge_hosts`."""
        problems = self.describe_problems() if self.problems else ""
        return json.dumps({"asked": self._count, "problems": problems})

    def describe_problems(self) -> str:
        """A title, and a line for each problem, with the hosts that have it."""
        together: dict[str, list[str]] = {}
        for host, problems in self.problems.items():
            for problem in problems:
                together.setdefault(_generalise(problem, host), []).append(host)
        lines = [
            f"  {fold_hostnames(hosts)}: {text if hosts[1:] else text.replace(ANY_HOST, hosts[0])}"
            for text, hosts in together.items()
        ]
        if more := lines[SHOWN_LINES:]:
            lines[SHOWN_LINES:] = [f"  and {len(more)} lines more"]
        title = f"{len(self.problems)} of {count_noun(self._count, 'host')} cannot take part:"
        return "\n".join([title, *lines])


def _generalise(problem: str, host: str) -> str:
    """A problem as it is told of several hosts."""
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", ANY_HOST, problem)


def ask_hosts(hosts: Sequence[str], question: Question) -> Answers:
    """Ask all of them, many at once; this machine is what they are compared with.

    Raises ConfigurationError if this machine does not answer, StoppedError after a signal.
    """
    own = _ask_here(hosts, question)
    here = {host for host in hosts if host in own["here"] or is_named_here(host)}
    found: dict[str, Mapping[str, Any]] = {name: {**own, "unreached": {}} for name in here}
    problems: dict[str, tuple[str, ...]] = {}
    commands = {
        host: _make_command(host, peers, question)
        for host, peers in _choose_peers(hosts)
        if host not in here
    }
    with _open_progress() as tell:
        for count, (host, end) in enumerate(_run(commands), start=1 + len(here)):
            answer = _read_answer(host, end, question)
            if isinstance(answer, str):
                problems[host] = (answer,)
            else:
                found[host] = answer
            tell(count, len(hosts))
    silent = {*problems}
    first: dict[str, str] = {}
    for host in filter(found.__contains__, hosts):
        wrong = tuple(_compare(found[host], own, silent))
        if question.needs_room and found[host]["obstacle"]:
            wrong = (f"no room for mpirun's files ({found[host]['obstacle']})", *wrong)
        if (other := first.setdefault(found[host]["machine"], host)) != host:
            # Open MPI's mpirun would start two daemons, and wait for ever.
            wrong = (*wrong, f"it is the same machine as {other}: name it once")
        if wrong:
            problems[host] = wrong
    return Answers(found, {host: problems[host] for host in hosts if host in problems})


def _choose_peers(hosts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """For each host the first and the next one, to which its ranks connect."""
    for at, host in enumerate(hosts):
        peers = {hosts[0], hosts[(at + 1) % len(hosts)]}
        yield host, sorted(peers - {host})


@contextlib.contextmanager
def _open_progress() -> Iterator[Callable[[int, int], None]]:
    """A line that is written again and again, if somebody looks at standard error."""

    def show(text: str) -> None:
        with contextlib.suppress(OSError):
            if os.isatty(2):
                os.write(2, text.encode())

    try:
        yield lambda count, total: show(f"\rmpiddp: {count} of {count_noun(total, 'host')} asked")
    finally:
        show("\r\x1b[K")


def is_named_here(name: str) -> bool:
    """Whether a host is this machine by its name."""
    return name == "localhost" or is_host(name, os.uname().nodename)


def is_own(name: str) -> bool:
    """Whether a host is this machine: by its name, or since its addresses are this machine's."""
    if is_named_here(name):
        return True
    # Only for a list with others: it takes longer to import.
    from mpiddp.front.hosts import probe

    return probe.is_own(probe.find_addresses(name))


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _ask_here(hosts: Sequence[str], question: Question) -> Mapping[str, Any]:
    """What this machine is like, and where it finds all hosts. Raises ConfigurationError."""
    words = _make_question((), question, names=hosts)
    _, end = next(_run({"": [*question.starter, *words]}))
    answer = _read_answer("", end, question)
    if isinstance(answer, str):
        raise ConfigurationError(f"this machine cannot be compared with the hosts: {answer}")
    return answer


def _run(commands: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Ended]]:
    limited = {host: [*TIMEOUT, *words] for host, words in commands.items()}
    return run_each(limited, Path(__file__).with_name("probe.py"), most=MOST_AT_ONCE)


def _make_question(
    peers: Sequence[str], question: Question, *, names: Sequence[str]
) -> tuple[str, str]:
    """Python's words for the probe: ``peers`` are to be reached, ``names`` are to be found."""
    asked = {
        "files": question.files,
        "seconds": PEER_SECONDS,
        "names": names,
        "peers": peers,
        "temporary": environment.TEMPORARY_DIRECTORIES,
    }
    return "-", json.dumps(asked)


def _make_command(host: str, peers: Sequence[str], question: Question) -> list[str]:
    """What asks a host. Raises ConfigurationError."""
    words = [*question.starter, *_make_question(peers, question, names=peers)]
    names = [name for name in environment.LEADING_TO_PYTHON if name in os.environ]
    settings = [f"{name}={os.environ[name]}" for name in names]
    remote, folder = shlex.join(["env", *settings, *words]), shlex.quote(os.getcwd())
    agent = question.agent
    if find_program(agent.words[0]) is None:
        raise ConfigurationError(f"there is no program {agent.words[0]} here: it reaches the hosts")
    silent = SILENT if agent.is_ssh else ()
    return [*agent.words, *silent, host, f"cd {folder} || exit {NOT_FOUND}; exec {remote}"]


def _read_answer(host: str, end: Ended, question: Question) -> Mapping[str, Any] | str:
    """A host's answer, or why there is none; without ``host`` this machine's."""
    lines = end.output.splitlines()
    if end.code == 0 and lines:
        with contextlib.suppress(ValueError):
            found: Mapping[str, Any] = json.loads(lines[-1])
            return found
    return SLOW if end.code == KILLED else _explain(host, end.code, end.errors, question)


def _explain(host: str, code: int, said: str, question: Question) -> str:
    last = (said.strip().splitlines() or [f"exit code {code}"])[-1].strip()[-SHOWN_CHARACTERS:]
    if code == SSH_FAILED or (host and code == 1 and not question.agent.is_ssh):
        words = " ".join(question.agent.words)
        return f"{words} says {last!r}; this must work without a question: {words} {host} true"
    if code in (NOT_FOUND, NOT_RUNNABLE) or "No such file" in last:
        return f"it lacks {question.starter[0]} or {os.getcwd()}, which are here: {last}"
    return f"Python fails there: {last}"


def _compare(
    answer: Mapping[str, Any], own: Mapping[str, Any], silent: Collection[str]
) -> Iterator[str]:
    """What differs from this machine, and which hosts it does not reach but for the silent ones."""
    if not answer.get("has IPv4", True):
        yield "it has no IPv4 address, and ranks of several hosts connect over IPv4 alone"
    for name, here in own["same"].items():
        there = answer["same"].get(name)
        if there == here:
            continue
        is_file = name == "mpiddp" or "/" in name
        if there is None:
            yield f"it lacks {name}"
        elif is_file:
            yield f"{name} differs from the one here"
        else:
            yield f"{name} is {there} there, {here or 'missing'} here"
    for name, reason in answer["unreached"].items():
        if reason and name not in silent:
            yield f"it does not reach {name} ({reason})"
    for name, there in answer["addresses"].items():
        here = [] if name in silent else own["addresses"].get(name, [])
        # A host often finds itself at 127.0.1.1.
        others = [not any(map(_is_loopback, found)) for found in (here, there)]
        if here and there and all(others) and not {*there} & {*here}:
            yield f"{name} is at {', '.join(there)} there, at {', '.join(here)} here"
