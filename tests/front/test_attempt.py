"""The launcher's process: what is typed reaches it, and so do signals, whenever they come."""

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import launchers
from mpiddp.environment import JOB_DIRECTORY
from mpiddp.errors import ConfigurationError
from mpiddp.front import attempt, guard
from mpiddp.front.attempt import Files, Launch
from mpiddp.front.job_end import Exit, describe_code, find_end, find_failure
from mpiddp.launch.launcher.programs import MPICH, OPEN_MPI, SRUN
from mpiddp.process.background import LASTING_SECONDS
from mpiddp.process.descendants import list_children
from mpiddp.process.publication import ADDRESS_FILE
from mpiddp.process.rank_process import find_start

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
    # As in what a rank starts, whose signals are blocked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)
    launch = Launch(OPEN_MPI, starts_ranks=True)
    launch.listen()
    yield launch
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_between_two_launchers_goes_to_the_second_alone(launch, monkeypatch):
    with pytest.raises(ConfigurationError, match="/no/mpirun cannot be run: No such file"):
        launch.run(["/no/mpirun"], os.environ, None)
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
    monkeypatch.setattr(attempt, "copy_messages", lambda *_: signal.raise_signal(signal.SIGUSR2))
    assert launch.run(["sleep", str(SECONDS)], os.environ, None).preemption == signal.SIGUSR2

    def be_preempted(_, process, show):
        # The front has not noticed yet that it has ended.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(attempt, "copy_messages", be_preempted)
    found = launch.run(["true"], os.environ, None)
    assert (found.status, found.preemption, launch.preemption) == (0, None, signal.SIGUSR1)
    # This one gets it.
    assert launch.run(["sleep", str(SECONDS)], os.environ, None).status == 128 + signal.SIGUSR1


@pytest.mark.parametrize(
    ("kind", "job", "told"),
    # Slurm sends SIGTERM a second time when it kills what is left: no reason to hurry.
    [
        (OPEN_MPI, "", (2, 2, 2, 15, 15)),
        (OPEN_MPI, "7", (2, 2, 2, 15)),
        (MPICH, "7", (2, 2, 2, 15)),
    ],
)
def test_whom_a_signal_reaches(launch, monkeypatch, tmp_path, kind, job, told):
    """Until ranks have met, Ctrl-C is no interrupt of Python. Open MPI's get the first one here."""
    sent, heard, rank = [], [], 2**22 + 1
    launch.kind = kind

    def signal_all(_, process, show):
        monkeypatch.setattr(os, "kill", lambda whom, number: sent.append((whom == rank, number)))
        signal.raise_signal(signal.SIGINT)
        (tmp_path / ADDRESS_FILE).touch()
        for number in 2 * (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        monkeypatch.setattr(os, "kill", kill)
        process.kill()

    kill = os.kill
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setattr(attempt, "copy_messages", signal_all)
    monkeypatch.setattr(attempt, "list_children", lambda launcher: [rank])
    monkeypatch.setattr(guard.Guard, "tell", lambda _, number: heard.append(number))
    launch.run(["sleep", str(SECONDS)], {**os.environ, JOB_DIRECTORY: str(tmp_path)}, None)
    past, on = kind is OPEN_MPI, (False, signal.SIGCONT)  # A launcher may be stopped.
    expected = [(False, 15), (past, 2), (past, 15), (False, 2), (False, 15)]
    assert sent == [each for told in expected for each in (told, on)]
    assert tuple(sorted(heard)) == told


ENDS = """
import os, signal, sys
from mpiddp.__main__ import main

class Late:
    def __del__(self, kill=os.kill, process=os.getpid()):
        # Python has given up its own handlers.
        for number in NUMBERS:
            kill(process, number)

late = Late()
sys.argv[1:] = ["--launcher", "none", "job.py"]
main()
"""


def test_a_signal_while_python_ends_does_not_take_the_place_of_the_exit_code(tmp_path):
    (tmp_path / "job.py").write_text("raise SystemExit(7)")
    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
    text = ENDS.replace("NUMBERS", str([int(number) for number in numbers]))
    launchers.execute(sys.executable, "-c", text, cwd=tmp_path, timeout=SECONDS).expect(7)


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
    signal.raise_signal(signal.SIGALRM)  # No rank runs any more.
    assert capfd.readouterr().err.encode() == attempt.STILL_RUNNING


@pytest.mark.parametrize("step", ["", "StepId=7.0 SrunHost:Pid={host}:{process}"])
def test_srun_without_a_step_ends_itself(monkeypatch, step):
    asked, sent = [], []
    host = os.uname().nodename.partition(".")[0]

    def answer(*command: str, seconds: float) -> str:
        asked.append((*command, seconds))
        return step.format(host=host, process=42)

    monkeypatch.setattr(attempt, "ask", answer)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    launch = Launch(SRUN, starts_ranks=True)
    launch._process = types.SimpleNamespace(pid=42, returncode=None, send_signal=sent.append)
    monkeypatch.setattr(launch, "_is_running", lambda: True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        launch._take(number, None)
    through_slurm = [command[2] for command in asked if command[0] == "scancel"]
    if step:
        assert (through_slurm, sent) == (["--signal=USR1", "--signal=TERM"], [])
        # What Slurm ends has 30 s, and what makes way more.
        assert asked[0][-1] == 100 and sum(each[-1] for each in asked[-2:]) < 30
    else:
        assert (through_slurm, sent) == ([], [signal.SIGTERM])


def test_srun_takes_the_names_of_logs_as_they_are():
    found = Files("100%j/a.out", "100%j/a.err").srun_options()[:2]
    assert found == ["--output=100%%j/a.out", "--error=100%%j/a.err"]


def test_a_full_disk_below_standard_output_is_no_failure_at_the_end():
    code = "import sys; from mpiddp.front.attempt import write; write(sys.stdout, b'x')"
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full).returncode == 0


CRASHED = "node1: task 0: Segmentation fault (core dumped)"
LEFT = "node1: task 1: Exited with exit code 3"
KILLED = "node2: tasks 2-3: Killed"
TERMINATED = "node2: task 4: Terminated"
NODE = "Node failure on node3"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ([TERMINATED], TERMINATED),
        ([KILLED, TERMINATED, LEFT], LEFT),
        ([LEFT, KILLED, CRASHED], CRASHED),
        ([CRASHED, KILLED, NODE], NODE),
        # Above 128 the rank was killed by a signal, and a shell around it said so.
        (["node1: task 1: Exited with exit code 137", KILLED], KILLED),
    ],
)
def test_the_cause_is_found_in_any_order(said, cause):
    around = ["srun: Job step aborted: Waiting up to 12 seconds.", "a line of the script's own"]
    for order in itertools.permutations(said):
        lines = [f"srun: error: {text}" for text in order]
        assert find_failure([*around, *lines, "task 9: Killed"]) == cause


@pytest.mark.parametrize(
    ("found", "code", "parts"),
    [
        (Exit(7), 7, []),
        (Exit(137, LEFT), 3, [LEFT, "srun's code was 137"]),
        (Exit(137, KILLED), 6, [KILLED]),
        (Exit(1, NODE), 6, [NODE]),
        # After a signal, a script may end with any code; mpirun ends with 1.
        (Exit(75, "", signal.SIGTERM), 75, []),
        (Exit(1, "", signal.SIGTERM), 143, ["mpiddp was sent SIGTERM; srun's code was 1"]),
        (Exit(0, "", signal.SIGUSR1), 0, []),
        (Exit(137, LEFT, outcome={"code": 4, "reason": "far\naway"}), 4, ["far; srun's code"]),
        (Exit(0, outcome={"code": 0, "reason": "done", "path": "runs/x"}), 0, ["runs/x"]),
        (Exit(134, outcome={"code": 0}), 0, ["srun's code was 134"]),
        (Exit(143, "node1: task 0: Exited with exit code 143", outcome={"code": 143}), 143, []),
        (Exit(9, outcome={"code": "4"}), 9, []),
        # Ranks that srun terminated because one was killed wrote that down.
        (Exit(143, KILLED, outcome={"code": 143}), 6, ["srun terminated the others"]),
        (Exit(143, KILLED, signal.SIGTERM, {"code": 143}), 143, []),
        # The one that went first after Ctrl-C is missed by the others.
        (Exit(137, "", signal.SIGINT, {"code": 6}), 130, ["mpiddp was sent SIGINT"]),
        (Exit(137, "", signal.SIGINT, {"code": 4, "reason": "no"}), 4, []),
    ],
)
def test_the_code_and_where_it_comes_from(found, code, parts):
    end = find_end(found, "srun")
    assert end.code == code
    assert [part for part in parts if part not in str(end)] == []
    assert parts or found.outcome or end.why == ""


def test_codes_of_signals_are_named_and_those_of_a_program_without_a_launcher_kept():
    assert describe_code(128 + signal.SIGSEGV) == "signal 11 (SIGSEGV) killed it"
    assert describe_code(77) == describe_code(255) == "a code that the program chose"
    assert find_end(Exit(9, "", signal.SIGTERM), None).code == 9


FRONT = """
import os, sys
from mpiddp.front.attempt import Launch
from mpiddp.launch.launcher.programs import OTHER

launch = Launch(OTHER, starts_ranks=True)
launch.listen()
variables = {**os.environ, "MPIDDP_ATTEMPT_TOKEN": os.urandom(8).hex()}
found = launch.run([sys.executable, "-S", "-c", *sys.argv[1:]], variables, None)
print(found.status, found.was_killed, flush=True)
"""
DEAF = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""
# As Open MPI's: it reads what its rank writes until nobody can write there any more.
LAUNCHER = """
import os, signal, subprocess, sys
rank = subprocess.Popen(
    [sys.executable, "-S", "-c", sys.argv[1]], env={**os.environ, "PMI_RANK": "0"},
    stdout=subprocess.PIPE, start_new_session=True,
)
signal.signal(signal.SIGTERM, lambda number, _: rank.send_signal(number))
for line in rank.stdout:
    os.write(1, line)
os._exit(abs(rank.wait()))
"""
CHILD = """
import os, signal, subprocess, sys, time
left = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
subprocess.Popen({beside})
print("ready", left.pid, flush=True)
"""
HOLDER = '["sleep", "1000"]'
"""It holds the launcher's output."""
LONG = "time.sleep(1000)\n"
SLOW = """
import os, signal, time

def save(number, _):
    time.sleep({seconds})
    os._exit(75)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def started(*words: str) -> Iterator[launchers.Job]:
    """A front with this launcher, once that is ready. Nothing may be left when it has ended."""
    with launchers.start("alone", 1, ["-c", FRONT, *words]) as job:
        job.until(lambda: "ready" in job.stdout(), "the launcher")
        # The guard looks at ranks once in a second.
        time.sleep(1.5 * guard.QUIET_SECONDS)
        yield job


def end(job: launchers.Job, *numbers: int) -> str:
    for number in numbers:
        os.kill(job.process.pid, number)
        time.sleep(0.3)
    return job.wait().stdout.splitlines()[-1]


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGHUP, signal.SIGTERM)])
def test_a_launcher_that_hangs_is_killed_after_a_signal(numbers):
    with started(DEAF) as job:
        assert end(job, *numbers) == f"{128 + signal.SIGKILL} True"


def test_what_ranks_have_started_ends_with_a_signal_though_their_launcher_is_stopped():
    with started(LAUNCHER, CHILD.format(beside=HOLDER) + LONG) as job:
        # Beside the guard, which the front has forked first.
        launcher = max(list_children(job.process.pid))
        os.kill(launcher, signal.SIGSTOP)
        assert end(job, signal.SIGTERM) == "15 False"


def test_a_launcher_that_hangs_ends_with_a_front_that_was_killed():
    with started(DEAF) as job:
        began = time.monotonic()
        job.process.kill()
        job.wait()
    assert time.monotonic() - began >= guard.LAUNCHER_SECONDS, "it had no time to end by itself"


def test_a_launcher_ends_with_a_front_and_a_guard_that_were_killed():
    with started(LAUNCHER, "import time; print('ready', flush=True)\n" + LONG) as job:
        os.kill(min(list_children(job.process.pid)), signal.SIGKILL)  # The guard.
        job.process.kill()
        job.wait()
    late = launchers.run_python("-c", "from mpiddp.front.attempt import _end_with; _end_with(0)")
    assert late.returncode == 143, "a launcher whose front has gone before it runs must not start"


LATE = '["sh", "-c", "while kill -0 $PPID; do sleep .1; done; sleep 1; touch late"]'


# What does not hold the launcher's output has a little time.
@pytest.mark.parametrize(
    "beside", [HOLDER, f"{LATE}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"]
)
def test_what_ranks_have_left_behind_does_not_delay_the_end_and_outlives_it_on_purpose(
    beside, tmp_path
):
    child = f"import os; os.chdir({str(tmp_path)!r}){CHILD.format(beside=beside)}"
    with started(LAUNCHER, f"{child}time.sleep(4)\n") as job:
        job.process.wait(launchers.SHORTEST_DEADLINE)
        left = int(job.stdout().split()[1])
        # If nobody waits for it, a signal would still find it when it has ended.
        assert find_start(left) is not None
        os.kill(left, signal.SIGKILL)
        assert job.wait().stdout.splitlines()[-1] == "0 False"
    assert (tmp_path / "late").exists() is ("late" in beside)


def test_ranks_have_their_time_after_a_first_signal_but_not_after_a_second():
    long = 2 * guard.LAUNCHER_SECONDS
    with started(LAUNCHER, SLOW.format(seconds=long)) as job:
        assert end(job, signal.SIGTERM) == "75 False"
    with started(LAUNCHER, SLOW.format(seconds=1000)) as job:
        # The launcher may see its rank's end before its own.
        assert end(job, signal.SIGTERM, signal.SIGTERM) in ("9 True", "137 True")
    assert guard.RANKS_SECONDS > LASTING_SECONDS


def test_an_end_is_known_if_a_parent_ignored_the_end_of_its_children():
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    ignoring += "os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])"
    words = [sys.executable, "-c", ignoring, FRONT, "raise SystemExit(3)"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=launchers.SHORTEST_DEADLINE, check=False
    )
    assert done.stdout == "3 False\n", done.stderr


def test_a_launcher_has_a_small_number_in_a_container():
    watched = guard.Watched(token="", has_ranks=False, kill_step=lambda launcher: None)
    with guard.Guard(watched) as front:
        # Nobody's: the guard of a test that is killed ends all below it.
        front.watch(next(each for each in range(1, 1 << 16) if find_start(each) is None))
        time.sleep(0.5)
        assert find_start(list_children(os.getpid())[-1]) is not None
        assert front.finish(0) is False


FRONT_THAT_GOES = """
import os, subprocess, sys
from mpiddp.front.guard import Guard, Watched
from mpiddp.process import job_directory

directory = job_directory.make("front")
front = Guard(Watched("", has_ranks=False, kill_step=print, directory=str(directory)))
front.watch(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid)
print(directory)
sys.stdout.flush()
os._exit(1)
"""


def test_the_directory_of_a_front_that_has_gone_goes_with_its_launcher(tmp_path):
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    done = launchers.run_python("-c", FRONT_THAT_GOES, env=environment)
    path = Path(done.stdout.strip())
    assert path.parent.parent.parent == tmp_path
    launchers.until(lambda: not path.exists(), "the directory to go", seconds=30)
