"""The launcher's process: what is typed reaches it, and so do signals, whenever they come."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

import launchers
from mpiddp.environment import JOB_DIRECTORY
from mpiddp.front import attempt
from mpiddp.front.attempt import Files, Launch
from mpiddp.launch.launcher.programs import OPEN_MPI, SRUN
from mpiddp.process.publication import ADDRESS_FILE

SECONDS = 60
RUN = """
import os, sys
from mpiddp.front.attempt import Launch
from mpiddp.launch.launcher.programs import OPEN_MPI

launch = Launch(OPEN_MPI, starts_ranks=True)
launch.listen()
for attempt in range(2):
    command = [sys.executable, "-c", "print('<' + input() + '>')"]
    print(launch.run(command, os.environ, None, offers_input=True).status)
    sys.stdout.flush()
"""


def test_what_is_typed_reaches_the_launcher():
    front, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], cwd=launchers.ROOT,
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    try:
        for word in ("one", "two"):
            os.write(front, f"{word}\n".encode())
            await_text(front, rf"<{word}>\s+0")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(front)


def await_text(terminal: int, text: str) -> None:
    found, deadline = "", time.monotonic() + SECONDS
    while not re.search(text, found):
        ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
        assert ready, found
        found += os.read(terminal, 1024).decode()


@pytest.fixture
def launch(monkeypatch):
    before = {number: signal.getsignal(number) for number in (*attempt.PASSED_ON, signal.SIGALRM)}
    launch = Launch(OPEN_MPI, starts_ranks=True)
    launch.listen()
    yield launch
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_between_two_launchers_goes_to_the_second_alone(launch, monkeypatch):
    assert launch.run(["true"], os.environ, None).status == 0
    killed = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    # The first has gone: its number may be another process's by now.
    signal.raise_signal(signal.SIGTERM)
    assert (killed, launch.signal) == ([], signal.SIGTERM)
    monkeypatch.undo()
    found = launch.run(["sleep", str(SECONDS)], os.environ, None)
    assert (found.status, found.signal) == (143, signal.SIGTERM)


def test_a_preemption_behind_the_end_of_a_launcher_is_for_the_next(launch, monkeypatch):
    def be_preempted(_, process, show):
        # The front has not noticed yet that it has ended.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(attempt, "copy_messages", be_preempted)
    found = launch.run(["true"], os.environ, None)
    assert (found.status, found.preemption, launch.preemption) == (0, None, signal.SIGUSR1)
    # This one gets it.
    assert launch.run(["sleep", str(SECONDS)], os.environ, None).status == 128 + signal.SIGUSR1
    launch.preemption = None  # Which would end the next one, too.
    monkeypatch.setattr(attempt, "copy_messages", lambda *_: signal.raise_signal(signal.SIGUSR2))
    assert launch.run(["sleep", str(SECONDS)], os.environ, None).preemption == signal.SIGUSR2


def test_ctrl_c_before_the_ranks_have_met_is_no_interrupt_of_python(launch, monkeypatch, tmp_path):
    sent = []

    def interrupt(_, process, show):
        monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
        signal.raise_signal(signal.SIGINT)
        (tmp_path / ADDRESS_FILE).touch()
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(os, "kill", kill)
        process.kill()

    kill = os.kill
    monkeypatch.setattr(attempt, "copy_messages", interrupt)
    launch.run(["sleep", str(SECONDS)], {**os.environ, JOB_DIRECTORY: str(tmp_path)}, None)
    heard = [number for number in sent if number != signal.SIGCONT]
    assert heard == [signal.SIGTERM, signal.SIGINT]


FORGETFUL = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(2, b"ready\\n")
time.sleep(1.5)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
time.sleep(60)
"""


def test_a_signal_that_a_launcher_forgets_before_its_ranks_is_repeated(
    launch, monkeypatch, tmp_path
):
    def terminate(messages, *_):
        assert messages.readline() == b"ready\n"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(attempt, "copy_messages", terminate)
    variables = {**os.environ, JOB_DIRECTORY: str(tmp_path)}
    assert launch.run([sys.executable, "-c", FORGETFUL], variables, None).status == 143


def test_ranks_that_outlast_ctrl_c_are_told(launch, monkeypatch, capfd):
    def interrupt(messages, *_):
        assert messages.readline() == b"ready\n"
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(attempt, "copy_messages", interrupt)
    monkeypatch.setattr(attempt, "PATIENCE_SECONDS", 0.1)
    program = FORGETFUL.replace("SIGTERM", "SIGINT").replace("60", "0")
    assert launch.run([sys.executable, "-c", program], os.environ, None).status == 0
    assert capfd.readouterr().err.encode() == attempt.STILL_RUNNING


@pytest.mark.parametrize("step", ["", "StepId=7.0 SrunHost:Pid={host}:{process}"])
def test_srun_without_a_step_ends_itself(monkeypatch, step):
    asked, sent = [], []
    host = os.uname().nodename.partition(".")[0]

    def answer(*command: str) -> str:
        asked.append(command)
        return step.format(host=host, process=42)

    class Process:
        pid = 42
        returncode = None

        def send_signal(self, number):
            sent.append(number)

    monkeypatch.setattr(attempt, "ask", answer)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    launch = Launch(SRUN, starts_ranks=True)
    launch._process = Process()  # type: ignore[assignment]
    monkeypatch.setattr(launch, "_is_running", lambda: True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        launch._take(number, None)
    through_slurm = [command[2] for command in asked if command[0] == "scancel"]
    if step:
        assert (through_slurm, sent) == (["--signal=USR1", "--signal=TERM"], [])
    else:
        assert (through_slurm, sent) == ([], [signal.SIGTERM])


def test_srun_takes_the_names_of_logs_as_they_are():
    found = Files("100%j/a.out", "100%j/a.err").srun_options()[:2]
    assert found == ["--output=100%%j/a.out", "--error=100%%j/a.err"]


def test_a_full_disk_below_standard_output_is_no_failure_at_the_end():
    code = "import sys; from mpiddp.front.attempt import write; write(sys.stdout, b'x')"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full).returncode == 0
