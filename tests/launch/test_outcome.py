"""What a run leaves behind to say how it ended."""

from __future__ import annotations

import pytest
from test_failure import shared_way_out

from mpiddp.launch.failure.outcome import read_outcome


def test_the_outcome_of_a_run(tmp_path):
    assert read_outcome(tmp_path) is None
    way_out = shared_way_out()
    way_out.run_directory, way_out.attempt = tmp_path, 2
    way_out.finish()
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
    way_out = shared_way_out()
    way_out.run_directory = tmp_path
    # Not even root can put a file in the place of a folder.
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(OSError, match=r"outcome\.json"):
        way_out.finish()
    # A failure is told all the same, and why nothing was written.
    way_out._report(way_out._compose(KeyError("first")))
    told = capsys.readouterr().err
    assert "outcome.json could not be written" in told and "KeyError: 'first'" in told
