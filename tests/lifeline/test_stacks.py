"""Where the ranks of a job are: stacks, the table of them, and jobs that stand still."""

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_lifeline import HUNG, crew

import launchers
from mpiddp import stacks
from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.lifeline import stall
from mpiddp.lifeline.movement import Movement
from mpiddp.lifeline.progress import Progress
from mpiddp.lifeline.requests import ask, gather_stacks
from mpiddp.lifeline.stacks import dump
from mpiddp.lifeline.stacks.answers import RECORD_SECONDS, StackAnswers
from mpiddp.lifeline.stacks.dump import (
    LIBRARY,
    PACKAGE,
    STANDARD,
    TRAINER,
    USER,
    Frame,
    StackReader,
    find_owner,
    parse_dump,
    read_thread,
    read_traceback,
)
from mpiddp.lifeline.stacks.flight_recorder import read_calls, read_record
from mpiddp.lifeline.stacks.positions import StackPosition, find_blamed, read_answers
from mpiddp.lifeline.stacks.verdict import describe
from mpiddp.lifeline.stall import Calls, EndWatch, Finished, StallHandlers, StallWatch
from mpiddp.process import job_directory
from mpiddp.stacks import find_directory

__all__ = ["crew"]
HOST = socket.gethostname()
TORCH = "/env/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
LOADER, GRAPH = f"{TORCH}/utils/data/dataloader.py", f"{TORCH}/autograd/graph.py"

# As faulthandler of Python 3.13 wrote it, during a collection of garbage.
DUMP = """\
Stack (most recent call first):
  Garbage-collecting
  File "/home/me/a \\xfc \\"b\\".py", line 7 in load
  File "<string>", line ??? in <module>
  ...
"""


def test_the_frames_of_a_dump_and_of_a_thread():
    frames = read_thread(threading.get_ident())
    assert [each.function for each in frames[:2]] == ["read_thread", sys._getframe().f_code.co_name]
    assert read_thread(-1) == []
    frames = parse_dump(DUMP)
    assert [(each.file, each.line, each.function) for each in frames] == [
        ('/home/me/a \\xfc \\"b\\".py', 7, "load"),
        ("<string>", 0, "<module>"),
    ]
    assert parse_dump("") == []
    with pytest.raises(AttributeError) as caught:
        parse_dump(None)
    frames = read_traceback(caught.value.__traceback__)
    assert [each.function for each in frames] == ["parse_dump", sys._getframe().f_code.co_name]


def test_whose_code_a_file_is():
    for owner, files in {
        USER: ["/home/me/train.py", "train.py", "<string>", "/home/me/mpiddp/model.py"],
        TRAINER: [PACKAGE / "training" / "trainer.py"],
        LIBRARY: [
            PACKAGE / "launch" / "script.py", STANDARD / "queue.py", C10D, "<frozen runpy>",
            "/usr/lib/python3/dist-packages/numpy/linalg.py",
        ],
    }.items():  # fmt: skip
        for file in files:
            assert find_owner(str(file)) == owner, file


def stack(*rows: tuple[str, int, str]) -> tuple[Frame, ...]:
    """The innermost row first."""
    return tuple(Frame(file, line, name, find_owner(file)) for file, line, name in rows)


MAIN = ("/home/me/train.py", 9, "<module>")
REDUCE = stack(
    (C10D, 3252, "all_reduce"), (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    ("/home/me/train.py", 80, "train"), MAIN,
)  # fmt: skip
LOAD = stack(
    (str(STANDARD / "queue.py"), 180, "get"), (LOADER, 1290, "_get_data"),
    (LOADER, 733, "__next__"), ("/home/me/data.py", 12, "batches"), MAIN,
)  # fmt: skip
BACKWARD = stack(
    (GRAPH, 824, "_engine_run_backward"), (f"{TORCH}/_tensor.py", 581, "backward"),
    ("/home/me/train.py", 77, "train"), MAIN,
)  # fmt: skip
COMPUTE = stack(("/home/me/model.py", 5, "forward"), MAIN)
SAVE = stack((C10D.replace("distributed_c10d", "checkpoint/filesystem"), 9, "write"), MAIN)
CLOSE = stack((str(PACKAGE / "launch" / "control.py"), 120, "_meet"))


def positions(*stacks, **more) -> list[StackPosition]:
    return [
        StackPosition(rank, f"node{rank // 4}", each, **more) for rank, each in enumerate(stacks)
    ]


def test_the_whole_stack():
    # Another line of torch's is no other place of the script's, but another stack.
    later = (Frame(C10D, 3253, "all_reduce", LIBRARY), *REDUCE[1:])
    found = positions(REDUCE, later)
    assert describe(found) == "  ranks 0-1  all_reduce, train.py:80\n"
    lines = describe(found, is_full=True).splitlines()
    assert lines[0] == "  rank 0 on node0  all_reduce, train.py:80"
    assert lines[1:5] == [
        f"      all_reduce, {C10D}:3252", f"      wrapper, {TORCH}/distributed/c10d_logger.py:83",
        "      train, /home/me/train.py:80", "      <module>, /home/me/train.py:9",
    ]  # fmt: skip
    assert lines[5] == "  rank 1 on node0  all_reduce, train.py:80"


@pytest.mark.parametrize(
    ("stacks", "blamed"),
    [
        ([REDUCE, COMPUTE], [1]),
        ([REDUCE, REDUCE], []),
        # Nobody waits: all work.
        ([COMPUTE, COMPUTE], []),
        ([COMPUTE, LOAD], []),
        # A backward pass may wait for the others, or for nobody.
        ([BACKWARD, BACKWARD], []),
        ([BACKWARD, LOAD, BACKWARD], [1]),
        ([REDUCE, BACKWARD], []),
        # At the end of a session a rank waits for those that still work.
        ([CLOSE, COMPUTE, CLOSE, LOAD], [1, 3]),
        # A rank that says nothing is not where the others are.
        ([REDUCE, ()], [1]),
        ([COMPUTE, ()], []),
        # To write a checkpoint is work.
        ([SAVE, (*REDUCE[:1], *SAVE)], [0]),
    ],
)
def test_whom_the_others_wait_for(stacks, blamed):
    assert [each.rank for each in find_blamed(positions(*stacks))] == blamed


def test_a_rank_that_has_finished_is_missed_by_those_in_collectives():
    def show(*others) -> str:
        return describe(
            [StackPosition(0, "node0", CLOSE, finished=True), *positions(REDUCE, *others)[1:]]
        )

    assert show(BACKWARD, REDUCE) == (
        "  rank 0 on node0  has closed its session, and waits for the others to close theirs\n"
        "  rank 1 on node0  backward, train.py:77\n"
        "  rank 2 on node0  all_reduce, train.py:80\n"
        "  in collectives the others wait in vain for rank 0 on node0\n"
    )
    # One that works may still come to its end, too.
    assert show(REDUCE, COMPUTE).splitlines()[-1] == "  the others wait for rank 2 on node0"


def test_what_cannot_tell_where_it_is():
    lines = [StackPosition(0, "n", (), state).line for state in ("T", "D", "S", "")]
    assert lines == [
        "no answer: stopped (SIGSTOP)",
        "no answer: waits in the kernel for a device or a file system",
        "no answer: it has written no stack", "no answer: has ended",
    ]  # fmt: skip
    assert StackPosition(0, "n", REDUCE, failed=True).line == "all_reduce, train.py:80 (failed)"
    trained = stack((str(PACKAGE / "training" / "trainer.py"), 30, "train_step"))
    assert StackPosition(0, "n", trained).line == "train_step, trainer.py:30"
    barrier = stack((C10D, 1, "barrier"))
    assert StackPosition(0, "n", barrier).line == "barrier, distributed_c10d.py:1"
    [silent] = read_answers(["n"], {})
    assert (silent.name, silent.line) == ("rank 0 on n", lines[2])


# Stacks of a real process

WRITES = """
import ctypes, os, socket, sys, threading, time
from mpiddp.lifeline.stacks.dump import StackWriter
writer = StackWriter()
with socket.socket(fileno=int(sys.argv[1])) as connection:
    socket.send_fds(connection, [b"1"], [writer.descriptor])
"""
HANGS = """def hang():
    # A signal ends a sleep.
    while True: ctypes.PyDLL(None).sleep(1000)
hang()
"""


def read_soon(reader: StackReader) -> list[Frame]:
    reader.ask()
    while (frames := reader.read()) is None:
        time.sleep(0.005)
    return frames


@contextlib.contextmanager
def hanging(program: str):
    """A process that sends a file, and the reader of its stack."""
    own, its = socket.socketpair()
    words = [sys.executable, "-c", program, str(its.fileno())]
    with own, its, subprocess.Popen(words, pass_fds=[its.fileno()]) as process:
        own.settimeout(60)
        _, (descriptor,), _, _ = socket.recv_fds(own, 64, 1)
        reader = StackReader(process.pid, descriptor)
        try:
            yield process, reader
        finally:
            process.kill()
            os.close(descriptor)


def test_a_stack_comes_from_inside_a_c_call_that_holds_the_lock():
    with hanging(WRITES + HANGS) as (process, reader):
        launchers.until(lambda: read_soon(reader)[0].function == "hang", "the function")
        frames = read_soon(reader)
        assert [(each.function, each.line) for each in frames] == [("hang", 9), ("<module>", 10)]
        assert frames[0].owner == USER
        assert reader.read_last() == [], "no signal has ended it"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        reader.ask()
        assert reader.read() == [], "it cannot answer, and is not waited for"
        assert reader.find_state() == "T"
        for number in (signal.SIGSEGV, signal.SIGCONT):
            process.send_signal(number)
        process.wait(HUNG)
        assert reader.read_last() == frames


CRASHES = """threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def crash(): os.abort()
crash()
"""


def test_where_a_signal_has_ended_the_main_thread():
    with hanging(WRITES + CRASHES) as (process, reader):
        process.wait(HUNG)
        assert [each.function for each in reader.read_last()] == ["crash", "<module>"]


def test_a_rank_that_waits_for_a_core_in_the_middle_of_its_stack_is_given_time(monkeypatch):
    half, now = '  File "train.py", line 7 in step\n', [0.0]
    monkeypatch.setattr(dump, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    reader = StackReader(os.getpid(), descriptor := os.memfd_create("half"))
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        reader.ask()
        for now[0], more, expected in (
            (0.0, "", None), (0.51, "", None), (0.52, half, None), (0.6, half, None),
            (1.05, "", None), (1.15, "", parse_dump(2 * half)),
        ):  # fmt: skip
            file.write(more.encode())
            assert reader.read() == expected, now


BUSY = """def call(depth):
    return call(depth - 1) if depth else None
def run():
    for _ in range(30): call(20)
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
while True:
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_that_come_and_go_survive_a_request(monkeypatch):
    """With the stacks of all threads, faulthandler crashed after 15 requests."""
    monkeypatch.setattr(dump, "LONGEST_SECONDS", HUNG)
    monkeypatch.setattr(dump, "QUIET_SECONDS", HUNG)
    with hanging(WRITES + BUSY) as (process, reader):
        for _ in range(60):
            functions = [each.function for each in read_soon(reader)]
            assert functions[-1] == "<module>" and "_bootstrap" not in functions
        assert process.poll() is None


def test_a_process_that_heeds_no_signal_is_not_sent_one():
    heedless = WRITES.replace("StackWriter()", "open(0)")
    heedless = heedless.replace("writer.descriptor", 'os.memfd_create("nothing")')
    with hanging(f"{heedless}time.sleep(1000)") as (process, reader):
        assert read_soon(reader) == []
        assert process.poll() is None
        assert reader.find_state() == "S"
    assert reader.find_state() == ""


def test_a_signal_after_the_end_is_ignored():
    """A companion that is stopped between two lines sends it late."""
    code = "import signal; from mpiddp.lifeline.stacks import dump; "
    code += "dump.StackWriter().close(); signal.raise_signal(dump.SIGNAL)"
    assert launchers.run_python("-c", code).returncode == 0


# A crew of ranks without MPI and torch


def find_line(text: str) -> str:
    """The position of a rank that is in the one line of its program that has ``text``."""
    lines = (launchers.PROGRAMS / "lifeline_rank.py").read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return f"main, lifeline_rank.py:{number}"


def stop(rank) -> None:
    """Return once it is stopped."""
    rank.tell("kill", signal.SIGSTOP)
    os.waitid(os.P_PID, rank.process.pid, os.WSTOPPED | os.WNOWAIT)


def test_all_ranks_answer_wherever_they_are(crew, tmp_path):
    job = crew([0, 0, 1, 1, 2])
    for rank in job.ranks:
        rank.tell("progress.note_move")
        rank.settle()
    job[0].tell("fake_record", ENTRY)
    # Its other threads cannot run.
    assert job[2].ask("lock") == ["locking"]
    job[3].tell("raise")
    for number in (0, 3):
        job[number].settle()
    stop(job[4])
    # 0.1 s on an idle machine, but for records that do not come.
    found = gather_stacks(tmp_path / "job")
    idle = [seconds for seconds, _ in ask(tmp_path / "job", "idle")[1].values()]
    assert min(idle[:4]) > idle[4] == 0, "one that is stopped is no reason to end the job"
    assert [each.rank for each in found] == list(range(5))
    assert found[2].line == find_line("libc.read(os.pipe()")
    assert found[4].line == "no answer: stopped (SIGSTOP)"
    assert {each.hostname for each in found[2:4]} == {"node1"}
    text = describe(found)
    assert re.search(rf"ranks 0-1 +{find_line('in sys.stdin')}\n", text), text
    # An error is where the work of its rank ended.
    assert [each.failed for each in found] == [False, False, False, True, False]
    assert found[3].line == find_line("recurse(depth + 1)").replace("main", "recurse") + " (failed)"
    assert len(found[3].frames) == dump.MOST_FRAMES
    # A record is asked for, and not waited for.
    (call,) = found[0].record
    assert (call.title, call.content) == ("all_reduce 17", "1,024 float32")
    assert found[2].record is None
    os.kill(job[4].process.pid, signal.SIGCONT)


def test_a_job_in_which_nobody_moves_ends(crew):
    job = crew([0, 0, 1])
    for rank in job.ranks:
        rank.tell("progress.note_move")
    job[0].tell("watch_stall", 4.0)
    end = time.monotonic() + 4.5
    while (moved := time.monotonic()) < end:
        # One that moves is enough.
        job[2].tell("progress.note_move")
        time.sleep(0.05)
    assert all(rank.process.poll() is None for rank in job.ranks)
    job.expect_end(6, 0, 1, 2)
    assert time.monotonic() - moved > 3.5
    errors = job.errors()
    assert errors.count("mpiddp: no rank has made progress for 4 s\n") == 1
    assert f"  ranks 0-2  {find_line('in sys.stdin')}\n" in errors


def test_a_job_stands_still_if_all_say_so_twice():
    ended, said = [], {}
    watch = StallWatch(
        10.0,
        StallHandlers(
            lambda callback, name: callback(["node0", "node1"], said if name == "idle" else {}),
            lambda *_: None,
            lambda reason, *_: ended.append(reason),
        ),
    )
    # One that does not answer may move; and so may one that was stopped with all others.
    for idle in ([20.0], [20.0], [20.0, 20.0], [0.0, 20.0], [20.0, 20.0], [20.0, 20.0]):
        assert not ended
        said = {rank: (seconds, False) for rank, seconds in enumerate(idle)}
        watch.look(0.0)
    # Or if a collective waits for a rank that goes on.
    said = {0: (0.0, False), 1: (20.0, True)}
    watch.look(0.0)
    assert ended == [
        "no rank has made progress for 10 s", "rank 1 on node1 has been in one collective for 10 s",
    ]  # fmt: skip


# Ranks that come to their end early


def answer(stack, numbers=None, counts=None, own=(0, 0)):
    """What a rank says of its calls."""
    frames = [frame.pack() for frame in stack]
    return {"frames": frames, "numbers": numbers or {}, "counts": counts or {}, "own": own}


class Asked:
    """Answers a watch, and keeps what it decides."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.answers: dict = {}
        self.reasons: list[str] = []
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(stall, "time", clock)
        self._due: list = []
        self.watch = EndWatch(
            StallHandlers(self._ask, lambda _, work: self._due.append(work), self._end)
        )

    def _ask(self, callback, name) -> None:
        hostnames = [f"node{rank}" for rank in range(len(self.answers))]
        callback(hostnames, self.answers if name == "calls" else {})

    def _end(self, reason, table, lost) -> None:
        self.reasons.append(reason)

    def finish(self, rank, calls=None, session=1) -> None:
        self.watch.add(Finished(rank, f"node{rank}", 10.0, calls or Calls(), session))

    def look(self, *answers) -> None:
        """A second later; None is the answer of a rank that has finished."""
        self.now += 1
        self.answers = dict(enumerate(answers))
        due, self._due = self._due, []
        for work in due:
            work(self.now)


def test_a_collective_that_a_finished_rank_will_never_call_ends_the_job(monkeypatch):
    asked = Asked(monkeypatch)
    asked.finish(1, Calls({"gloo:0": [8, 8]}))
    # It has made its part of the eighth, in which rank 0 waits for rank 2.
    asked.look(answer(REDUCE, {"gloo:0": [8, 7]}), None, answer(COMPUTE))
    # The ninth needed nobody else, such as a broadcast.
    asked.look(answer(COMPUTE, {"gloo:0": [9, 9]}), None, answer(COMPUTE))
    # Calls of a group without it.
    asked.look(answer(REDUCE, {"gloo:2": [40, 39]}), None, answer(COMPUTE))
    assert asked.reasons == []
    asked.look(answer(BACKWARD, {"gloo:0": [9, 8], "gloo:2": [40, 40]}), None, answer(COMPUTE))
    (reason,) = asked.reasons
    assert reason == (
        "rank 1 of 3 on node1 left early: it has closed its session, at the end of its program, "
        "after collective 8 of the default group. Rank 0 on node0 waits in collective 9: backward, "
        "train.py:77"
    )


def test_mpiddps_own_collectives_are_counted_as_well(monkeypatch):
    asked = Asked(monkeypatch)
    asked.finish(1, Calls({"gloo:0": [8, 8]}, own=(3, 3)))
    for own in ((3, 2), (3, 3), (4, 4)):
        asked.look(answer(REDUCE, {"gloo:0": [8, 8]}, own=own), None, answer(COMPUTE))
    assert asked.reasons == []
    asked.look(answer(REDUCE, own=(4, 3)), None, answer(COMPUTE))
    said = "after collective 3 of mpiddp. Rank 0 on node0 waits in collective 4: all_reduce, "
    assert said in asked.reasons[0]


def test_ranks_that_wait_for_an_unknown_collective_wait_until_the_time_out(monkeypatch):
    asked = Asked(monkeypatch)
    asked.finish(1)
    for number in range(40):
        # Each time in another collective, or one of them computes.
        asked.look(answer(REDUCE, {"gloo:2": [number, number]}), None, answer(REDUCE))
        asked.look(answer(COMPUTE), None, answer(REDUCE))
        # Backward passes may be long.
        asked.look(answer(BACKWARD), None, answer(BACKWARD))
    assert asked.reasons == []
    for _ in range(11):
        assert asked.reasons == []
        asked.look(answer(REDUCE), None, answer(BACKWARD))
    said = "and the others have waited in collectives for 10 s. Rank 0 on node0 waits in one: all_r"
    assert said in asked.reasons[0]


def test_without_the_recorder_a_backward_pass_is_told_by_the_number_of_calls(monkeypatch):
    asked = Asked(monkeypatch)
    asked.finish(1, Calls(counts={"0": 8}))
    for _ in range(12):
        asked.look(answer(BACKWARD, counts={"0": 8}), None)
    assert asked.reasons == []
    for _ in range(11):
        assert asked.reasons == []
        asked.look(answer(BACKWARD, counts={"0": 9}), None)
    assert "for 10 s. Rank 0 on node0 waits in one: backward" in asked.reasons[0]


def test_ranks_that_close_a_session_and_go_on_have_not_finished(monkeypatch):
    asked = Asked(monkeypatch)
    waits = answer(REDUCE, {"gloo:0": [9, 8]})
    asked.finish(0, Calls({"gloo:0": [8, 8]}))
    asked.finish(1, Calls({"gloo:0": [8, 8]}))
    # Rank 1 hears later that all have come.
    asked.watch.reopen(1)
    asked.look(waits, None)
    asked.finish(0, Calls({"gloo:0": [8, 8]}), session=2)
    asked.watch.reopen(1)
    assert asked.reasons == []
    asked.look(None, waits)
    assert "rank 0 of 2 on node0 left early" in asked.reasons[0]
    # One that finished before its first collective.
    asked = Asked(monkeypatch)
    asked.finish(0, Calls(counts={"0": 0}))
    asked.look(None, answer(REDUCE, {"gloo:0": [1, 0]}))
    assert "rank 0 of 2" in asked.reasons[0] and "after collective 0" in asked.reasons[0]


def call_all_kinds(session):
    """Each kind of collective once; the numbers of the calls, by group, and the stack of a rank."""
    import torch
    import torch.distributed as dist

    rank, size = session.world.rank, session.world.size
    before = read_calls().get("gloo:0", [0])[0]
    pair = dist.new_group([0, 1])
    other = dist.new_group([1, 2])
    x, parts = torch.ones(size), [torch.ones(1) for _ in range(size)]
    sources = parts if rank == 0 else None
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    dist.barrier()
    dist.gather(torch.ones(1), sources, 0)
    dist.scatter(torch.ones(1), sources, 0)
    dist.all_gather(parts, torch.ones(1))
    dist.all_to_all_single(torch.empty(size), x)
    dist.all_gather_object([None] * size, rank)
    dist.broadcast_object_list([rank], 0)
    for _ in range(3 if rank < 2 else 0):
        dist.all_reduce(x, group=pair)
    if rank > 0:
        dist.all_reduce(x, group=other)
    # A message between two of them.
    if rank < 2:
        dist.recv(x, 0) if rank else dist.send(x, 1)
    dist.all_reduce(x, async_op=True).wait()
    found = read_calls()
    mine = {}
    for name, group in {"pair": pair, "other": other}.items():
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            mine[name] = found[f"gloo:{group.group_name}"][0]
            dist.destroy_process_group(group)
    # A collective is noted as complete soon after its call has returned.
    is_complete = wait_until(lambda: len(set(read_calls()["gloo:0"])) == 1, 20.0)
    return found["gloo:0"][0] - before, is_complete, mine


def test_calls_are_counted_alike_on_all_ranks(pool):
    values = pool("openmpi", 3).call(call_all_kinds).values
    # Those of objects take two; messages between two ranks do not count.
    assert [value[:2] for value in values] == [(13, True)] * 3
    pair, other = 3, 1
    assert [value[2] for value in values] == [
        {"pair": pair}, {"pair": pair, "other": other}, {"other": other},
    ]  # fmt: skip


EARLY = """
import mpiddp, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
mpiddp.init().close()
dist.init_process_group("gloo")
# Groups stay open as long as the model lives.
model = DistributedDataParallel(torch.nn.Linear(10, 10))
for step in range(9 - dist.get_rank()):
    if step == 8:
        time.sleep(4)
        print("left alone", flush=True)
    model(torch.ones(4, 10)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.mpi
def test_a_rank_with_fewer_batches_ends_the_job_and_one_that_is_done_early_does_not(tmp_path):
    (tmp_path / "script.py").write_text(EARLY)
    result = launchers.run("openmpi", 2, ["-m", "mpiddp", "script.py"], cwd=tmp_path).expect(6)
    # Rank 1 had waited for longer than the other takes to be asked several times.
    assert result.stdout.count("left alone") == 1
    said = (
        r"mpiddp: rank 1 of 2 .* left early: .*, after collective (\d+) of the default group\. "
        r"Rank 0 .* waits in collective (\d+): (backward, script\.py:12)\n"
        r"  rank 0 .* \3\n  rank 1 .* has closed its session, .*\n  in collectives the others wait"
    )
    found = re.search(said, result.stderr)
    assert found and int(found[2]) == int(found[1]) + 1, result.stderr


# Movement


class Stop(threading.Event):
    """Ends a piece of work, which has begun once it has asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.held = threading.Event(), threading.Lock()
        """``held`` is let go at the end: to take it is one long call in C."""
        self.held.acquire()

    def is_set(self) -> bool:
        self.begun.set()
        return super().is_set()


def look(work, *, moves: bool) -> bool:
    """Whether this thread is seen to move, or not to, three times while it does ``work(stop)``."""
    found: list[bool] = []
    stop = Stop()
    movement = Movement(Progress(Progress.make_file()), 1e6)

    def find_move() -> bool:
        time.sleep(0.05)
        return movement.has_moved()

    def watch() -> None:
        assert stop.begun.wait(HUNG)
        # The first look finds whatever was before.
        find_move()
        for _ in range(3):
            found.append(wait_until(find_move, HUNG) if moves else not find_move())
        stop.set()
        stop.held.release()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        work(stop)
        watching.result()
    movement.close()
    return all(found)


def make_call(file: str, body: str):
    """A function of a library's file."""
    space = {"time": time}
    exec(compile(f"def call(stop):\n    {body}\n", file, "exec"), space)
    return space["call"]


def test_while_a_step_is_made_only_its_end_is_movement():
    steps = iter([1, 1, 1, 2, 2, None, None, 2])
    movement = Movement(Progress(Progress.make_file()), 1e6, lambda: next(steps))
    # This thread runs Python, and so moves between steps; the first look finds what was before.
    found = [movement.has_moved() for _ in range(8)]
    movement.close()
    assert found[:6] == [True, False, False, True, False, True]
    assert found[7]


def test_a_collective_does_not_move_however_it_waits_and_a_script_that_polls_does():
    assert look(make_call(C10D, "while not stop.is_set(): time.sleep(0.001)"), moves=False)
    # The same call again and again is movement.
    again = make_call(C10D, "time.sleep(0.001)")
    assert look(lambda stop: [again(stop) for _ in iter(stop.is_set, True)], moves=True)

    def work(stop) -> None:
        while not stop.is_set():
            time.sleep(0.001)

    assert look(work, moves=True)
    # One long call in C is none.
    assert look(lambda stop: stop.is_set() or stop.held.acquire(), moves=False)
    # A script's own data set inside a DataLoader works.
    call = make_call(LOADER, "work(stop)")
    call.__globals__["work"] = work
    assert look(call, moves=True)


def test_what_may_wait_for_other_ranks_is_a_collective():
    progress = Progress(Progress.make_file())
    movement = Movement(progress, 0.2)
    for file in (C10D, GRAPH, LOADER):
        stop = Stop()

        def watch(is_inside=file != LOADER, stop=stop) -> bool:
            time.sleep(0.1)
            found = wait_until(lambda: progress.is_in_collective() == is_inside, HUNG)
            stop.held.release()
            return found

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            make_call(file, "stop.held.acquire()")(stop)
            assert watching.result(), file
    progress.note_collective(True)
    movement.close()
    assert not progress.is_in_collective()


# NCCL's flight recorder

ENTRY = {
    "profiling_name": "nccl:all_reduce", "collective_seq_id": 17, "p2p_seq_id": 0, "is_p2p": False,
    "state": "started", "input_sizes": [[8, 128]], "process_group": ("0", "default_pg"),
    "input_dtypes": ["Float"], "retired": False, "time_created_ns": 0,
}  # fmt: skip


def test_the_last_collectives_of_nccl(monkeypatch):
    library = types.ModuleType("torch._C._distributed_c10d")
    monkeypatch.setitem(sys.modules, library.__name__, library)
    assert read_record() == []
    entries = [{**ENTRY, "collective_seq_id": n, "retired": n < 20} for n in range(1, 40)]
    entries.append({**ENTRY, "is_p2p": True, "p2p_seq_id": 4, "profiling_name": "nccl:send"})
    library._dump_nccl_trace = lambda *_: pickle.dumps({"entries": entries})
    *calls, message = read_record()
    # Around the first that is not complete.
    assert [call.number for call in calls] == list(range(12, 28))
    assert [call.number for call in calls if call.is_complete] == list(range(12, 20))
    line = calls[-1].describe()
    assert line.startswith("nccl: all_reduce 27, 1,024 float32, not complete, called ")
    assert message.describe().startswith("nccl: send 4, 1,024 float32, not complete")
    library._dump_nccl_trace = lambda *_: b"garbage"
    assert read_record() == []
    shown = describe(positions(REDUCE, record=(calls[-1],)), is_full=True)
    assert line in shown and line not in describe(positions(REDUCE, record=(calls[-1],)))


def test_a_record_that_comes_late_is_waited_for_and_all_who_ask_meanwhile_get_it():
    asked, due, replies = [], [], []
    reader = types.SimpleNamespace(
        ask=lambda: asked.append("stack"), read=list, find_state=lambda: "S"
    )
    loop = types.SimpleNamespace(call_at=lambda when, work: due.append((when, work)))
    answers = StackAnswers(reader, loop, lambda: asked.append("record"))
    for record, late in (([], 0.0), (None, RECORD_SECONDS)):
        for _ in range(3):
            answers.ask(replies.append)
        when, look = due.pop()
        look(when)
        assert replies == []
        if record is not None:
            answers.take_record(record)
        when, look = due.pop()
        look(when + late)
        assert [each["record"] for each in replies] == 3 * [record]
        replies.clear()
    assert asked == 2 * ["record", "stack"]


def test_which_job(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(ConfigurationError, match="no job of yours runs on this machine: type"):
        find_directory(None)
    with launchers.hold_directory("17") as (_, one), launchers.hold_directory("18_2") as (_, other):
        # One that has not come so far that it could be asked is none.
        assert len(job_directory.list_running()) == 2
        with pytest.raises(ConfigurationError, match="2 jobs of yours on this machine, but"):
            find_directory(None)
        (one / "lifeline.json").write_text("{}")
        assert find_directory(None) == find_directory("17") == one
        (other / "lifeline.json").write_text("{}")
        assert find_directory("18_2") == other
        with pytest.raises(ConfigurationError, match="2 jobs run here: type mpiddp stacks 17, or "):
            find_directory(None)
        with pytest.raises(ConfigurationError, match=r"no job '19', .*; running here: 17, 18_2"):
            find_directory("19")
        with pytest.raises(ConfigurationError, match="no job that runs writes its logs to"):
            find_directory(str(tmp_path))
        with pytest.raises(UnreachableError, match="does not answer"):
            gather_stacks(one)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "lifeline.json").write_text("{}")
    assert find_directory(str(logs)) == logs


# Real jobs

SCRIPT = """
import datetime, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[1])))
def load():
    print("hanging", flush=True)
    while True: time.sleep(0.01)
for step in range(3):
    if dist.get_rank() == 1 and step == 2:
        load()
    dist.all_reduce(torch.ones(1000))
"""
BEHIND = (
    rf"  rank 1 on {re.escape(HOST)} is behind: it has not entered all_reduce 3 \(1,000 float32, "
    r"script\.py:11\), in which rank 0 has waited for \d+ s; it is in load, script\.py:7"
)
TABLE = rf"""
  rank 0 on {re.escape(HOST)}  all_reduce, script\.py:11( \(failed\))?
  rank 1 on {re.escape(HOST)}  load, script\.py:7
{BEHIND}
"""


@pytest.mark.mpi
def test_a_real_job_is_asked_and_then_ends_because_it_stands_still(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["-m", "mpiddp", "--log-dir", "logs", "--stall-timeout", "10", "script.py", "100"]
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with launchers.start("mpich", 2, options, cwd=tmp_path, env=state) as job:
        job.until(lambda: "hanging" in job.stdout(), "a rank that hangs")
        monkeypatch.setenv("XDG_STATE_HOME", state["XDG_STATE_HOME"])

        def is_shown(words: list[str]) -> bool:
            # In this process, which has imported all: the job ends soon.
            stacks.main(words)
            return bool(re.search(rf": 2 ranks on 1 host{TABLE}", capsys.readouterr().out))

        # The other rank comes to its collective a moment later.
        for words in ([], [str(tmp_path / "logs")]):
            job.until(lambda words=words: is_shown(words), f"the table of {words}")
        result = job.wait().expect(6)
    said = rf"mpiddp: rank 0 on {re.escape(HOST)} has been in one collective for 10 s"
    assert re.search(f"{said}{TABLE}", result.stderr), result.stderr
    assert "has been in one collective" in (tmp_path / "logs/rank-0.err").read_text()
    assert not (tmp_path / "logs" / "lifeline.json").exists()
    assert list((tmp_path / "state/mpiddp/jobs").iterdir()) == []


@pytest.mark.long
def test_a_job_of_one_rank_ends_because_it_stands_still(tmp_path):
    (tmp_path / "script.py").write_text("import time; time.sleep(100)")
    (tmp_path / "job").mkdir(mode=0o700)
    # As the front starts a rank that needs no launcher.
    environment = {"MPIDDP_JOB_DIRECTORY": str(tmp_path / "job")}
    options = ("-m", "mpiddp", "--stall-timeout", "2")
    result = launchers.run_python(*options, "script.py", env=environment, cwd=tmp_path)
    assert result.returncode == 6, result.stderr
    assert "no rank has made progress for 2 s" in result.stderr
    assert "<module>, script.py:1" in result.stderr


@pytest.mark.mpi
@pytest.mark.long
def test_a_time_out_shows_where_the_ranks_are(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    result = launchers.run("openmpi", 2, ["-m", "mpiddp", "script.py", "6"], cwd=tmp_path).expect(1)
    assert "Timed out waiting 6000ms" in result.stderr
    assert re.search(TABLE, result.stderr), result.stderr


@pytest.mark.long
def test_a_job_on_several_nodes_is_asked_from_another_node(slurm_cluster, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--nodelist=node[1-2]", "--nodes=2", "--kill-on-bad-exit=0")
    options = ["-m", "mpiddp", "--log-dir", "logs", "--label", "--stall-timeout", "8"]
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    arguments = [*options, "script.py", "100"]
    row = slurm_cluster.srun(*flags)
    with launchers.start(row, 3, arguments, cwd=tmp_path, env=state) as job:
        job.until(lambda: "hanging" in job.stdout(), "a rank that hangs")
        (directory,) = (tmp_path / "state/mpiddp/jobs").iterdir()
        variable = f"XDG_STATE_HOME={state['XDG_STATE_HOME']}"
        command = ["env", variable, f"PYTHONPATH={launchers.ROOT}", sys.executable, "-m", "mpiddp"]
        asked = slurm_cluster.must("exec", "node2", *command, "stacks", directory.name)
        result = job.wait().expect(6)
    table = (
        r"  ranks 0,2        all_reduce, script\.py:11\n"
        r"  rank 1 on node1  load, script\.py:7\n"
        r"  rank 1 on node1 is behind: it has not entered all_reduce 3 .*, in which ranks 0,2 have "
    )
    assert re.search(rf"{directory.name}: 3 ranks on 2 hosts\n{table}", asked), asked
    assert re.search(table, result.stderr.replace("[0@node1] ", "")), result.stderr
    assert re.findall(r"(?m)^\[\d@node\d\] hanging$", result.stdout) == ["[1@node1] hanging"]
    assert (tmp_path / "logs/rank-1.out").read_text() == "hanging\n"
