"""What launchers say is shown without what repeats a rank's own report."""

import itertools
import math
import os
import select
import subprocess
import sys
import time
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpiddp.front.launcher_messages import PATIENCE_SECONDS, MessageFilter, copy_messages

MODULE = "mpiddp.front.launcher_messages"
RULE = "-" * 74
OPEN_MPI_5_NOISE = f"""\
{RULE}
MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD
  Proc: [[5704,1],0]
  Errorcode: 4

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{RULE}
{RULE}
prterun has exited due to process rank 0 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{RULE}
"""
OWN = "mpiddp: rank 1 on vm: what went wrong\n"
NOISE = f"""\
{OWN}{OPEN_MPI_5_NOISE}[vm:1] 1 more process has sent help message help-mpi-api.txt / mpi-abort
[vm:1] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages
Abort(4) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 4) - process 0
"""
NEWS = f"""\
{RULE}
prterun noticed that process rank 1 with PID 4597 on node vm exited on
signal 9 (Killed).
{RULE}
{RULE}
prterun has exited due to process rank 1 with PID 7 on node vm exiting
improperly.
{RULE}
  MPI_ABORT was invoked \\n in words
[vm:1] 1 more process has sent help message help-mpi-btl-tcp.txt / peer
[vm:1] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages
{RULE}
There are not enough slots available
{RULE}

a table of two columns: {RULE}

{RULE}
"""


@pytest.mark.parametrize("order", ["first", "last", "twice"])
def test_what_mpirun_says_about_an_abort_is_left_out_and_nothing_else(order):
    text = {"first": NOISE + NEWS, "last": NEWS + NOISE, "twice": NOISE + NOISE + NEWS}[order]
    kept = {"first": [OWN, NEWS], "last": [NEWS, OWN], "twice": [OWN, OWN, NEWS]}[order]
    assert show(text) == "".join(kept)


OPEN_MPI_4_NOISE = f"""\
{RULE}
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 4.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{RULE}
"""
OF_ANOTHER_RANK = """\
mpiddp: rank 2 of 3 on node2 at step 7: failed
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    train()
ValueError: on purpose
"""


@pytest.mark.parametrize("noise", [OPEN_MPI_4_NOISE, OPEN_MPI_5_NOISE], ids=["4", "5"])
def test_what_another_rank_says_in_the_midst_of_it_passes(noise):
    lines = noise.splitlines(keepends=True)
    own = OF_ANOTHER_RANK.splitlines(keepends=True)
    for place in range(len(lines) + 1):
        text = "".join([*lines[:place], *own, *lines[place:]])
        said = show(text)
        # Right behind an opening rule it breaks the paragraph, which is then unknown.
        broken = place > 0 and lines[place - 1] == f"{RULE}\n" and place < len(lines)
        broken = broken and lines[place] != f"{RULE}\n"
        assert OF_ANOTHER_RANK in said if broken else said == OF_ANOTHER_RANK
    for end in ("", "\n", "\nmore\n\n"):
        glued = OF_ANOTHER_RANK.rstrip() + noise + end
        assert show(glued) == OF_ANOTHER_RANK + end
    woven = [line for pair in zip(lines[2:7], own, strict=True) for line in pair]
    text = "".join([*lines[:2], *woven, *lines[7:]])
    assert show(text) == OF_ANOTHER_RANK


LEFT_4 = f"""\
{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[2541,1],0]
  Exit code:    75
{RULE}
"""
LEFT_5 = f"""\
{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-15512@1,0]
   Exit code:    75
{RULE}
\0"""


@pytest.mark.parametrize("noise", [LEFT_4, LEFT_5], ids=["4", "5"])
def test_an_exit_code_that_the_front_passes_on_is_not_repeated(noise):
    assert show(OF_ANOTHER_RANK + noise) == OF_ANOTHER_RANK
    assert show(noise + NEWS) == NEWS


WARNING = """\
[rank1]:[W1123 11:37:09.334876137 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=20, …)
Exception raised from recvBytes at /x/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f7060903b8d in /x.so)
frame #4: c10d::TCPStore::check(std::vector<std::string> const&) + 0x383 (0x7f43 in /x.so)
<omitting python frames>
frame #19: <unknown function> + 0x1098ec (0x7f43f8b278ec in /lib/libc.so.6)

"""
LABELLED = "".join(f"[1@a.b] {line}" for line in WARNING.splitlines(keepends=True))


@pytest.mark.parametrize("warning", [WARNING, LABELLED], ids=["plain", "labelled"])
def test_a_store_that_has_gone_is_no_news_beside_a_report(warning, monkeypatch):
    report = "mpiddp: rank 0 of 2 on vm was lost\n"
    assert show(warning + report) == show(report + warning) == report
    lines = warning.splitlines(keepends=True)
    assert show("".join([*lines[:3], report, *lines[3:]])) == report
    # Where no rank says how the job ended, or it goes on, the warning is shown.
    assert show(warning + "more\n") == "more\n" + warning
    messages = MessageFilter()
    assert messages.add((report + warning).encode()) == report.encode()
    assert messages.release() == b""
    monkeypatch.setattr(f"{MODULE}.WARNING_SECONDS", 0.0)
    assert messages.release() == warning.encode()


KILLED = "mpiddp: rank 0 of 2 on vm was lost: it was killed by SIGKILL (by the kernel if …)\n"


@pytest.mark.parametrize("said", ["", "mpiddp: started\n", KILLED, f"[0@vm] {KILLED}"])
def test_an_abort_that_no_rank_explains_is_shown(said):
    abort = NOISE.splitlines(keepends=True)[-1]
    assert show(abort + said) == said + abort
    assert show(said + abort + OF_ANOTHER_RANK) == said + OF_ANOTHER_RANK


def show(text: str) -> str:
    messages = MessageFilter()
    return (messages.add(text.encode()) + messages.release(at_end=True)).decode()


@given(
    st.lists(st.sampled_from([NOISE, NEWS, LEFT_5, WARNING, OF_ANOTHER_RANK, "no end", "\n"])),
    st.lists(st.integers(0, 3000)),
)
@example([WARNING, NOISE], [len(WARNING.encode()) + 1])
@example(["no end", NOISE, WARNING], [len("no end")])
def test_it_does_not_matter_how_a_text_is_cut(texts, places):
    data = "".join(texts).encode()
    cuts = [0, *sorted(place for place in places if place < len(data)), len(data)]
    messages = MessageFilter()
    # However long this takes, nothing is late.
    with mock.patch.multiple(MODULE, PATIENCE_SECONDS=math.inf, WARNING_SECONDS=math.inf):
        shown = [messages.add(data[begin:end]) for begin, end in itertools.pairwise(cuts)]
    assert b"".join([*shown, messages.release(at_end=True)]).decode() == show(data.decode())


def test_what_has_no_end_is_shown_at_once_or_soon():
    messages = MessageFilter()
    assert messages.add(b"\r 50%|##") == b"\r 50%|##"
    assert messages.add(b"\r100%|##\n[y/N] ") == b"\r100%|##\n"
    assert messages.release() == b"[y/N] "
    assert messages.add(b"no\n") == b"no\n"


@pytest.mark.parametrize("before", [f"{RULE}\n\r 1%", "[1/9] .", "Abs"])
def test_what_grows_without_an_end_is_not_held_back_for_ever(before, monkeypatch):
    messages = MessageFilter()
    assert messages.add(before.encode()) == messages.add(b"\r") == b""
    monkeypatch.setattr(f"{MODULE}.PATIENCE_SECONDS", 0.0)
    assert messages.add(b"\r 2%").decode() == f"{before}\r\r 2%"
    assert messages.add(b"\r 3%") == b"\r 3%"


def test_a_process_that_stays_behind_does_not_keep_the_front(monkeypatch):
    code = "input(); import subprocess; subprocess.Popen(['sleep', '60']); print(end='said')"
    command = [sys.executable, "-c", f"import os; os.dup2(2, 1); {code}"]
    shown: list[bytes] = []
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    assert process.stdin is not None and process.stderr is not None

    def find_nothing(*_):
        """The launcher says its last words, and ends, while the front is slow to look."""
        monkeypatch.undo()
        process.stdin.write(b"\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return [], [], []

    monkeypatch.setattr(select, "select", find_nothing)
    with process, process.stderr:
        copy_messages(process.stderr, process, shown.append)
        subprocess.run(["pkill", "-g", str(process.pid)], check=False)
    assert b"".join(shown) == b"said"
    assert time.monotonic() - begin < 30 + PATIENCE_SECONDS
