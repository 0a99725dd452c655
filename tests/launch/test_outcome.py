"""What a run leaves behind to say how it ended."""

from __future__ import annotations

import pytest
from test_failure import shared_failure_handler

from mpiddp.launch.failure.outcome import read_outcome


def test_the_outcome_of_a_run(tmp_path):
    assert read_outcome(tmp_path) is None
    failure_handler = shared_failure_handler()
    failure_handler.run_directory, failure_handler.attempt = tmp_path, 2
    failure_handler.finish()
    assert read_outcome(tmp_path) == {
        "code": 0,
        "reason": "done",
        "rank": 3,
        "host": "node2",
        "step": 17,
        "attempt": 2,
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
    failure_handler._report(failure_handler._compose(KeyError("first")))
    told = capsys.readouterr().err
    assert "outcome.json could not be written" in told and "KeyError: 'first'" in told
