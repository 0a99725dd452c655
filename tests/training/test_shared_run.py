"""A run that all ranks enter together."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainings
import waiting_for_a_run
from mpiddp.collectives import tuning
from mpiddp.collectives.tuning import Range, Section
from mpiddp.errors import ConfigurationError
from mpiddp.training.shared_run import TUNING, keep_table


def test_no_rank_times_out_while_rank_0_waits_for_the_lock(pool) -> None:
    # Each broadcast has the session's timeout for itself.
    path = str(Path("runs", "a"))
    result = pool("openmpi", 2).call(waiting_for_a_run.enter)
    assert result.values == [(path, waiting_for_a_run.PAUSES + 1)] * 2


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


@pytest.mark.mpi
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
