"""The lifeline: whatever becomes of a rank, the others hear of it, and the right one is named.

Most tests have ranks that are nothing but lifelines, without MPI and torch, on made-up nodes.
"""

import contextlib
import json
import os
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

import launchers
from copies import write_program
from mpiddp.errors import OWN, PEER, REPEATED
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.lifeline import lifeline, requests
from mpiddp.lifeline.companion_links import CompanionLinks, Handlers
from mpiddp.lifeline.decision import (
    ABANDONED_SECONDS,
    ASKED,
    NEVER,
    SUSPICION_SECONDS,
    Decider,
    Failure,
    Leave,
    Loss,
    describe_status,
)
from mpiddp.lifeline.decision import LEFT as LEAVING
from mpiddp.lifeline.membership import Entrance, Membership
from mpiddp.lifeline.requests import ask
from mpiddp.process import job_directory
from mpiddp.process.publication import publish
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import Link

TOKEN, CLIENTS = "0" * 32, "1" * 32
HUNG = 20.0
"""Seconds after which something is taken to hang, however busy the machine is."""
LOCAL = "127.0.0.1"


class Rank:
    """One process of `lifeline_rank.py`."""

    def __init__(self, number: int, folder: Path, limits: str = "pass", group: int = 0) -> None:
        """``group``: of processes; 0 for a new one."""
        self.number = number
        self._errors = folder / f"stderr-{number}"
        job = {"MPIDDP_JOB_DIRECTORY": str(folder), "MPIDDP_ATTEMPT_TOKEN": "first"}
        environment = {**launchers.clean_environment(), **job}
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(launchers.PROGRAMS / "lifeline_rank.py"), limits],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
                cwd=launchers.ROOT, process_group=group,
            )  # fmt: skip

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = HUNG) -> list:
        """The next line that it says."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], seconds)[0], "it says nothing"
        return json.loads(self.process.stdout.readline())

    def ask(self, *words: object) -> list:
        self.tell(*words)
        return self.hear()

    def settle(self) -> None:
        """Return once it has done what it was told, and its companion knows."""
        assert self.ask("settle") == ["settled"]

    def errors(self) -> str:
        """But for the line that names the file with the whole report."""
        return re.sub(r"(?m)^  the whole report: .*\n", "", self._errors.read_text())


class Crew:
    """Ranks whose lifelines are connected."""

    def __init__(self, nodes: list[int], folder: Path, limits: str) -> None:
        """``nodes``: the node of each rank. ``limits``: Python that changes those of companions."""
        self.nodes = nodes
        first = Rank(0, folder, limits)
        group = first.process.pid
        others = (Rank(number, folder, limits, group) for number in range(1, len(nodes)))
        self.ranks = [first, *others]
        self.companions: dict[int, int] = {}
        """The process of each node's."""

    def connect(self, seconds: float) -> None:
        nodes = self.nodes
        first = {node: nodes.index(node) for node in nodes}
        entrances = {node: self.ranks[rank].ask("start", rank) for node, rank in first.items()}
        for rank, node in zip(self.ranks, nodes, strict=True):
            if first[node] != rank.number:
                assert rank.ask("enter", rank.number, *entrances[node]) == ["entered"]
        (root,) = self.ranks[0].ask("listen", LOCAL, TOKEN, CLIENTS)
        for number, node in enumerate(nodes):
            membership = Membership(
                number, len(nodes), f"node{node}", "node0", sorted(first).index(node), seconds,
                TOKEN, address=root if number else "",
                hostnames=tuple(f"node{each}" for each in nodes) if number == 0 else (),
            )  # fmt: skip
            leads = first[node] == number
            self.ranks[number].tell("join", asdict(membership) if leads else None)
        for rank in self.ranks:
            assert rank.hear() == ["joined"], rank.errors()
        for node, (address, _) in entrances.items():
            self.companions[node] = find_listening(address)

    def __getitem__(self, number: int) -> Rank:
        return self.ranks[number]

    def expect_end(self, code: int, *numbers: int) -> None:
        """These ranks leave with ``code``; that takes a quarter of a second on an idle machine."""
        for number in numbers:
            assert self.ranks[number].process.wait(HUNG) == code, self.errors()

    def errors(self) -> str:
        """What all have written to standard error, the companions too, once these have ended."""
        wait_until(lambda: not self.find_companions(), HUNG)
        return "".join(rank.errors() for rank in self.ranks)

    def find_companions(self) -> list[int]:
        return [each for each in self.companions.values() if launchers.is_alive(each)]

    def stop_companion(self, node: int) -> None:
        os.kill(self.companions[node], signal.SIGSTOP)


def count_seconds(process: int) -> float:
    """Of processor time, of all its threads; clocks are numbered as by clock_getcpuclockid(3)."""
    return time.clock_gettime(~process << 3 | 2)


def find_listening(address: str) -> int:
    """The process that listens at a local address, by the socket: it is nobody's child."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    # The fourth column has its flags.
    (inode,) = (row[6] for row in rows if row[3] == "00010000" and row[-1] == address)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It ends, or one of its files is closed.
            if f"socket:[{inode}]" in map(os.readlink, (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError("no companion")


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.setattr(requests, "ANSWER_SECONDS", HUNG)
    crews: list[Crew] = []
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)

    def make(nodes: list[int], seconds: float = 30.0, limits: str = "pass") -> Crew:
        crews.append(Crew(nodes, folder, limits))
        crews[-1].connect(seconds)
        return crews[-1]

    yield make
    for each in crews:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each[0].process.pid, signal.SIGKILL)
        for rank in each.ranks:
            rank.process.communicate()
        for companion in each.find_companions():
            os.kill(companion, signal.SIGCONT)
        launchers.until(lambda crew=each: not crew.find_companions(), "the end of companions", HUNG)


KILLED = r"it was killed by SIGKILL \(by the kernel if memory ran out: see dmesg\)"
LEFT = "it left with exit code {} without closing its session"

ONE_EVENT = f"decision.MILD_SECONDS = {HUNG}"
"""However late they are heard, ends belong together."""


def test_a_rank_that_is_killed_before_the_companions_meet_is_named(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    ranks = [Rank(number, folder) for number in range(2)]
    entrance = ranks[0].ask("start", 0)
    assert ranks[1].ask("enter", 1, *entrance) == ["entered"]
    ranks[1].process.kill()
    ranks[1].process.wait(HUNG)
    ranks[0].settle()
    ranks[0].ask("listen", LOCAL, TOKEN, CLIENTS)
    membership = Membership(0, 2, "node0", "node0", 0, 30.0, TOKEN, hostnames=("node0", "node0"))
    ranks[0].tell("join", asdict(membership))
    assert ranks[0].process.wait(HUNG) == 6
    said = rf"mpiddp: rank 1 of 2 on node0 was lost during start-up: {KILLED}\n"
    assert re.fullmatch(said, ranks[0].errors())
    for rank in ranks:
        rank.process.communicate()


def test_a_rank_that_just_leaves_while_others_have_closed_their_sessions_is_named(crew):
    job = crew([0, 0, 0])
    assert job[1].ask("close") == ["closed"]
    job[2].tell("exit", 3)
    job.expect_end(6, 0)
    said = f"mpiddp: rank 2 of 3 on node0 left early: {LEFT.format(3)}\n"
    assert job.errors() == said


def test_what_has_been_unregistered_meanwhile_is_not_called():
    """A rank and its launcher may end at once, and the first to be heard ends the watch of both."""
    loop, called, ends = EventLoop(), [], socket.socketpair()

    def end_watch(_: int) -> None:
        called.append(1)
        for end in ends:
            loop.selector.unregister(end)

    for end in ends:
        loop.selector.register(end, selectors.EVENT_READ, end_watch)
        end.send(b"x")
    loop.wait(time.monotonic() + 1, lambda _: None)
    assert called == [1]
    for end in ends:
        end.close()


def test_what_rank_0_s_companion_moves_while_others_join_is_a_line_for_each():
    loop, joined, nodes = EventLoop(), [], 64
    handlers = Handlers(lambda kind, _: joined.append(kind), *[lambda *_: None] * 3)
    root = CompanionLinks(loop, handlers)
    place = root.listen(LOCAL, None, TOKEN, {})
    for rank in range(1, nodes):
        member = Membership(rank, nodes, f"node{rank}", "node0", rank, HUNG, TOKEN, place)
        CompanionLinks(loop, handlers).connect(member)
    wait_until(lambda: loop.wait(time.monotonic() + 1, lambda _: None) or len(joined) == nodes - 1)
    assert set(joined) == {"welcome"}
    found = (
        link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        for link in root._children
    )
    # Bytes acknowledged and received, see tcp_info in linux/tcp.h.
    moved = sum(sum(struct.unpack_from("QQ", each, 120)) for each in found)
    for link in list(loop._links):
        loop.remove(link)
    for listener in root._listeners:
        listener.close()
        listener._servers[0].close()
    assert 50 * nodes < moved < 300 * nodes


@pytest.mark.parametrize("how", ["leave", "are asked to end"])
def test_ranks_that_all_end_are_not_lost(how, crew):
    job = crew([0, 0, 1], limits=ONE_EVENT)
    for rank in job.ranks:
        rank.tell("exit", 0) if how == "leave" else rank.process.terminate()
    job.expect_end(0 if how == "leave" else -signal.SIGTERM, 0, 1, 2)
    assert job.errors() == ""


def test_the_rank_that_a_launcher_ended_the_others_for_is_named(crew, tmp_path):
    job = crew([0, 1, 0], limits=f"{ONE_EVENT}; requests.ANSWER_SECONDS = 0.5")
    # Stopped, it tells its news late.
    job.stop_companion(1)
    job[1].tell("kill", signal.SIGSEGV)
    job[1].process.wait(HUNG)
    for number in (0, 2):
        job[number].process.terminate()
    # Their companion has heard of their end once it does not answer for them.
    launchers.until(lambda: not ask(tmp_path / "job", "position")[1], "the end of two")
    os.kill(job.companions[1], signal.SIGCONT)
    said = "mpiddp: rank 1 of 3 on node1 was lost: it was killed by SIGSEGV\n"
    # Where ranks were follows if their companions tell that in time.
    assert re.fullmatch(rf"{said}(  rank ([02] on node0|1 on node1)  main, .*\n)*", job.errors())


def test_a_rank_that_stays_stopped_is_lost_and_one_that_holds_the_lock_ends_all_the_same(crew):
    job = crew([0, 0, 1], seconds=4.0)
    assert job[1].ask("lock") == ["locking"]
    job[0].tell("progress.note_step", 5)
    began = time.monotonic()
    job[0].tell("kill", signal.SIGSTOP)
    job.expect_end(6, 2)
    assert time.monotonic() - began > 4
    job.expect_end(-signal.SIGKILL, 0, 1)
    how = r"was lost at step 5: it has been stopped \(SIGSTOP\) for 4 s"
    table = (r"rank 0 on node0  no answer: stopped \(SIGSTOP\)",
             r"ranks? 1.*  no answer: it has written no stack\n")  # fmt: skip
    said = "\n  ".join((f"mpiddp: rank 0 of 3 on node0 {how}", *table))
    assert re.match(said, errors := job.errors()), errors


@pytest.mark.parametrize(("nodes", "companions"), [([0, 0, 1], False), ([0, 0, 1, 1], True)])
def test_time_in_which_all_stood_still_does_not_count(nodes, companions, crew, tmp_path):
    """A job that is suspended, with its companions or without."""
    job, began = crew(nodes, seconds=4.0), time.monotonic()
    for rank in job.ranks:
        rank.tell("progress.note_move")
        rank.settle()

    def signal_all(number: int) -> None:
        # All ranks in one moment: one that is stopped alone is lost.
        os.killpg(job[0].process.pid, number)
        for process in job.companions.values() if companions else ():
            os.kill(process, number)

    signal_all(signal.SIGSTOP)
    time.sleep(6.0)
    signal_all(signal.SIGCONT)
    for rank in job.ranks:
        rank.settle()
    # Nor as time in which no rank has moved.
    _, answers = ask(tmp_path / "job", "idle")
    longest = time.monotonic() - began - 4
    assert len(answers) == len(nodes) and all(idle < longest for idle, _ in answers.values())
    for rank in job.ranks:
        assert rank.ask("close") == ["closed"]
    assert job.errors() == ""


def test_a_program_that_is_stopped_behind_its_session_is_not_lost(crew):
    job = crew([0, 0], seconds=1.0)
    assert job[1].ask("close") == ["closed"]
    os.kill(job[1].process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    job[0].settle()
    assert job[0].ask("close") == ["closed"] and job.errors() == ""


@pytest.mark.parametrize(("silent", "other"), [(1, 0), (0, 1)])
def test_a_node_that_is_silent_is_lost(silent, other, crew):
    job = crew([0, 1], seconds=4.0)
    job.stop_companion(silent)
    job.expect_end(6, other)
    said = "nothing has been heard from it for 4 s: its node is down or cut off"
    assert f"rank {silent} of 2 on node{silent} was lost: {said}\n" in job[other].errors()


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_companion_that_is_killed_is_noticed_by_one_unless_sessions_are_closing(is_closing, crew):
    job = crew([0, 1, 2], limits=f"companion.TURN_SECONDS = {HUNG}")
    if is_closing:
        job[1].tell("note_closing", "node1")
        job[1].settle()
    os.kill(job.companions[0], signal.SIGKILL)
    job.expect_end(99, 0)
    if not is_closing:
        job.expect_end(6, 1)
    # The turn of the others would come later.
    for rank in job.ranks[1 if is_closing else 2 :]:
        rank.settle()
        assert rank.ask("close") == ["closed"]
    said = "rank 0 of 3 on node0 was lost: its companion process, or its node, has gone\n"
    assert job.errors() == f"mpiddp: {said}" * (not is_closing)


def test_ranks_do_not_outlive_the_program_that_started_one(crew, tmp_path, monkeypatch):
    shell = write_program(tmp_path / "python", f'{sys.executable} "$@"; exit $?')
    monkeypatch.setattr(sys, "executable", str(shell))
    job = crew([0, 0])
    job[1].process.kill()
    job.expect_end(6, 0)
    assert "rank 1 of 2 on node0 was lost: the program that started it has gone" in job.errors()


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_one_of_the_ranks_that_fail_reports(is_cut_off, crew):
    job = crew([0, 1, 1])
    for rank in job.ranks[1:]:
        rank.tell("fail", 5, OWN)
    number = {job[number].hear()[1]: number for number in (1, 2)}
    assert number.keys() == {"report", "silent"}
    if is_cut_off:
        # A failure counts though rank 0's companion is lost after it.
        os.kill(job.companions[0], signal.SIGKILL)
    else:
        assert job[0].ask("fail", 1, PEER) == ["decision", "silent"]
        # It was to end the job, and has gone without.
        job[number["report"]].tell("exit", 5)
    job.expect_end(99 if is_cut_off else 5, 0)
    job.expect_end(5, 1, 2)
    assert job.errors() == ""


MISTAKES = [Failure(rank, 2, OWN, "no data") for rank in range(3)]
ERRORS = [Failure(rank, 1, OWN, "raised") for rank in range(3)]
SUSPICION, REPETITION = Failure(1, 6, PEER, "closed"), Failure(0, 6, REPEATED, "closed")
GONE = [Loss(rank, f"node{rank}", "gone") for rank in range(3)]
ASKED_TO_END = [Loss(rank, f"node{rank}", "asked", ending=ASKED) for rank in range(3)]
LEAVES = Loss(0, "node0", "left", ending=LEAVING)


@pytest.mark.parametrize(
    ("events", "due", "decision"),
    [
        # Of ranks that find the same mistake the lowest reports.
        ([(0.0, MISTAKES[2]), (0.3, MISTAKES[0])], 0.5, MISTAKES[0]),
        ([(0.0, MISTAKES[2]), (0.02, Failure(1, 2, OWN, "other")),
          (0.03, Failure(0, 1, OWN, "no data"))], 0.5, MISTAKES[2]),
        # There is nothing to wait for where all have said it, or it is no mistake of the user's.
        ([(0.0, MISTAKES[2]), (0.02, MISTAKES[1]), (0.04, MISTAKES[0])], 0.05, MISTAKES[0]),
        ([(0.0, ERRORS[2]), (0.03, ERRORS[1])], 0.05, ERRORS[1]),
        # Without a lost rank, the rank with a suspicion reports it: it is nearer to the cause than
        # a rank that waited for it. An error that a lost rank has caused is not reported.
        ([(0.0, REPETITION), (0.1, SUSPICION)], 2.0, SUSPICION),
        ([(0.0, SUSPICION), (0.1, ERRORS[0]), (0.12, GONE[2])], 0.17, GONE[2]),
        # Launchers end the others when one fails, or just leaves.
        ([(0.0, ASKED_TO_END[0]), (0.1, GONE[2])], 0.15, GONE[2]),
        ([(0.0, LEAVES), (0.1, ASKED_TO_END[1])], 0.15, LEAVES),
        ([(0.0, ASKED_TO_END[1]), (0.1, LEAVES)], 0.5, ASKED_TO_END[1]),
        ([(0.0, LEAVES), (0.2, SUSPICION)], 0.25, LEAVES),
        ([*enumerate(ASKED_TO_END)], NEVER[0], None),
    ],
)  # fmt: skip
def test_what_is_decided_on_what_is_known(events, due, decision):
    decider = Decider(3)
    for now, event in events:
        assert decision is None or decider.decide(now) is None
        tell = decider.fail if isinstance(event, Failure) else decider.lose
        tell(event, now)
    assert decider.owes_report() == isinstance(decision, Loss)
    assert decider.find_time() == pytest.approx(due)
    assert decider.decide(due - 0.01) is None
    assert decider.decide(due + 0.01) == decision
    # After a loss nothing follows, and after a failure what has become of its rank.
    decider.lose(GONE[0], 10.0)
    follows = Leave(decision.code) if decision and decision in (MISTAKES[0], ERRORS[0]) else None
    assert decision is None or decider.decide(10.0 + ABANDONED_SECONDS) == follows


def test_a_rank_that_leaves_with_its_own_error_is_not_lost():
    decider = Decider(2)
    failure = Failure(0, 2, OWN, "a bad option")
    decider.fail(failure, 0.0)
    decider.lose(Loss(0, "node0", describe_status(2 << 8)[0], blames_host=False), 0.2)
    decider.lose(Loss(1, "node0", describe_status(signal.SIGTERM)[0], ending=ASKED), 0.3)
    assert decider.decide(1.0) == failure
    assert decider.decide(1.0) is None and decider.decide(0.2 + ABANDONED_SECONDS) == Leave(2)


def test_a_late_reply_answers_no_other_question(monkeypatch):
    assert lifeline.ANSWER_SECONDS > SUSPICION_SECONDS, "it must hear what is decided"
    monkeypatch.setattr(lifeline, "ANSWER_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(lifeline, "_enter", lambda *_: Link(ours))
    rank = lifeline.Lifeline(Entrance("", ""), 0, lambda _: None, lambda: None)
    companion = Link(theirs)
    *_, thread = (each for each in threading.enumerate() if each.name == "mpiddp-lifeline")
    clock = time.pthread_getcpuclockid(thread.ident)
    time.sleep(0.3)
    assert time.clock_gettime(clock) < 0.1, "while nothing comes it takes no core"

    def hear() -> int:
        """The number of the next question."""
        assert companion.wait(HUNG)
        [(kind, (number, _))] = companion.receive()
        assert kind == "fail"
        return number

    assert rank.ask(1, "its error", OWN) is None
    late = hear()
    monkeypatch.setattr(lifeline, "ANSWER_SECONDS", HUNG)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rank.ask, 1, "its error", OWN)
        number = hear()
        companion.send("reply", [late, "silent"])
        companion.send("reply", [number, "report"])
        assert answer.result(HUNG) == "report"
    companion.send("leave", 6)
    companion.close()
    rank.wait()
    # What ended the conversation answers all later questions.
    assert rank.ask(1, "its error", OWN) == "leave"
    assert rank.gather_stacks() == []


def test_a_rank_that_has_closed_its_session_early_is_named(crew, tmp_path):
    job = crew([0, 0])
    job[0].tell("note_run", str(tmp_path), 1)
    job[0].settle()
    job[1].tell("note_closing", "node0")
    job[1].settle()
    job[0].tell("fail", 1, PEER)
    job.expect_end(6, 0, 1)
    said = (
        "mpiddp: rank 1 of 2 on node0 left early: it has closed its session, at the end of its "
        "program, while other ranks still called collectives. Rank 0 got: its error\n"
    )
    assert job.errors() == said
    # Restarts would leave out a host that was lost.
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["lost_rank"], outcome["lost_host"]) == (1, None)


def test_a_rank_that_ends_the_job_is_not_lost(crew):
    job = crew([0, 0, 1])
    job[1].tell("announce", 4)
    job[1].settle()
    job[1].tell("exit", 4)
    job[1].process.wait(HUNG)
    for number in (0, 2):
        job[number].process.kill()
    assert job.errors() == ""


def test_a_rank_that_is_killed_is_named_and_a_run_told_where_it_looks(crew, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    job = crew([0, 1])
    job[0].tell("note_run", str(run), 3)
    for number in (0, 1):
        job[number].tell("progress.note_step", 12 - number)
        job[number].settle()
    job[1].tell("kill", signal.SIGKILL)
    job.expect_end(6, 0)
    errors = job.errors()
    said = rf"mpiddp: rank 1 of 2 on node1 was lost at step 11: {KILLED}\n"
    assert re.fullmatch(said, errors), errors
    expected = {
        "code": 6, "rank": 0, "host": "node0", "step": 12, "attempt": 3, "lost_rank": 1,
        "lost_host": "node1", "node_fault": None, "reason": errors.removeprefix("mpiddp: ").strip(),
    }  # fmt: skip
    assert json.loads((run / "outcome.json").read_text()) == expected
    assert (run / "logs" / "rank-0.log").read_text() == errors


def test_all_ranks_answer_a_request(crew, tmp_path):
    job = crew([0, 0, 1, 1], limits="requests.ANSWER_SECONDS = 4.0")
    for number in range(4):
        job[number].tell("progress.note_step", 10 * number)
        job[number].settle()
    # The companion is nobody's child: a script may wait for its own.
    process = job[0].process.pid
    assert Path(f"/proc/{process}/task/{process}/children").read_text() == ""
    address = tmp_path / "job" / "lifeline.json"
    assert address.stat().st_mode & 0o777 == 0o600
    hostnames, answers = ask(tmp_path / "job", "position")
    assert hostnames == ["node0", "node0", "node1", "node1"]
    assert answers == {n: f"at step {10 * n}" for n in range(4)}
    # Two do not answer; to wait takes no core.
    job.stop_companion(1)
    (waiting := psutil.Process(job.companions[0])).cpu_percent()
    hostnames, answers = ask(tmp_path / "job", "position")
    assert len(hostnames) == 4 and sorted(answers) == [0, 1]
    assert waiting.cpu_percent() < 10
    os.kill(job.companions[1], signal.SIGCONT)


def test_an_attempt_that_was_replaced_ends(crew, tmp_path):
    folder = tmp_path / "job"
    attempt = folder / job_directory.ATTEMPT
    attempt.write_text("first")
    job = crew([0, 1], seconds=4.0)
    # The next one has published its own address.
    attempt.write_text("second")
    publish(folder, "127.0.0.1:1", "2" * 32)
    job.expect_end(6, 0, 1)
    assert "rank 0 of 2 on node0: the job was restarted without this rank" in job.errors()
    assert json.loads((folder / "lifeline.json").read_text())["token"] == "2" * 32
    assert not (folder / "outcome.json").exists()


@pytest.mark.long
def test_a_companion_takes_less_than_half_a_thousandth_of_a_core_for_each_rank(crew):
    job = crew([0, 0, 1, 1])
    before = {each: count_seconds(each) for each in job.companions.values()}
    time.sleep(seconds := 12.0)
    assert all(count_seconds(each) - before[each] < seconds / 1000 for each in before)
