"""What a run leaves behind to say how it ended."""

from __future__ import annotations

import pytest

from failures import shared_failure_handler
from mpiddp.errors import PeerLostError
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.process import job_directory
from mpiddp.process.outcome import Outcome, read_outcome, write_outcome


def test_the_outcome_of_a_run(tmp_path):
    assert read_outcome(tmp_path) is None
    failure_handler = shared_failure_handler()
    failure_handler.run_directory = tmp_path
    failure_handler.run = FixedProgress(attempt=2, step=17)
    failure_handler.finish()
    assert read_outcome(tmp_path) == {
        "code": 0,
        "reason": "done",
        "rank": 3,
        "host": "node2",
        "step": 17,
        "attempt": 2,
        "lost_rank": None,
        "lost_host": None,
        "node_fault": None,
        "path": None,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    for text in ("", "{", "[1]", '"x"'):
        (tmp_path / "outcome.json").write_text(text)
        assert read_outcome(tmp_path) is None


def test_a_run_that_cannot_say_it_is_done_is_not_done(tmp_path, capsys):
    failure_handler = shared_failure_handler()
    failure_handler.run_directory = tmp_path
    # Not even root can put a file in the place of a folder.
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(OSError, match=r"outcome\.json"):
        failure_handler.finish()
    # A failure is told all the same, and why nothing was written.
    failure_handler.report(failure_handler.compose_report(KeyError("first")))
    told = capsys.readouterr().err
    assert "outcome.json could not be written" in told and "KeyError: 'first'" in told


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The directory of a running job, to whose first attempt this process belongs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = job_directory.make("7")
    job_directory.begin_attempt(path, "first")
    monkeypatch.setenv("MPIDDP_JOB_DIRECTORY", str(path))
    monkeypatch.setenv("MPIDDP_ATTEMPT_TOKEN", "first")
    yield path
    job_directory.remove(path)


@pytest.mark.parametrize("has_run", [True, False])
def test_the_front_finds_the_outcome_in_the_jobs_directory(job, tmp_path, has_run):
    failure_handler = shared_failure_handler()
    run = tmp_path / "run"
    run.mkdir()
    failure_handler.run_directory = run if has_run else None
    failure_handler.report(failure_handler.compose_report(KeyError("first")))
    outcome = read_outcome(job)
    assert outcome is not None
    assert outcome["path"] == (str(run / "outcome.json") if has_run else None)
    assert outcome["code"] == 1 and "KeyError" in outcome["reason"]
    assert read_outcome(run) == ({**outcome, "path": None} if has_run else None)


@pytest.mark.parametrize(("ends_with_run", "code"), [(False, 1), (True, 0)])
def test_a_script_that_fails_after_its_run_has_failed(job, tmp_path, ends_with_run, code):
    failure_handler = shared_failure_handler(ends_with_run=ends_with_run)
    failure_handler.run_directory = tmp_path / "run"
    failure_handler.run_directory.mkdir()
    failure_handler.finish()
    failure_handler.report(failure_handler.compose_report(KeyError("later")))
    assert (read_outcome(job) or {})["code"] == code
    assert (read_outcome(failure_handler.run_directory) or {})["code"] == 0


def test_rank_0_knows_better_than_one_that_is_cut_off(job):
    def write(rank: int, reason: str) -> None:
        write_outcome(None, Outcome(6, reason, rank, f"node{rank}", None, 1))

    write(2, "rank 0 was lost")
    write(1, "rank 2 was lost")
    assert (read_outcome(job) or {})["rank"] == 2
    write(0, "rank 2 was lost")
    write(2, "rank 1 was lost")
    assert (read_outcome(job) or {})["rank"] == 0


def test_a_rank_of_an_attempt_that_was_replaced_writes_nothing(job, tmp_path):
    failure_handler = shared_failure_handler()
    failure_handler.run_directory = tmp_path
    job_directory.check_attempt()
    job_directory.begin_attempt(job, "second")
    failure_handler.report(failure_handler.compose_report(KeyError("first")))
    assert read_outcome(job) is None and read_outcome(tmp_path) is None
    assert not (tmp_path / "logs").exists()
    with pytest.raises(PeerLostError, match="restarted without this rank"):
        failure_handler.finish()
    with pytest.raises(PeerLostError, match="restarted without this rank"):
        job_directory.check_attempt()


def test_nobody_else_can_read_a_jobs_directory(job, monkeypatch):
    assert job.stat().st_mode & 0o777 == 0o700
    assert job_directory.find() == job
    job.chmod(0o770)
    assert job_directory.find() is None
