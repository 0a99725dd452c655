"""Whether each host of a list can take part: all are asked at once, before any rank is started.

A host is asked as the launcher will reach it: over SSH, by the user's own keys and settings. It
must not ask back, and answer within `ANSWER_SECONDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.hostnames import fold_hostnames, is_host
from mpiddp.launch.launcher.programs import find_program
from mpiddp.wording import count_noun

CONNECT_SECONDS, PEER_SECONDS, ANSWER_SECONDS = 10, 5, 25
TIMEOUT = ("timeout", "--signal=KILL", str(ANSWER_SECONDS))
"""Ends ssh and what it has started, even if this process has gone."""
SLOW = f"no answer within {ANSWER_SECONDS} s"
MOST_AT_ONCE = 32
SILENT = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
"""Options by which ssh asks nothing."""
SSH_FAILED, NOT_FOUND, NOT_RUNNABLE = 255, 127, 126
"""Exit codes of ssh itself, and of a shell."""
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Question:
    """What every host is asked."""

    starter: tuple[str, ...]
    """The words that start Python in a rank."""
    files: tuple[str, ...] = ()
    """What must be the same everywhere, such as the script."""


@dataclass(frozen=True)
class Answers:
    """What hosts have said."""

    found: Mapping[str, Mapping[str, Any]]
    """By name, the answers of `probe.answer`."""
    problems: Mapping[str, tuple[str, ...]]
    """Why a host cannot take part."""

    def check(self, count: int) -> None:
        """Raise ConfigurationError with a line for each problem, if there is one."""
        if not self.problems:
            return
        together: dict[str, list[str]] = {}
        for host, problems in self.problems.items():
            for problem in problems:
                together.setdefault(problem, []).append(host)
        lines = [f"  {fold_hostnames(hosts)}: {problem}" for problem, hosts in together.items()]
        title = f"{len(self.problems)} of {count_noun(count, 'host')} cannot take part:"
        raise ConfigurationError("\n".join([title, *lines]))


def ask_hosts(hosts: Sequence[str], question: Question) -> Answers:
    """Ask all of them, many at once; this machine is what they are compared with."""
    # A job of this machine alone, which asks nobody, starts without it.
    from concurrent.futures import ThreadPoolExecutor, as_completed

    own = _ask_here(question)
    found: dict[str, Mapping[str, Any]] = {}
    problems: dict[str, tuple[str, ...]] = {}
    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(hosts))) as pool, _open_progress() as tell:
        asked = {
            pool.submit(_ask, host, peers, question): host for host, peers in _choose_peers(hosts)
        }
        for count, future in enumerate(as_completed(asked), start=1):
            host, answer = asked[future], future.result()
            if isinstance(answer, str):
                problems[host] = (answer,)
            else:
                found[host] = answer
            tell(count, len(hosts))
    silent = {*problems}
    first: dict[str, str] = {}
    for host in filter(found.__contains__, hosts):
        wrong = tuple(_compare(found[host], own, silent))
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


def is_own(name: str) -> bool:
    """Whether a host is this machine: by its name, or since its addresses are this machine's."""
    if name == "localhost" or is_host(name, os.uname().nodename):
        return True
    # Only for a list with others: they take longer to import.
    from mpiddp.front.hosts import probe

    addresses = probe.find_addresses(name)
    return bool(addresses) and all(map(_is_bound_here, addresses))


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _is_bound_here(address: str) -> bool:
    import socket

    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as found:
            found.bind((address, 0))
    except OSError:
        return False
    return True


def _ask_here(question: Question) -> Mapping[str, Any]:
    """What this machine is like. Raises ConfigurationError."""
    answer = _ask("", [], question)
    if isinstance(answer, str):
        raise ConfigurationError(f"this machine cannot be compared with the hosts: {answer}")
    return answer


def _ask(host: str, peers: Sequence[str], question: Question) -> Mapping[str, Any] | str:
    """A host's answer, or why there is none; without ``host`` this machine's."""
    asked = {"files": question.files, "seconds": PEER_SECONDS, "peers": peers}
    words = [*question.starter, "-", json.dumps(asked)]
    if host and not is_own(host):
        names = [name for name in environment.LEADING_TO_PYTHON if name in os.environ]
        settings = [f"{name}={os.environ[name]}" for name in names]
        remote, folder = shlex.join(["env", *settings, *words]), shlex.quote(os.getcwd())
        words = [*find_agent(), host, f"cd {folder} || exit {NOT_FOUND}; exec {remote}"]
    if find_program(words[0]) is None:
        return f"there is no program {words[0]} here"
    source = Path(__file__).with_name("probe.py").read_text()
    try:
        done = subprocess.run(
            [*TIMEOUT, *words], input=source, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS + 1, check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return SLOW
    except OSError as error:
        return f"{TIMEOUT[0]} cannot be run: {error.strerror}"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        with contextlib.suppress(ValueError):
            found: Mapping[str, Any] = json.loads(lines[-1])
            return found
    if done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return SLOW
    return _explain(host, done.returncode, done.stderr, question)


def _explain(host: str, code: int, said: str, question: Question) -> str:
    last = (said.strip().splitlines() or [f"exit code {code}"])[-1].strip()[-SHOWN_CHARACTERS:]
    if code == SSH_FAILED:
        return f"ssh says {last!r}; this must work without a question: ssh {host} true"
    if code in (NOT_FOUND, NOT_RUNNABLE) or "No such file" in last:
        return f"it lacks {question.starter[0]} or {os.getcwd()}, which are here: {last}"
    return f"Python fails there: {last}"


def find_agent(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What reaches a host: what somebody has told the launcher to use, or ssh."""
    told = next(filter(None, map(variables.get, environment.REMOTE_SHELLS)), "ssh")
    words = tuple(shlex.split(told.split(":")[0])) or ("ssh",)
    return words + (SILENT if os.path.basename(words[0]) == "ssh" else ())


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
    from mpiddp.front.hosts.probe import find_addresses  # This machine alone needs none.

    for name, there in answer["addresses"].items():
        here = find_addresses(name) if there and name not in silent else []
        # A host often finds itself at 127.0.1.1.
        others = [not any(map(_is_loopback, found)) for found in (here, there)]
        if here and there and all(others) and not {*there} & {*here}:
            yield f"{name} is at {', '.join(there)} there, at {', '.join(here)} here"
