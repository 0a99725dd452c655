"""A job's private directory: whose it is, where it lies, what is left of it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

import launchers
from mpiddp.process import job_directory


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "state" / "mpiddp" / "jobs"


def test_two_processes_never_share_one(state):
    with (
        launchers.hold_directory("7") as (first, made),
        launchers.hold_directory("7") as (_, other),
    ):
        assert (made, other) == (state / "7", state / "7-2")
        assert job_directory.list_running() == [made, other]
        # One that has gone leaves its name, and nothing else, to the next.
        (made / "outcome.json").write_text("{}")
        first.kill()
        first.wait(60)
        assert job_directory.list_running() == [other]
        assert job_directory.make("7") == made
        assert [path.name for path in made.iterdir()] == ["lock"]
    job_directory.remove(made)
    assert not made.exists()


def test_a_directory_that_was_removed_just_now_is_nobodys(state, monkeypatch):
    path, lock = state / "7", fcntl.lockf

    def be_late(*given):
        monkeypatch.undo()
        monkeypatch.setenv("XDG_STATE_HOME", str(state.parents[1]))
        job_directory.remove(path)
        lock(*given)

    monkeypatch.setattr(fcntl, "lockf", be_late)
    assert (made := job_directory.make("7")) == state / "7-2" and made.exists()


def test_where_the_home_cannot_be_used_it_is_temporary(state, tmp_path, monkeypatch):
    # Not even root can make a folder in a file.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", None)
    made = job_directory.make("7")
    assert made == tmp_path / f"mpiddp-{os.getuid()}" / "jobs" / "7"
    assert made.parent.stat().st_mode & 0o777 == 0o700
    # Nor one that others could have planted.
    job_directory.remove(made)
    made.parent.chmod(0o777)
    assert job_directory.make_or_none() is None


def test_where_files_cannot_be_locked_it_is_temporary(state, tmp_path, monkeypatch):
    lock = fcntl.lockf

    def refuse(descriptor, *arguments):
        # As NFS without its lock daemon does.
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(state):
            raise OSError(errno.ENOLCK, "No locks available")
        lock(descriptor, *arguments)

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr("tempfile.tempdir", None)
    made = job_directory.make("7")
    assert made == tmp_path / f"mpiddp-{os.getuid()}" / "jobs" / "7"
    assert job_directory.list_running() == []


def test_what_processes_that_have_gone_left_is_removed(state):
    # No process has such a number.
    host = os.uname().nodename
    left, others = state / f"{host}-{1 << 30}-2", state / f"another-{1 << 30}"
    running = state / f"{host}-{os.getppid()}"
    for path in (left, others, running):
        path.mkdir(parents=True, mode=0o700)
        (path / "outcome.json").write_text("{}")
    job_directory.make("7")
    assert sorted(state.iterdir()) == sorted((others, running, state / "7"))


def test_a_slurm_job_has_its_name(state, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert job_directory.choose_name() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert job_directory.choose_name() == "10_3"
