"""Whatever ends the front, and whatever a launcher catches: what was started ends as well."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import launchers
from mpiddp.front import guard
from mpiddp.process.background import LASTING_SECONDS
from mpiddp.process.descendants import list_children
from mpiddp.process.rank_process import find_start

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
child = subprocess.Popen(["sleep", "1000"]{options})
print("ready", child.pid, flush=True)
"""
DETACHED = ", start_new_session=True, stdout=subprocess.DEVNULL"
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


def test_a_launcher_that_is_stopped_hears_of_a_signal():
    with started(LAUNCHER, CHILD.format(options="") + LONG) as job:
        # Beside the guard, which the front has forked first.
        launcher = max(list_children(job.process.pid))
        os.kill(launcher, signal.SIGSTOP)
        assert end(job, signal.SIGTERM) == "15 False"


def test_a_launcher_that_hangs_ends_with_a_front_that_was_killed():
    with started(DEAF) as job:
        job.process.kill()
        job.wait()


def test_a_launcher_ends_with_a_front_and_a_guard_that_were_killed():
    with started(LAUNCHER, "import time; print('ready', flush=True)\n" + LONG) as job:
        os.kill(min(list_children(job.process.pid)), signal.SIGKILL)  # The guard.
        job.process.kill()
        job.wait()


@pytest.mark.parametrize("options", ["", DETACHED])
def test_what_ranks_have_started_ends_with_a_signal(options):
    with started(LAUNCHER, CHILD.format(options=options) + LONG) as job:
        assert end(job, signal.SIGTERM) == "15 False"


@pytest.mark.parametrize("options", ["", DETACHED])
def test_what_ranks_have_left_behind_does_not_delay_the_end_and_outlives_it_on_purpose(options):
    with started(LAUNCHER, CHILD.format(options=options) + "time.sleep(4)\n") as job:
        if options:
            job.process.wait(launchers.SHORTEST_DEADLINE)
            os.kill(int(job.stdout().split()[1]), signal.SIGKILL)  # Raises, if it has gone.
        assert job.wait().stdout.splitlines()[-1] == "0 False"


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
    front = guard.Guard(watched)
    front.watch(1)  # It is not signalled: nobody asks for an end.
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
