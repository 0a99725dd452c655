"""Whose fault a hang or a crash is: the verdict, the report's file, NCCL's answer, real jobs."""

import contextlib
import itertools
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from test_lifeline import HUNG, KILLED
from test_stacks import BACKWARD, COMPUTE, HOST, LOAD, LOADER, REDUCE, positions, stack

import facts
import launchers
from mpiddp.lifeline.stacks import hang_report, nccl_status
from mpiddp.lifeline.stacks.dump import PACKAGE
from mpiddp.lifeline.stacks.hang_report import HangReport
from mpiddp.lifeline.stacks.positions import DataWorker
from mpiddp.lifeline.stacks.recorded_call import OWN_GROUP, RecordedCall
from mpiddp.lifeline.stacks.verdict import find_verdict

# What is found in the stacks and records of ranks


def call(number=57, name="all_reduce", size=4096, **more) -> RecordedCall:
    values = {"backend": "gloo", "group": "0", "type": "float32", "seconds": 35.0, **more}
    return RecordedCall(number=number, name=name, shapes=[[size]], **values)


def done(number=56, **more) -> RecordedCall:
    return call(number, is_complete=True, **more)


WAITS = (REDUCE, (done(), call()))
"""A stack, and a record."""
COMPUTES, LOADS = (COMPUTE, (done(),)), (LOAD, (done(),))
OTHER = (REDUCE, (done(), call(name="broadcast", size=7)))
STOPPED = ((), None, {"state": "T"})
GONE = (BACKWARD, None, {"ended": True})
FAILED = (REDUCE, (done(), done(57)), {"failed": True})
OWN = replace(call(), group=OWN_GROUP, backend=OWN_GROUP, seconds=None)
AVERAGE = stack((str(PACKAGE / "collectives" / "x.py"), 9, "average"), ("train.py", 80, "train"))
PAIR = {"group": "3", "members": [1, 2]}
INNER = (REDUCE, (done(), done(57), done(4, **PAIR), call(5, **PAIR)))
BUSY = stack(
    ("/home/me/data.py", 33, "load"), (LOADER.replace("dataloader", "_utils/worker"), 9, "loop"),
    *((frame.file, frame.line, frame.function) for frame in LOAD),
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([COMPUTES, COMPUTES], ""),
        # One is behind, in whatever it is.
        ([(REDUCE, (done(), call(seconds=5.0))), WAITS, LOADS], (
            "rank 2 on node0 is behind: it has not entered all_reduce 57 (4,096 float32, "
            "train.py:80), in which ranks 0-1 have waited for 35 s; it is in DataLoader, data.py:12"
        )),
        ([WAITS, (REDUCE, (done(57), call(58))), LOADS],
         "rank 2 on node0 is behind: it has not entered all_reduce 57 …, in which rank 0 has …"),
        ([WAITS, STOPPED], "rank 1 … in which rank 0 has waited for 35 s; it is stopped (SIGSTOP)"),
        ([WAITS, (COMPUTE, None), COMPUTES],
         "ranks 1-2 are behind: they have not entered … they are in forward, model.py:5"),
        ([FAILED, LOADS], "rank 1 … in which rank 0 has … it is in DataLoader, data.py:12"),
        # A call has its own name, else that of the function in which the rank is.
        *((
            [(inside, (replace(OWN, name=name),)), (COMPUTE, (replace(OWN, number=56),))],
            "rank 1 … mpiddp.all_reduce 57 (…), in which rank 0 waits; it is in forward, model.py:5"
        ) for inside, name in ((REDUCE, ""), (AVERAGE, "all_reduce"))),
        ([(BACKWARD, (OWN,)), (COMPUTE, (replace(OWN, number=56, name="", is_complete=True),))],
         "rank 1 … mpiddp.all_reduce 57 (…), in which rank 0 waits; it is in forward, model.py:5"),
        # One that tells no record and is in a collective may be in this one.
        ([WAITS, WAITS, (REDUCE, None)], ""),
        # One makes another call: which, the majority says, and those that have crashed.
        ([WAITS, OTHER, WAITS], (
            "rank 1 on node0 makes another call than the others: broadcast 57 (7 float32, "
            "train.py:80), where ranks 0,2 call all_reduce 57 (4,096 float32, train.py:80)"
        )),
        ([WAITS, OTHER], (
            "ranks make different calls: rank 0 on node0 calls all_reduce 57 (4,096 float32, "
            "train.py:80); rank 1 on node0 calls broadcast 57 (7 float32, train.py:80)"
        )),
        # Who has made a call is a member, whatever torch says of a group that is closed.
        ([(REDUCE, (call(members=[0]),)), (REDUCE, (call(name="broadcast", members=[0]),))],
         "ranks make different calls: rank 0 on node0 calls all_reduce …; rank 1 … broadcast 57 …"),
        ([(BACKWARD, WAITS[1]), (REDUCE, (call(size=9),)), GONE],
         "rank 1 … than the others: all_reduce 57 (9 …), where rank 0 calls … (4,096 …)"),
        # Sizes may differ where each rank has its own part, and of what is over.
        ([(REDUCE, (call(name="gather", seconds=1.0),)), (REDUCE, (call(name="gather", size=9),))],
         ""),
        ([(REDUCE, (done(), call(seconds=1.0))), (REDUCE, (done(size=9), call()))], ""),
        # Rank 0 waits for 1, which waits for 2 in a smaller group.
        ([WAITS, (REDUCE, (done(), *INNER[1][2:])), (LOAD, (done(), done(57), done(4, **PAIR)))],
         "rank 2 … all_reduce 5 of group 3 (…), in which rank 1 has waited for 35 s; …"),
        # They wait for each other: the one that is alone comes first.
        ([WAITS, WAITS, (REDUCE, (done(), replace(OWN, name="")))], (
            "rank 2 … entered all_reduce 57 … ranks 0-1 have waited … in all_reduce, train.py:80\n"
            "ranks 0-1 are … entered mpiddp.all_reduce 57 …, in which rank 2 waits; they are in …"
        )),
        ([WAITS, WAITS], (
            "all ranks have been in all_reduce 57 (4,096 float32, train.py:80) for 35 s, so none "
            "is behind: look at the network, the devices, and the library"
        )),
        ([(LOAD, (done(),), {"workers": (DataWorker(7, ()), DataWorker(8, BUSY))}), WAITS],
         "rank 0 … in DataLoader, data.py:12, and waits for its data worker 8 in load, data.py:33"),
    ],
)  # fmt: skip
def test_whose_fault_it_is(ranks, verdict):
    found = positions(*(each[0] for each in ranks))
    rows = zip(found, ranks, strict=True)
    more = [replace(each, record=row[1], **(row[2] if len(row) > 2 else {})) for each, row in rows]
    pattern = ".+".join(map(re.escape, verdict.split("…")))
    assert re.fullmatch(pattern, said := "\n".join(find_verdict(more))), said


def test_reports_without_a_directory_have_a_place_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = [replace(each, record=WAITS[1]) for each in positions(REDUCE, LOAD)]
    report = HangReport(found, records=str(tmp_path / "17-flight-rank-"))
    path = report.write("why", None)
    assert path == tmp_path / "state/mpiddp/reports/17.txt"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    # A second one is added; what nobody has touched for long is removed.
    (old := path.with_name("old.txt")).write_text("")
    os.utime(old, times=(time.time() - 31 * 24 * 3600,) * 2)
    assert report.write("again", None) == path
    assert not old.exists()
    text = path.read_text()
    for part in ("why\n", "again\n", "train, /home/me/train.py:80\n",
                 "gloo: all_reduce 57, 4,096 float32, not complete, called 35.0 s ago\n",
                 f"torchfrtrace {tmp_path} --prefix 17-flight-rank-\n"):  # fmt: skip
        assert part in text, text
    assert report.write("why", tmp_path) == tmp_path / "report.txt"
    assert report.write("why", tmp_path / "nowhere") is None


# NCCL's answer, by a stand-in that talks as nccl/src/ras/client_support.cc does

SAYS = b"Job summary\n\n  (1) MISMATCH  Communicator ranks have different collective counts\n"


@contextlib.contextmanager
def serving(*greetings):
    """A server that greets each caller in its own way, or hangs; its address, and what it heard."""
    asked: list[bytes] = []

    def serve() -> None:
        for greeting in greetings:
            link, _ = server.accept()
            held.append(link)
            with contextlib.suppress(OSError):
                for answer in ((greeting,), (b"OK\n",), (SAYS[:10], SAYS[10:])) if greeting else ():
                    asked.append(link.recv(100))
                    for part in answer:
                        link.sendall(part)
                if greeting:
                    link.close()

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", asked
        thread.join(10)
        for link in held:
            link.close()


def test_nccl_is_asked(monkeypatch):
    monkeypatch.setattr(nccl_status, "MOST_SECONDS", 20.0)
    # The first is a process that hangs.
    with serving(b"", b"SERVER PROTOCOL 3\n") as (address, asked):
        assert nccl_status.ask(address) == f"NCCL, by its RAS at {address}:\n{SAYS.decode()}"
    assert asked == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"VERBOSE STATUS\n"]


def test_what_does_not_answer_as_nccl_does_is_a_line():
    for address in ("", "127.0.0.1:1", "127.0.0.1"):
        said = f"NCCL's RAS at {address} does not answer: "
        assert nccl_status.ask(address).startswith(said)
    with serving(*[b"HTTP/1.1 400\n"] * 3) as (address, _):
        assert "does not answer: it says b'HTTP/1.1 400" in nccl_status.ask(address)


# Real jobs with planted culprits; the fault suite has those of the trainer

KINDS = {
    "sleeps": r"is behind: it has not entered {call}, in which ranks 0,2 .* in sleep, hanging\.py",
    "stopped": r"is behind: it has not entered {call}, in which ranks 0,2 .* it is stopped",
    "worker": r"is behind: it has not entered {call}, .* waits for its data worker \d+ in sleep, ",
    "skips": r"makes another call than the others: .*, where ranks? [02,]+ calls? {call}",
    "other": r"makes another call than the others: .*broadcast \d+ \(7 .* ranks? [02,]+ calls? ",
}
CALLS = {
    "ddp": r"all_reduce \d+ \(\S+ float32, hanging\.py:\d+\)",
    "own": r"mpiddp\.all_reduce \d+ \(4,096 float32, hanging\.py:\d+\)",
}
DEFAULT = (("other", "ddp"), ("worker", "own"))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "who"),
    [
        pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.long)
        for row in itertools.product(KINDS, CALLS)
    ],
)
def test_a_planted_culprit_is_named(kind, who, tmp_path):
    # Longer than a busy machine takes for a worker's start.
    seconds = "20" if kind == "worker" else "8"
    front = ["-m", "mpiddp", "--quiet", "--stall-timeout", seconds]
    words = [*front, launchers.PROGRAMS / "hanging.py", kind, who]
    env = {"XDG_STATE_HOME": str(tmp_path / "state"), "NCCL_RAS_ADDR": "127.0.0.1:1"}
    env["TORCH_FR_DUMP_TEMP_FILE"] = "/somewhere/of"
    result = launchers.run("openmpi", 3, words, cwd=tmp_path, env=env)
    assert result.returncode not in (0, 1), result
    said = rf"  rank 1 on {re.escape(HOST)} {KINDS[kind].format(call=CALLS[who])}"
    assert re.search(said, result.stderr), result.stderr
    place = re.search(r"  the whole report: (.+)", result.stderr)
    assert place, result.stderr
    report = (tmp_path / place[1]).read_text()
    for each in (said, "NCCL's RAS at 127.0.0.1:1 does not answer", "torch writes /somewhere/ofN"):
        assert re.search(each, report), report


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "is_shown"),
    [pytest.param("crashes", True, marks=pytest.mark.long), ("outlives", False)],
)
def test_a_scripts_rank_is_lost_and_a_crash_shown_but_not_a_forked_childs(kind, is_shown, tmp_path):
    words = ["-m", "mpiddp", "--log-dir", "logs", launchers.PROGRAMS / "hanging.py"]
    result = launchers.run("openmpi", 2, [*words, kind, "ddp"], cwd=tmp_path)
    # The launcher's own code for a rank that was killed, or did not close MPI.
    number = signal.SIGSEGV if is_shown else signal.SIGKILL
    assert result.returncode in (1, 6, 128 + number, number), result
    (gone,) = re.findall(r"gone ([\d.]+)", result.stdout)
    assert time.time() - float(gone) < HUNG, result
    (line,) = [line for line in facts.messages(result) if "was lost" in line]
    how = "it was killed by SIGSEGV" if is_shown else KILLED
    assert re.fullmatch(rf"mpiddp: rank 1 of 2 on \S+ was lost: {how}", line), line
    shown = rf"  rank 1 on {re.escape(HOST)}  (crash|outlive), hanging\.py:\d+ \(its end\)\n"
    report = (tmp_path / "logs" / hang_report.FILE).read_text()
    for text in (result.stderr, report):
        assert bool(re.search(shown, text)) is is_shown, text
