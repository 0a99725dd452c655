"""The run directory: its name, its lock, what it refuses and what it leaves alone."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from test_metrics import writing_forbidden

import trainings
from mpiddp import environment
from mpiddp.checkpoints.storage.manifest import find_directory
from mpiddp.collectives import tuning
from mpiddp.collectives.tuning import Range, Section
from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.process.directory_lock import DirectoryLock
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.records.run_directory import RunDirectory, find_path, forget_outcome, open_run
from mpiddp.training.shared_run import TUNING, after_error, enter_run, keep_table

PAUSES = 5


def enter(session: Session) -> tuple[str, int]:
    """Enter the run ``a``; returns its path, and how many broadcasts this rank took part in."""
    acquire, broadcast = DirectoryLock.acquire, mock.Mock(wraps=session.broadcast)
    sleep = mock.Mock(wraps=time.sleep)

    def acquire_late(*values: Any, pause: Callable[[float], object], **more: Any) -> DirectoryLock:
        for _ in range(PAUSES):
            pause(0.00123)
        assert sleep.mock_calls.count(mock.call(0.00123)) == PAUSES
        return acquire(*values, pause=pause, **more)

    with contextlib.ExitStack() as stack:
        for where, name, new in (
            (DirectoryLock, "acquire", acquire_late),
            (session, "broadcast", broadcast),
            (time, "sleep", sleep),
        ):
            stack.enter_context(mock.patch.object(where, name, new))
        handler = find_failure_handler(session)
        run = enter_run(parse(["--name", "a"]).resolve(), session, handler)
    handler.entered_runs.discard(run.state.directory)
    if run.opened is not None:
        run.opened.close()
    return str(run.state.directory), broadcast.call_count


JOB = (
    environment.SLURM_JOB_ID, environment.SLURM_JOB_NAME, environment.SLURM_ARRAY_JOB_ID,
    environment.SLURM_ARRAY_TASK_ID,
)  # fmt: skip


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in JOB:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return Configuration(name="first", runs_dir=tmp_path / "runs").resolve()


def take(configuration: Configuration) -> RunDirectory:
    """An attempt at the run, which has ended."""
    run = open_run(configuration)
    run.close()
    return run


def snapshot(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_the_directory_of_checkpoints_is_found_from_anywhere(configuration, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = take(replace(configuration, checkpoint_dir=Path("elsewhere")))
    monkeypatch.chdir("/")
    assert find_directory(run.path) == tmp_path / "elsewhere"


HOLDER = """
import sys
from pathlib import Path
from mpiddp.training.options.config import Configuration
from mpiddp.training.records.run_directory import open_run
run = open_run(Configuration(name="first", runs_dir=Path(sys.argv[1])))
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_job(runs: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run ``first``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(runs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_new_run_holds_its_configuration(configuration: Configuration) -> None:
    run = take(configuration)
    assert run.path == configuration.runs_dir / "first"
    assert run.attempt == 1
    assert parse(["--config", str(run.path / "config.toml")]) == configuration
    assert (run.path / "logs").is_dir()
    assert sorted(path.name for path in run.path.iterdir()) == ["config.toml", "lock", "logs"]


def test_without_a_name_it_is_a_time_stamp_of_its_own(tmp_path: Path) -> None:
    runs = [open_run(Configuration(runs_dir=tmp_path)) for _ in range(3)]
    names = {run.path.name for run in runs}
    assert len(names) == 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d+)?", name) for name in names)
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (("7", "sweep"), "sweep-7"),
        (("9", "sweep", "7", "2"), "sweep-7_2"),
        (("7", "a/b\nc"), "a-b-c-7"),
        (("7", "x" * 300), "x" * 197 + "-7"),
        # File systems count bytes. A character of three that does not fit leaves them unused.
        (("7", "x" + "é" * 200), "é" * 98 + "-7"),
    ],
)
def test_within_slurm_it_is_the_job(variables, name, tmp_path, monkeypatch):
    for variable, value in zip(JOB, variables, strict=False):
        monkeypatch.setenv(variable, value)
    for attempt in (1, 2):
        # A job that Slurm requeues finds its own directory again.
        run = take(Configuration(runs_dir=tmp_path))
        assert (run.path.name, run.attempt) == (name, attempt)


def test_a_run_in_use_is_refused_and_left_alone(configuration, monkeypatch):
    monkeypatch.setenv(environment.SLURM_JOB_ID, "77")
    monkeypatch.setenv(environment.SLURM_JOB_NAME, "sweep")
    with another_job(configuration.runs_dir) as process:
        before = snapshot(configuration.runs_dir)
        with pytest.raises(ConfigurationError) as caught:
            open_run(configuration)
        assert f"in use by job sweep-77, process {process.pid} on " in str(caught.value)
        assert "--name" in str(caught.value)
        assert snapshot(configuration.runs_dir) == before


def write_outcome(configuration: Configuration, code: int) -> Path:
    path = take(configuration).path / "outcome.json"
    path.write_text(json.dumps({"code": code}))
    return path


def test_a_finished_run_is_refused_and_left_alone(configuration: Configuration) -> None:
    outcome = write_outcome(configuration, 0)
    before = snapshot(configuration.runs_dir)
    # An evaluation has nothing to train on from.
    with pytest.raises(ConfigurationError, match=r"has finished .* choose another --name$"):
        open_run(configuration)
    assert snapshot(configuration.runs_dir) == before
    outcome.with_name("metrics.jsonl").touch()
    more = f"; to train on from it: --resume {outcome.parent}, with another --name"
    with pytest.raises(ConfigurationError, match=re.escape(more)):
        open_run(configuration)


@pytest.mark.parametrize("code", [1, 6, 75])
def test_a_run_that_did_not_finish_is_taken_over(configuration: Configuration, code: int) -> None:
    outcome = write_outcome(configuration, code)
    metrics = outcome.with_name("metrics.jsonl")
    metrics.write_text('{"epoch": 1}\n')
    run = take(configuration)
    assert run.attempt == 2
    assert not outcome.exists()
    assert metrics.read_text() == '{"epoch": 1}\n'


def test_a_run_that_was_taken_over_is_not_current(configuration: Configuration) -> None:
    run = open_run(configuration)
    assert run.is_current()
    # The lock goes with any descriptor of the file, as that of a node that was cut off may.
    os.close(os.open(run.path / "lock", os.O_RDWR))
    with another_job(configuration.runs_dir):
        assert not run.is_current()
    run.close()
    assert json.loads((run.path / "lock").read_text())["attempt"] == 2


def test_this_process_opens_a_run_again_only_after_an_error(configuration: Configuration) -> None:
    run = open_run(configuration)
    with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()} on "):
        open_run(configuration)
    with pytest.raises(ZeroDivisionError), after_error(run.abandon):
        raise ZeroDivisionError
    assert take(configuration).attempt == 2


@pytest.mark.parametrize("content", ["[]", '{"attempt": "x"}'])
def test_a_lock_of_another_content_does_no_harm(configuration: Configuration, content: str) -> None:
    path = configuration.runs_dir / "first"
    path.mkdir(parents=True)
    (path / "lock").write_text(content)
    assert take(configuration).attempt == 1


def test_a_write_that_fails_leaves_what_stood_there(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_whole(path, "öld")
    with writing_forbidden(), pytest.raises(OSError, match="File too large"):
        write_whole(path, "new")
    assert path.read_bytes() == "öld".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_half_written_is_left(configuration, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        open_run(configuration)
    assert not (configuration.runs_dir / "first").exists()


def test_the_outcome_of_a_run_in_use_or_finished_stays(configuration: Configuration) -> None:
    for each in (configuration, replace(configuration, name=None)):
        assert forget_outcome(each) is None and not configuration.runs_dir.exists()
    outcome = write_outcome(configuration, 1)
    assert forget_outcome(configuration) == outcome.parent and not outcome.exists()
    with another_job(configuration.runs_dir):
        outcome.write_text('{"code": 1}')
        assert forget_outcome(configuration) is None
        assert outcome.exists()
    write_outcome(configuration, 0)
    assert forget_outcome(configuration) is None
    assert outcome.exists()


def test_where_a_run_will_be_is_known_before(configuration, monkeypatch):
    assert find_path(configuration) == open_run(configuration).path
    unnamed = replace(configuration, name=None)
    assert find_path(unnamed) is None
    monkeypatch.setenv(environment.SLURM_JOB_ID, "7")
    monkeypatch.setenv(environment.SLURM_JOB_NAME, "a/b")
    assert find_path(unnamed) == open_run(unnamed).path


def test_no_rank_times_out_while_rank_0_waits_for_the_lock(pool) -> None:
    # Each broadcast has the session's timeout for itself.
    assert pool("openmpi", 2).call(enter).values == [("runs/a", PAUSES + 1)] * 2


def write_table(path: Path, most: int) -> Path:
    section = Section("all-reduce", (2,), "float32", "cpu", (Range(8, most, "ring"),))
    tuning.write_table(path, {}, [section])
    return path


def test_a_run_has_a_copy_of_its_tuning_table_and_hears_of_another(tmp_path, monkeypatch) -> None:
    kept = tmp_path / TUNING
    monkeypatch.delenv("MPIDDP_TUNING", raising=False)
    assert keep_table(tmp_path) == "" and not kept.exists()
    first, other = (write_table(tmp_path / f"{most}.json", most) for most in (99, 100))
    monkeypatch.setenv("MPIDDP_TUNING", str(first))
    assert keep_table(tmp_path).startswith(f"Another tuning table than before: {first} (SHA")
    assert kept.read_bytes() == first.read_bytes()
    assert keep_table(tmp_path) == ""
    monkeypatch.setenv("MPIDDP_TUNING", str(kept))
    assert keep_table(tmp_path) == ""
    monkeypatch.setenv("MPIDDP_TUNING", str(other))
    kept.write_bytes(b"\xff damaged")
    assert "Another tuning table" in keep_table(tmp_path)
    monkeypatch.setenv("MPIDDP_TUNING", "")
    assert keep_table(tmp_path) == f"No tuning table, but an earlier attempt had one: {kept}"
    assert kept.read_bytes() == other.read_bytes()
    other.write_text(other.read_text()[:50])
    monkeypatch.setenv("MPIDDP_TUNING", str(other))
    with pytest.raises(ConfigurationError, match=r"100.json: expected JSON: .*; make one with"):
        keep_table(tmp_path)
    kept.unlink()
    kept.mkdir()
    with pytest.raises(ConfigurationError, match=r"runs_dir: cannot read .*tuning.json: Is a dir"):
        keep_table(tmp_path)


def test_only_a_resumed_run_says_that_its_tuning_table_is_another(pool, tmp_path) -> None:
    words = ["--data", "synthetic", "--samples", "32", "--batch-size", "8"]
    begun = [*words, "--name", "begun", "--epochs", "1"]
    resumed = [*words, "--name", "resumed", "--epochs", "2"]
    resumed += ["--resume", "runs/begun/checkpoints/step-2"]
    for most, given in ((99, begun), (100, resumed)):
        env = {"MPIDDP_TUNING": str(write_table(tmp_path / f"{most}.json", most))}
        result = pool("openmpi", 2).call(trainings.run, given, cwd=tmp_path, env=env)
        counts = [each.count("Another tuning table") for each in result.stdout]
        assert counts == ([1, 0] if given == resumed else [0, 0])
    for name, most in (("begun", 99), ("resumed", 100)):
        assert f'"most": {most}' in (tmp_path / "runs" / name / TUNING).read_text()
