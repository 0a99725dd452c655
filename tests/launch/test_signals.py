"""Requests to end: they end the job, and are written down with the step."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import launchers
from facts import messages
from mpiddp.process.outcome import read_outcome

# Signals that are not named make no checkpoint, but end the run. One that has begun would be
# finished, for which all ranks are needed.
LONG = (
    "--data", "toy", "--samples", "200", "--epochs", "100000", "--name", "run",
    "--preempt-signal", "USR2", "--save-every", "never",
)  # fmt: skip
TERM, INT = signal.SIGTERM, signal.SIGINT


def check(result: launchers.Result, folder: Path, number: signal.Signals, size: int) -> None:
    """One line on the console, and the same in outcome.json."""
    (line,) = (line for line in messages(result) if "stopped by" in line)
    outcome = read_outcome(folder / "runs" / "run")
    assert outcome is not None
    assert outcome["code"] == 128 + number
    assert outcome["reason"].endswith(f"stopped by {number.name}")
    assert outcome["step"] > 0 and outcome["rank"] in range(size)
    place = f"rank {outcome['rank']} of {size} on {outcome['host']} at " if size > 1 else ""
    assert re.fullmatch(rf"mpiddp: {place}step {outcome['step']}: stopped by {number.name}", line)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "ranks", "number", "whom"),
    [
        # The other one does not answer, so that this one waits inside a library.
        ("openmpi", 2, TERM, "the first, inside a collective"),
        pytest.param("mpich", 3, INT, "the last", marks=pytest.mark.long),
        pytest.param("alone", 1, TERM, "the last", marks=pytest.mark.long),
        pytest.param("impi", 2, TERM, "the first", marks=launchers.marks_of("impi")),
    ],
)
def test_a_run_that_is_stopped_says_so(name, ranks, number, whom, tmp_path):
    arguments = ["-W", "error", "-m", "mpiddp.train", *LONG]
    with launchers.start(name, ranks, arguments, cwd=tmp_path) as job:
        job.until(lambda: "Epoch 2" in job.stdout(), "the second epoch")
        found = job.ranks() if ranks > 1 else {0: job.process.pid}
        if "inside" in whom:
            os.kill(found[1], signal.SIGSTOP)
            # The first rank waits by now, in torch or in MPI, wherever the other one was to answer.
            # If it does not wait yet, the signal finds it in Python, and has to end it as well.
            time.sleep(1)
        os.kill(found[0 if "first" in whom else ranks - 1], number)
        result = job.wait()
    codes = (128 + number, *((signal.SIGKILL, TERM) if ranks > 1 else ()))
    assert result.returncode in codes, result
    check(result, tmp_path, number, ranks)


@pytest.mark.long
@pytest.mark.mpi
def test_ctrl_c_in_a_terminal_is_no_other_signal(tmp_path):
    """Under jobs/local.sh: a terminal interrupts all of its foreground process group."""
    mpirun = str(launchers.find("openmpi").mpirun)
    variables = {"MPIDDP_PYTHON": sys.executable, "MPIDDP_MPIRUN": mpirun}
    words = [launchers.ROOT / "jobs" / "local.sh", "2", "--runs-dir", tmp_path / "runs", *LONG]
    with launchers.start("alone", 1, words, cwd=tmp_path, env=variables, python="bash") as job:
        job.until(lambda: "Epoch 2" in job.stdout(), "the second epoch")
        os.killpg(job.process.pid, INT)
        result = job.wait().expect(130)
    check(result, tmp_path, INT, 2)


CHILD = """
import os, signal, subprocess, sys, time
from mpiddp.launch.failure.signals import heed_signals

def stop(error):
    print(error, error.exit_code, flush=True)
    os._exit(error.exit_code)

signal.signal(signal.SIGINT, signal.SIG_IGN)
heed_signals(stop)
receiver, sender = os.pipe()
child = os.fork()
if child == 0:
    os.write(sender, b"x")
    time.sleep(100)
    os._exit(0)
code = f"import os, time; os.write({sender}, b'x'); time.sleep(100)"
program = subprocess.Popen([sys.executable, "-S", "-c", code], pass_fds=[sender])
for process in (child, program.pid):
    os.read(receiver, 1)
    os.kill(process, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.2)
print("ignored", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(100)
"""


def test_children_are_ended_for_themselves_and_what_was_ignored_stays_so():
    # From Python 3.12 on, forking a program with threads warns.
    answer = launchers.run_python("-W", "ignore::DeprecationWarning", "-c", CHILD)
    assert answer.stdout.splitlines() == ["-15", "-15", "ignored", "stopped by SIGTERM 143"]
    assert (answer.stderr, answer.returncode) == ("", 143)
