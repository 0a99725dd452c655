"""The lock on a directory: who is refused, who waits, and what is said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import launchers
from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.process.directory_lock import DirectoryLock, Holder

VARIABLES = (
    environment.SLURM_JOB_ID,
    environment.SLURM_JOB_NAME,
    environment.SLURM_RESTART_COUNT,
    environment.JOB_DIRECTORY,
    environment.TORCHELASTIC_RESTART_COUNT,
)
SLURM = (environment.SLURM_JOB_ID, environment.SLURM_RESTART_COUNT)
FRONT = (environment.JOB_DIRECTORY, environment.TORCHELASTIC_RESTART_COUNT)

HOLDER = """
import sys
from pathlib import Path
from mpiddp.process.directory_lock import DirectoryLock
lock = DirectoryLock.acquire(Path(sys.argv[1]), "it", "")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def outside_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def acquire(path: Path, **more: object) -> DirectoryLock:
    return DirectoryLock.acquire(path, "name: the run a", "choose another --name", **more)  # type: ignore[arg-type]


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    with launchers.begin(sys.executable, "-c", HOLDER, path) as (process, line):
        assert line == "held"
        yield process


def fail(_: float) -> None:
    raise AssertionError("it waits")


def test_the_file_says_who_holds_it_and_that_it_was_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.SLURM_JOB_ID, "77")
    monkeypatch.setenv(environment.SLURM_JOB_NAME, "sweep")
    monkeypatch.setenv(environment.SLURM_RESTART_COUNT, "2")
    path = tmp_path / "lock"
    lock = acquire(path)
    holder = Holder.from_record(json.loads(path.read_bytes()))
    assert (holder.job, holder.host) == ("sweep-77", os.uname().nodename)
    assert (holder.process, holder.attempt, holder.requeues) == (os.getpid(), 1, 2)
    assert holder.started is not None and not holder.released
    lock.close()
    lock.close()
    assert Holder.from_record(json.loads(path.read_bytes())).released
    assert not lock.is_current()


def test_another_process_is_refused_at_once_until_the_holder_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_elsewhere(path) as process:
        before = path.read_bytes()
        with pytest.raises(ConfigurationError) as caught:
            acquire(path, pause=fail)
        assert str(caught.value) == (
            f"name: the run a is in use by process {process.pid} on {os.uname().nodename}: "
            "choose another --name"
        )
        assert path.read_bytes() == before
        process.kill()
        process.wait()
        lock = acquire(path)
        assert lock.attempt == 2
        lock.close()


def test_this_process_is_refused_while_it_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = acquire(path)
    with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()} on"):
        acquire(path)
    assert lock.is_current()
    # The refusal has not released it: another process is refused as well.
    with pytest.raises(AssertionError), held_elsewhere(path):
        pass
    lock.close()
    again = acquire(path)
    assert again.attempt == 2
    again.abandon()
    third = acquire(path)
    assert third.attempt == 3
    again.close()
    third.close()


def test_a_lock_that_could_not_be_noted_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            DirectoryLock.acquire(tmp_path / "lock", "it", "")
    lock = DirectoryLock.acquire(tmp_path / "lock", "it", "")
    assert lock.attempt == 2
    lock.close()


def test_an_earlier_process_of_the_same_number_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    acquire(path).close()
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "started": record["started"] - 1, "released": False}))
    acquire(path).close()


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = acquire(path)
    child = os.fork()
    if not child:
        try:
            lock.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert not json.loads(path.read_bytes())["released"]
    lock.close()


@pytest.mark.parametrize(
    ("names", "before", "now"),
    [
        (FRONT, ("/jobs/a", "0"), ("/jobs/a", "1")),
        (SLURM, ("77", ""), ("77", "1")),
        # The front of a job that was requeued begins to count anew, and has another directory.
        ((*SLURM, *FRONT), ("77", "1", "/jobs/77", "3"), ("77", "2", "/jobs/77-2", "0")),
    ],
    ids=["restart", "requeue", "both"],
)
def test_a_later_attempt_of_the_job_waits(
    names: tuple[str, ...],
    before: tuple[str, ...],
    now: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "lock"
    launchers.set_variables(monkeypatch, dict(zip(names, before, strict=True)))
    with held_elsewhere(path) as process:
        launchers.set_variables(monkeypatch, dict(zip(names, now, strict=True)))
        pauses = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                process.kill()
                process.wait()

        lock = acquire(path, pause=pause)
        assert len(pauses) == 3 and lock.attempt == 2
        lock.close()
    said = capsys.readouterr().err
    assert said.startswith(f"mpiddp: waiting up to 120 s for the lock of {tmp_path}, held by ")
    assert f"process {process.pid} on " in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("names", "before", "now"),
    [
        (FRONT, ("/jobs/a", "0"), ("/jobs/b", "1")),
        (FRONT, ("/jobs/a", "1"), ("/jobs/a", "1")),
        (FRONT, ("/jobs/a", "1"), ("/jobs/a", "0")),
        (FRONT, ("", "0"), ("", "1")),
        (SLURM, ("77", "1"), ("78", "2")),
        (SLURM, ("77", "1"), ("77", "1")),
        # Two steps of one allocation, each with a front of its own.
        ((*SLURM, *FRONT), ("77", "0", "/jobs/77", "0"), ("77", "0", "/jobs/77-2", "1")),
    ],
)
def test_any_other_is_refused_at_once(
    names: tuple[str, ...],
    before: tuple[str, ...],
    now: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "lock"
    launchers.set_variables(monkeypatch, dict(zip(names, before, strict=True)))
    with held_elsewhere(path):
        launchers.set_variables(monkeypatch, dict(zip(names, now, strict=True)))
        with pytest.raises(ConfigurationError, match="in use by"):
            acquire(path, pause=fail)


def test_the_wait_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    for name, value in zip(FRONT, ("/jobs/a", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with held_elsewhere(path):
        monkeypatch.setenv(environment.TORCHELASTIC_RESTART_COUNT, "1")
        with pytest.raises(ConfigurationError, match=r"in use by process .*: choose another"):
            acquire(path, longest=0.1)


def test_what_is_checked_first_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    acquire(path).close()
    before = path.read_bytes()

    def refuse() -> None:
        raise ConfigurationError("finished")

    with pytest.raises(ConfigurationError, match="finished"):
        acquire(path, check=refuse)
    assert path.read_bytes() == before
    acquire(path).close()
