"""The job whose ranks do calls: it is started by the front, and connects to this process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpiddp import environment
from mpiddp.errors import (
    FAILURE,
    ConfigurationError,
    LaunchError,
    MpiddpError,
    PeerLostError,
    UnreachableError,
)
from mpiddp.launch.network.interface_rule import find_rule
from mpiddp.process.background import LASTING_SECONDS
from mpiddp.process.sockets import ports
from mpiddp.process.sockets.links import describe_server, encode_token, listen_locally
from mpiddp.process.sockets.listener import TokenListener
from mpiddp.remote.channel import Address, Channel
from mpiddp.remote.rank_output import OutputReader, Sink, write
from mpiddp.remote.starter import End
from mpiddp.wording import name_ranks, print_message

ROLES = ("calls", "out", "err")
LOOK_SECONDS = 0.05
"""Period of the checks whether the starter has ended before its ranks were there."""
QUIET_SECONDS = 5.0
"""If the start takes longer, the launcher's messages are printed; if the end does, a message is."""
LOG_BYTES = 1000
"""How much of the launcher's messages an error quotes if no reason is known."""
REPORT_SECONDS = 5.0
"""How long a job may take to end once a rank has been lost."""
END_SECONDS = LASTING_SECONDS + 60.0
"""How long a job may take to end once it was told to; closing the session has its own timeouts."""
RAISED = {
    error.exit_code: error
    for error in (ConfigurationError, LaunchError, UnreachableError, PeerLostError)
}
"""The error for each exit code of the starter."""


@dataclass(frozen=True)
class JobRequest:
    """What is started."""

    words: tuple[str, ...]
    """The front's command line."""
    interface: str
    port_range: str
    may_leave: bool = False
    """Whether ranks may be on other nodes, in a Slurm job or not."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the ranks."""
    output: Sink | None = None
    """Called with what the ranks print; None to print it here, with labels."""


@dataclass(frozen=True)
class Member:
    """One rank, and its connections."""

    rank: int
    host: str
    process: int
    device: str
    threads: int
    backend: str
    directory: str
    """The job's (`mpiddp.process.job_directory`)."""
    calls: Channel = field(repr=False)
    outputs: tuple[OutputReader, ...] = field(repr=False)
    """Of its two streams."""


class RankJob:
    """A running job; ``close`` ends it."""

    def __init__(self, request: JobRequest) -> None:
        """Start the ranks, and wait until all are there. Raises MpiddpError if they are not."""
        self._output = request.output
        self.end: End | None = None
        """How it ended, once that is known."""
        self.members: tuple[Member, ...] = ()
        self._log = os.memfd_create("mpiddp-starter", os.MFD_CLOEXEC)
        self._shown = 0
        """Bytes of the log that were printed."""
        self.report, self._report_end = os.pipe()
        """The first can be read once the job has ended."""
        leave = weakref.WeakMethod(self._leave_to_parent)
        os.register_at_fork(after_in_child=lambda: (method := leave()) and method())
        try:
            with contextlib.ExitStack() as stack:
                servers = [listen_locally(), *_listen_on_network(request)]
                listener = _RankListener(servers, stack)
                self.starter = self._start(request, listener.address)
                self._close_descriptors("_report_end")
                self.members = self._await_ranks(listener)
        except BaseException:
            self.kill()
            raise

    def _start(self, request: JobRequest, address: Address) -> subprocess.Popen[bytes]:
        variables = {**os.environ, **request.variables, environment.CALLER: address.pack()}
        end = self._report_end
        return subprocess.Popen(
            [sys.executable, "-m", "mpiddp.remote.starter", str(end), *request.words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(end,),
            env=variables,
            # Ctrl-C is for this process, which tells the ranks.
            start_new_session=True,
        )

    def _await_ranks(self, listener: _RankListener) -> tuple[Member, ...]:
        patient_until = time.monotonic() + QUIET_SECONDS
        while not listener.is_complete:
            listener.wait(LOOK_SECONDS)
            if time.monotonic() > patient_until:
                self._print_log()
            if self.starter.poll() is not None:
                self._read_report()
                raise self.explain("the ranks did not start")
        self._print_log()
        return listener.make_members(self._output)

    @property
    def outputs(self) -> list[OutputReader]:
        """What the ranks print."""
        return [output for member in self.members for output in member.outputs]

    def explain(self, what: str) -> MpiddpError:
        """An error for how the job ended; ``what``: begins its message."""
        end = self.end or End(self.starter.returncode)
        kind = RAISED.get(end.code, LaunchError)
        reason = end.reason.removeprefix(f"{kind.__name__}: ")
        reason = reason or self._read_log()[-LOG_BYTES:] or f"exit code {end.code}"
        return kind(f"{what}: {reason}")

    # While it runs

    def _print_log(self) -> None:
        """Print what front and launcher have said since the last time, while the ranks start."""
        text = os.pread(self._log, os.fstat(self._log).st_size, self._shown)
        if text:
            self._shown += len(text)
            write("err", text.decode(errors="replace"))

    def _read_log(self) -> str:
        """In one line, without the lines that launchers draw."""
        if self._log < 0:
            return ""
        said = os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace")
        return " ".join(line.strip() for line in said.splitlines() if line.strip("- "))

    def await_end(self, seconds: float) -> End | None:
        """How the job ended, if it does so in time."""
        if self.end is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.starter.wait(seconds)
                self._read_report()
        return self.end

    def _read_report(self) -> None:
        with os.fdopen(os.dup(self.report)) as file:
            try:
                self.end = End(**json.load(file))
            except (ValueError, TypeError):
                # It was killed; else it has said why in the log.
                code = self.starter.returncode
                self.end = End(code, "the process that started them was killed" if code < 0 else "")

    # Its end

    def _leave_to_parent(self) -> None:
        """Close, in a forked child, what would keep ranks from noticing this process's end."""
        for member in self.members:
            member.calls.close()
        for output in self.outputs:
            output.connection.close()
        self._close_descriptors()

    def _close_descriptors(self, *names: str) -> None:
        """By default all of them."""
        for name in names or ("_log", "report", "_report_end"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)

    def close(self) -> End:
        """Let the ranks close their session, wait until they have ended, and return how.

        Ranks finish what they write. They are killed after END_SECONDS, or by Ctrl-C.
        """
        for member in self.members:
            with contextlib.suppress(OSError):
                member.calls.connection.shutdown(socket.SHUT_WR)
        began, is_told = time.monotonic(), False
        try:
            while self.await_end(0.02) is None and time.monotonic() < began + END_SECONDS:
                # What they print at their end must not hold them up.
                for output in self.outputs:
                    output.read()
                if not is_told and time.monotonic() > began + QUIET_SECONDS:
                    is_told = True
                    print_message("waiting for the ranks to end; Ctrl-C ends them now")
        finally:
            self.kill()
        return self.end or End(FAILURE)

    def kill(self) -> None:
        """End starter and ranks now."""
        for member in self.members:
            member.calls.close()
        if hasattr(self, "starter"):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if self.await_end(0) is None:
                    self.starter.send_signal(number)
                    self.await_end(REPORT_SECONDS)
        for output in self.outputs:
            with contextlib.suppress(Exception):  # A user's sink may raise anything.
                output.close()
        self._close_descriptors()


class _RankListener:
    """Accepts the connections of the ranks in any order."""

    def __init__(self, servers: Sequence[socket.socket], stack: contextlib.ExitStack) -> None:
        """``stack``: closes the listening sockets, and connections that nobody has taken over."""
        token, proof = secrets.token_hex(), secrets.token_hex()
        for server in servers:
            stack.enter_context(server)
        self.address = Address(tuple(map(describe_server, servers)), token, proof)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._listener = TokenListener(servers, self._selector, {encode_token(token): self._admit})
        stack.callback(self._listener.close)
        self._rows: dict[int, dict[str, Any]] = {}
        self._channels: dict[tuple[int, str], Channel] = {}
        self._own: set[Channel] = set()
        """Connections that nobody has taken over."""
        self._size: int | None = None
        stack.callback(self._close)

    @property
    def is_complete(self) -> bool:
        return self._size is not None and len(self._channels) == len(ROLES) * self._size

    def wait(self, seconds: float) -> None:
        for key, events in self._selector.select(seconds):
            key.data(events)
        self._listener.refresh(time.monotonic())

    def _admit(self, connection: socket.socket) -> None:
        """Prove that this process made the token. Next the rank says which one it is.

        That is read once its first byte has arrived: a rank may be stopped while others connect.
        """
        channel = Channel(connection)
        self._own.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda _: self._meet(channel))
        with contextlib.suppress(OSError):  # It has gone, as reading tells.
            connection.sendall(self.address.proof.encode())

    def _meet(self, channel: Channel) -> None:
        """Read which rank has connected, and what for."""
        self._selector.unregister(channel)
        try:
            row = channel.receive().content
            size, role, rank = row.pop("size"), row.pop("role"), row["rank"]
        except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError):
            channel.close()
            return
        self._size = size
        self._channels[rank, role] = channel
        self._rows[rank] = row

    def make_members(self, sink: Sink | None) -> tuple[Member, ...]:
        """All ranks, in their order. Raises LaunchError if they cannot be called."""
        own = ".".join(map(str, sys.version_info[:2]))
        members = []
        for rank, row in sorted(self._rows.items()):
            python = row.pop("python")
            if python != own:
                raise LaunchError(
                    f"rank {rank} on {row['host']} runs Python {python} and this process {own}: "
                    "functions are sent between equal versions only"
                )
            label = None if sink is not None or self._size == 1 else b"[%d] " % rank
            outputs = tuple(
                OutputReader(
                    self._channels[rank, role].connection,
                    label,
                    partial(write, role) if sink is None else partial(sink, rank, role),
                )
                for role in ROLES[1:]
            )
            members.append(Member(calls=self._channels[rank, "calls"], outputs=outputs, **row))
        self._own -= set(self._channels.values())
        return tuple(members)

    def _close(self) -> None:
        for channel in self._own:
            channel.close()


def _listen_on_network(request: JobRequest) -> Sequence[socket.socket]:
    """Sockets that ranks on other nodes reach: one on each interface that may be used."""
    if not request.may_leave and not environment.is_set(environment.OF_SCHEDULERS):
        return ()
    from mpiddp.launch.network.interfaces import list_candidates, list_interfaces

    own = list_interfaces()
    rule = find_rule(request.interface, socket.gethostname())
    try:
        candidates = list_candidates(own, rule, 2, socket.gethostname())
        allowed = ports.find_range(request.port_range)
        return [ports.listen(candidate.address, allowed) for candidate in candidates]
    except UnreachableError:
        return ()  # Ranks of this node connect locally.
    except OSError as error:
        raise LaunchError(f"cannot listen for the ranks: {error}") from None


def describe_ranks(members: Sequence[Member]) -> str:
    """``ranks 0-1 on node1, rank 2 on node2``."""
    by_host = group_by_host(members).items()
    return ", ".join(f"{name_ranks([m.rank for m in found])} on {host}" for host, found in by_host)


def group_by_host(members: Sequence[Member]) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for member in members:
        found.setdefault(member.host, []).append(member)
    return found
