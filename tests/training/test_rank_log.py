"""The log of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.training.run_output import RankLog


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.log"
    for text in ("first", "second"):
        RankLog(path, pytest.fail).write(text)
    assert [line.split(" ", 1)[1] for line in path.read_text().splitlines()] == ["first", "second"]


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    warnings: list[str] = []
    log = RankLog(tmp_path / "logs" / "rank-0.log", warnings.append)
    log.write("first")
    log.write("second")
    assert len(warnings) == 1 and "could not be written" in warnings[0]
