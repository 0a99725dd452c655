"""``benchmarks allreduce``: two jobs that live side by side, and how they end."""

from __future__ import annotations

import sys
from dataclasses import replace

import psutil
import pytest

from benchmarks.measure.launching import processes, remote_job
from benchmarks.measure.launching.processes import MARK, Program, RunError
from benchmarks.records.environment import clean_environment

# ---- jobs --------------------------------------------------------------------------------------

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


def test_a_job_answers_and_ends():
    text = GREET + "while (c := line.receive())['do'] != 'end': line.send([c['do'], os.getcwd()])"
    with start_job(text) as job:
        assert job.greeting == "hello"
        assert job.ask({"do": "it"}, "trying") == ["it", str(job.scratch)]
        job.end()


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
    with (
        pytest.raises(RunError, match=r"not ended 0\.3 s after"),
        start_job(GREET + HANGS) as job,
    ):
        job.end()
