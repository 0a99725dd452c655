"""Programs and jobs that benchmarks run: how long they take, how they end, what they leave."""

import json
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchers
from benchmarks.measure.launching import processes, remote_job
from benchmarks.measure.launching.processes import MARK, STAMP, Program, RunError
from benchmarks.records.environment import clean_environment
from launchers import until


def _python(text: str, *arguments: str, **more: Any) -> Program:
    return Program((sys.executable, "-c", text, *arguments), dict(os.environ), **more)


def test_a_run_is_timed_with_its_children_and_a_stamp_is_relative_to_the_beginning():
    burn = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    text = (
        f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {burn!r}])\n"
        "open(sys.argv[1], 'w').write(str(time.monotonic())); time.sleep(0.1)"
    )
    run = processes.run(_python(text, STAMP), 60)
    assert run.cpu_seconds >= 0.2
    assert 0.2 <= run.stamp_seconds <= run.seconds - 0.1


def test_copies_run_at_once(tmp_path):
    meet = (
        "import os, pathlib, sys, time; folder = pathlib.Path(sys.argv[1])\n"
        "(folder / str(os.getpid())).touch()\n"
        "while len(list(folder.iterdir())) < 3: time.sleep(0.01)"
    )
    processes.run(_python(meet, str(tmp_path), copies=3), 60)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failed_run_shows_its_output():
    with pytest.raises(RunError, match=r"(?s)-c.*ended with exit code 7:.*it broke") as caught:
        processes.run(_python("import sys; print('it broke', file=sys.stderr); sys.exit(7)"), 60)
    assert caught.value.exit_code == 1
    with pytest.raises(RunError, match="/no/such/program cannot be started: No such file"):
        processes.run(Program(("/no/such/program",), {}), 60)


def expire_with(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """The time of a run is up once its process has written ``file``, however long that takes."""

    class Timer(threading.Timer):
        def __init__(self, _, act):
            super().__init__(0, act)

        def run(self):
            until(lambda: file.exists() and file.stat().st_size, "the process")
            super().run()

    monkeypatch.setattr(threading, "Timer", Timer)


DETACHED = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'],"
    " start_new_session=True)\n"
    "open(sys.argv[1], 'w').write(f'{child.pid} {os.environ[\"TMPDIR\"]}')\n"
)


def test_a_process_that_cannot_be_killed_is_an_error(monkeypatch):
    class Unkillable:
        pid = 4321

        def kill(self) -> None:
            raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(processes, "find_marked", lambda mark: [Unkillable()])
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.05)
    with pytest.raises(RunError, match=r"killed 0\.05 s ago and still there: process 4321"):
        processes.kill_marked("mark")


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_leaves_neither_detached_processes_nor_files(tmp_path, ends, monkeypatch):
    note = tmp_path / "note"
    program = _python(DETACHED + ("" if ends else "time.sleep(300)"), str(note))
    if ends:
        processes.run(program, 60)
    else:
        expire_with(monkeypatch, note)
        with pytest.raises(RunError, match="ran past 2 s"):
            processes.run(program, 2)
    pid, folder = note.read_text().split()
    assert not Path(folder).exists()
    launchers.until(lambda: not launchers.is_alive(int(pid)), "the end of what was killed")


reach_out = partial(_python, reaches_out=True)
"""Runs on other machines, played by this one."""


def test_what_a_run_prints_is_read():
    begin = time.time()
    report = {"finished": begin + 1000, "seconds": {"address": 0.5}}
    printed = f"mpiddp-benchmark: {json.dumps(report)}"
    text = f"import sys; sys.stderr.write('noise '); print({printed!r})"
    run = processes.run(reach_out(text + "; print('more')"), 60)
    assert begin + 1000 - time.time() < run.stamp_seconds <= 1000
    assert run.phases == {"address": 0.5}
    assert run.cpu_seconds is run.others_cpu_seconds is None


def test_directories_of_this_machine_are_not_handed_on(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/of-the-user")
    text = "import os; assert (os.getcwd(), os.environ['TMPDIR']) == ('/', '/of-the-user')"
    run = processes.run(reach_out(text), 60)
    assert run.stamp_seconds is None and run.seconds > 0


@pytest.mark.parametrize("listens", [True, False])
def test_a_launcher_is_asked_to_end_its_job_before_it_is_killed(tmp_path, listens, monkeypatch):
    """And killed if it does not listen."""
    monkeypatch.setattr(processes, "REQUEST_SECONDS", 60.0 if listens else 0.3)
    expire_with(monkeypatch, tmp_path / "ready")
    text = (
        "import pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def end(*_): (folder / 'asked').touch(); sys.exit(1)\n"
        f"signal.signal(signal.SIGTERM, {'end' if listens else 'signal.SIG_IGN'})\n"
        "(folder / 'ready').write_text('ready')\n"
        "time.sleep(300)"
    )
    begin = time.monotonic()
    with pytest.raises(RunError, match="ran past 1 s"):
        processes.run(reach_out(text, str(tmp_path)), 1)
    assert (tmp_path / "asked").exists() is listens
    assert time.monotonic() - begin < 200


GREET = (
    "import os, sys\n"
    "from benchmarks.measure.launching.json_lines import connect\n"
    f"line = connect(sys.argv[-1].split(','), os.environ['{MARK}'], 'hello', 10)\n"
)
HANGS = "import time; time.sleep(300)"


def make_program(text: str) -> Program:
    return Program((sys.executable, "-c", text), clean_environment())


def start_job(text: str, deadline: float = 60):
    return remote_job.start(make_program(text), deadline)


def find_children() -> set[psutil.Process]:
    """Processes below this one, zombies left out. Their own come and go, as a browser's do."""
    children = psutil.Process().children()
    return {child for child in children if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test leaves no process that was not there before it."""
    before = find_children()
    yield
    assert find_children() <= before


def test_what_other_programs_take_is_told_apart(monkeypatch):
    # Between two looks at the clock a busy machine's goes on.
    monkeypatch.setattr(remote_job, "count_machine_seconds", lambda: 0.0)
    burn = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"
    text = GREET + "while line.receive()['do'] != 'end':\n    exec(sys.argv[1]); line.send([])"
    program = make_program(text)
    own = Program((*program.command, burn), program.environment)
    with remote_job.start(own, 60) as job:
        before = remote_job.count_others_seconds([job]), remote_job.count_others_seconds([])
        job.ask({"do": "burn"}, "burning")
        after = remote_job.count_others_seconds([job]), remote_job.count_others_seconds([])
        job.end()
    others, everybody = (late - early for early, late in zip(before, after, strict=True))
    assert 0.4 < everybody - others < 0.6


@pytest.mark.parametrize(
    ("text", "deadline", "message"),
    [
        (GREET + "line.receive(); print('it broke'); sys.exit(7)", 60, "code 7 .trying.:.*broke"),
        (GREET + "line.receive(); " + HANGS, 2, "no answer for 2 s .trying."),
        ("print('it broke'); raise SystemExit(7)", 60, "ended with exit code 7:.*it broke"),
        (GREET + "line.receive(); line.send([]); sys.exit(7)", 60, "ended with exit code 7"),
    ],
)
def test_a_job_that_dies_or_hangs_is_an_error_with_its_output(text, deadline, message):
    def use_job():
        with start_job(text) as job:
            replace(job, deadline=deadline).ask({"do": "it"}, "trying")
            job.end()

    with pytest.raises(RunError, match=f"(?s){message}"):
        use_job()


def test_a_job_that_is_not_ready_in_time_or_not_there_is_an_error():
    with pytest.raises(RunError, match="not ready within 1 s"), start_job(HANGS, 1):
        pass
    nothing = Program(("/no/such/program",), {})
    expected = pytest.raises(RunError, match="/no/such/program cannot be started")
    with expected, remote_job.start(nothing, 1):
        pass


def test_a_job_leaves_no_detached_process():
    text = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        "subprocess.Popen(sleep, start_new_session=True)\n"
    )
    with start_job(text + GREET + "line.receive()") as job:
        assert len(processes.find_marked(job.mark)) == 2
        job.end()
        assert len(processes.find_marked(job.mark)) == 1
    assert processes.find_marked(job.mark) == []


def test_a_job_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(remote_job, "END_SECONDS", 0.3)
    with pytest.raises(RunError, match=r"not ended 0\.3 s after"), start_job(GREET + HANGS) as job:
        job.end()
