"""The lock on a run directory: refusals, waits and messages; and the directory of each job."""

import contextlib
import errno
import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

import launchers
from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.process import job_directory
from mpiddp.process.directory_lock import DirectoryLock, Holder
from mpiddp.process.publication import Publication, publish, read_address

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


@pytest.fixture
def path(tmp_path, monkeypatch):
    """For a lock, outside jobs."""
    for variable in (*SLURM, *FRONT, environment.SLURM_JOB_NAME):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "lock"


def acquire(path, **more):
    return DirectoryLock.acquire(path, "name: the run a", "choose another --name", **more)


@contextlib.contextmanager
def held_elsewhere(path):
    with launchers.begin(sys.executable, "-c", HOLDER, path) as (process, line):
        assert line == "held"
        yield process


def test_the_file_says_who_holds_it_and_that_it_was_released(path, monkeypatch):
    for name, value in zip((*SLURM, environment.SLURM_JOB_NAME), ("77", "2", "sweep"), strict=True):
        monkeypatch.setenv(name, value)
    lock = acquire(path)
    holder = Holder.from_record(json.loads(path.read_bytes()))
    assert (holder.job, holder.host) == ("sweep-77", os.uname().nodename)
    assert (holder.process, holder.attempt, holder.requeues) == (os.getpid(), 1, 2)
    assert holder.started is not None and not holder.released
    lock.close()
    lock.close()
    record = json.loads(path.read_bytes())
    assert record["released"] and not lock.is_current()
    # An earlier process of the same number is another one.
    path.write_text(json.dumps({**record, "started": record["started"] - 1, "released": False}))
    acquire(path).close()


def test_another_process_is_refused_at_once_until_the_holder_ends(path):
    with held_elsewhere(path) as process:
        before = path.read_bytes()
        with pytest.raises(ConfigurationError) as caught:
            acquire(path, pause=pytest.fail)
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


def test_this_process_is_refused_while_it_holds_the_lock(path):
    lock = acquire(path)
    with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()} on"):
        acquire(path)
    assert lock.is_current()
    # The refusal has not released it: another process is refused as well.
    with pytest.raises(AssertionError), held_elsewhere(path):
        pass
    lock.close()
    again = acquire(path)
    again.abandon()
    third = acquire(path)
    assert (again.attempt, third.attempt) == (2, 3)
    again.close()
    third.close()


def test_a_lock_that_could_not_be_noted_is_not_held(path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            acquire(path)
    lock = acquire(path)
    assert lock.attempt == 2
    lock.close()


def test_a_forked_child_does_not_release_its_parents_lock(path):
    lock = acquire(path)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not json.loads(path.read_bytes())["released"]
    lock.close()


@pytest.mark.parametrize(
    ("names", "before", "now", "follows"),
    [
        (FRONT, ("/jobs/a", "0"), ("/jobs/a", "1"), True),
        (SLURM, ("77", ""), ("77", "1"), True),
        # The front of a job that was requeued begins to count anew, and has another directory.
        ((*SLURM, *FRONT), ("77", "1", "/jobs/77", "3"), ("77", "2", "/jobs/77-2", "0"), True),
        (FRONT, ("/jobs/a", "0"), ("/jobs/b", "1"), False),
        (FRONT, ("/jobs/a", "1"), ("/jobs/a", "0"), False),
        (FRONT, ("/jobs/a", "1"), ("/jobs/a", "1"), False),
        (FRONT, ("", "0"), ("", "1"), False),
        (SLURM, ("77", "1"), ("78", "2"), False),
        (SLURM, ("77", "2"), ("77", "1"), False),
        (SLURM, ("77", "1"), ("77", "1"), False),
        # Two steps of one allocation, each with a front of its own.
        ((*SLURM, *FRONT), ("77", "0", "/jobs/77", "0"), ("77", "0", "/jobs/77-2", "1"), False),
    ],
)
def test_which_is_a_later_attempt_of_a_job(names, before, now, follows, path, monkeypatch):
    holders = []
    for values in (before, now):
        launchers.set_variables(monkeypatch, dict(zip(names, values, strict=True)))
        holders.append(Holder.of_this_process())
    assert holders[1].follows(holders[0]) is follows


def test_a_later_attempt_of_the_job_waits(path, monkeypatch, capsys):
    monkeypatch.setenv(environment.JOB_DIRECTORY, "/jobs/a")
    with held_elsewhere(path) as process:
        monkeypatch.setenv(environment.TORCHELASTIC_RESTART_COUNT, "1")
        with pytest.raises(ConfigurationError, match=r"in use by process .*: choose another"):
            acquire(path, longest=0.1)
        said = capsys.readouterr().err
        assert said.startswith(
            f"mpiddp: waiting up to 0.1 s for the lock of {path.parent}, held by "
        )
        assert f"process {process.pid} on " in said and said.count("\n") == 1
        pauses = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                process.kill()
                process.wait()

        lock = acquire(path, pause=pause)
        assert len(pauses) == 3 and lock.attempt == 2
        lock.close()


def test_what_is_checked_first_leaves_the_file_alone(path):
    acquire(path).close()
    before = path.read_bytes()

    def refuse() -> None:
        raise ConfigurationError("finished")

    with pytest.raises(ConfigurationError, match="finished"):
        acquire(path, check=refuse)
    assert path.read_bytes() == before
    acquire(path).close()


# A job's private directory: whose it is, where it lies, what is left of it


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "state" / "mpiddp" / "jobs"


def test_two_processes_never_share_one(state):
    with (
        launchers.hold_directory("7") as (first, made),
        launchers.hold_directory("7") as (_, other),
    ):
        assert (made, other) == (state / "7", state / "7-2")
        # Of a front that was killed, whose name another job has now.
        job_directory.remove_abandoned(other)
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


@pytest.mark.parametrize("problem", ["home", "locks"])
def test_where_the_home_cannot_be_used_or_locked_it_is_temporary(
    problem, state, tmp_path, monkeypatch
):
    lock = fcntl.lockf

    def refuse(descriptor, *arguments):
        # As NFS without its lock daemon does.
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(state):
            raise OSError(errno.ENOLCK, "No locks available")
        lock(descriptor, *arguments)

    if problem == "home":
        # Not even root can make a folder in a file.
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(fcntl, "lockf", refuse)
    made = job_directory.make("7")
    assert made == tmp_path / f"mpiddp-{os.getuid()}" / "jobs" / "7"
    assert {each.stat().st_mode & 0o777 for each in (made, *made.parents[:2])} == {0o700}
    with launchers.hold_directory("8") as (_, held):
        assert job_directory.list_running() == ([held] if problem == "home" else [])
    # Nor one that others could have planted.
    job_directory.remove(made)
    made.parent.chmod(0o777)
    assert job_directory.make_or_none() is None
    # Nor one that another user owns.
    monkeypatch.setattr(os, "getuid", lambda: 1 << 22)
    assert job_directory.make_or_none() is None


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


def test_an_attempt_finds_nothing_of_the_one_before(state, monkeypatch):
    made = job_directory.make("7")
    (made / "outcome.json").write_text("{}")
    job_directory.begin_attempt(made, "second")
    assert {path.name for path in made.iterdir()} == {job_directory.LOCK, job_directory.ATTEMPT}
    # None is made where all exists and this user may not write.
    monkeypatch.setattr(os, "access", lambda _, mode: mode == os.F_OK)
    assert job_directory.make_or_none() is None


def test_an_address_is_for_this_user_alone_until_its_own_job_withdraws_it(state, tmp_path):
    beside_logs, job = tmp_path / "lifeline.json", Publication("host:1", "first")
    for is_replaced in (False, True):
        job.publish(tmp_path)
        # Without a front the job makes a directory for itself.
        (own,) = state.iterdir()
        for found in (beside_logs, own / "lifeline.json"):
            assert found.stat().st_mode & 0o777 == 0o600
            assert read_address(found) == ("host:1", "first")
        if is_replaced:
            publish(tmp_path, "host:2", "second")
        job.withdraw()
        assert not own.exists() and beside_logs.exists() is is_replaced
    assert read_address(beside_logs) == ("host:2", "second")
    for text in ("[]", "{}", '{"address": "host:1", "token": 1}'):
        beside_logs.write_text(text)
        with pytest.raises(ValueError, match="holds no address"):
            read_address(beside_logs)


def test_a_slurm_job_has_its_name(state, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert job_directory.choose_name() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert job_directory.choose_name() == "10_3"
