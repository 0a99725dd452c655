"""``benchmarks checkpoint``: what its job reports, and what is made of that."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import documents
from benchmarks.measure.checkpoint import contenders, worker
from benchmarks.measure.checkpoint.worker import name_costs
from benchmarks.measure.engine import CellGroup, run
from benchmarks.records.schema import read_record
from measured import MPIRUN
from mpiddp.checkpoints.storage.rank_group import RankGroup

PLAN = contenders.QUANTITY.parse([]).plan
ROUNDS = (
    name_costs(2.0, 3.0, 0.5, 4.5, 2.0, 1.0, beside_steps=2),
    name_costs(2.0, 2.0, 0.5, 6.5, 2.0, 1.0, beside_steps=3),
    name_costs(4.0, 4.0, 0.5, 3.0, 2.0, 1.0, beside_steps=1),
)
FACTS = {
    "device": "cpu", "state_bytes": 100 << 20, "copies_bytes": 200 << 20, "grown_bytes": 210 << 20,
    "file_bytes": 101 << 20, "agreement": {"look": 0.01, "thread": 0.02},
}  # fmt: skip


def list_series(rounds=ROUNDS) -> dict[str, list[float]]:
    return {name: [each[name] for each in rounds] for name in rounds[0]}


def make(plan=PLAN, rounds=ROUNDS, **facts) -> CellGroup:
    return contenders.make_group(plan, 2, list_series(rounds), FACTS | facts)


def test_costs_are_shares_of_the_steps_between_two_checkpoints():
    assert [each["slowdown"] for each in ROUNDS] == [0.5, 0.5, -1.0]
    assert [each["asynchronous"] for each in ROUNDS] == [1.0, 1.0, -0.5]
    found = make()
    assert contenders.find_share(found, "synchronous") == 3 / (50 * 2)
    rare = make(replace(PLAN, save_every=100))
    assert contenders.find_share(rare, "asynchronous") == 1 / (100 * 2)
    assert contenders.compare_with_raw(found).estimate == 1.5
    assert contenders.find_agreement_share(found) == 0.01 / 2 + 0.02


def test_targets():
    assert [each.met for each in contenders.judge([make()], PLAN)] == [True, True, None, False]
    often = replace(PLAN, save_every=40)
    assert [each.met for each in contenders.judge([make(often)], often)][:2] == [False, False]
    for each, met in zip(ROUNDS[1:], (True, False), strict=True):
        assert contenders.judge([make(rounds=(each,) * 6)], PLAN)[2].met is met
    # What a small checkpoint takes says nothing of bytes.
    small = contenders.judge([make(file_bytes=1 << 20)], PLAN)
    assert not any("raw" in each.text for each in small)


def test_the_table_has_a_row_for_each_cost():
    lines = contenders.tabulate([make()], PLAN).splitlines()
    (row,) = [line for line in lines if line.startswith("a synchronous save  ")]
    assert row.split()[-6:] == ["3", "s", "2.5", "s–3.5", "s", "3.00%"]
    (row,) = [line for line in lines if line.startswith("  slower steps beside the write")]
    assert row.split()[-5:] == ["ms", "-250", "ms–500", "ms", "0.50%"]
    assert "a synchronous save takes 1.50 × the raw write" in lines[-4]


def test_ranks_which_run_elsewhere_are_told_the_whole_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    told = []

    def run(program, plan, deadline):
        told.append(Path(plan["directory"]).parent)
        return {"series": list_series(), "facts": FACTS}

    monkeypatch.setattr(contenders, "run_worker", run)
    list(contenders.measure(replace(PLAN, directory=Path("disk")), MPIRUN))
    assert told == [tmp_path / "disk"] * len(PLAN.ranks)
    assert list(Path("disk").iterdir()) == []


def test_ranks_begin_a_part_together_and_a_checkpoint_that_fails_ends_all(monkeypatch, tmp_path):
    noted, ranks = [], RankGroup()
    training = SimpleNamespace(
        name_state=lambda: {"weights": torch.ones(8)}, device="cpu",
        time_step=lambda: noted.append("step") or 1.0,
    )  # fmt: skip
    bench = worker.CheckpointBench(replace(PLAN, directory=tmp_path), training, ranks)
    monkeypatch.setattr(ranks, "gather", lambda value: noted.append("met") or [value])
    bench.time_steps()
    assert noted == ["met", *["step"] * PLAN.steps]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    shutil.rmtree(tmp_path / "checkpoints")
    monkeypatch.setattr(bench, "_meet", lambda: noted.append("together"))
    with pytest.raises(OSError, match=r"a checkpoint in .* could not be written"):
        bench.time_asynchronous()
    assert "together" in noted


def test_of_the_processor_time_that_of_the_thread_for_signals_is_told(monkeypatch):
    spent, shares = [], iter((0.03, 0.01))  # With the thread, and without it.
    clock = SimpleNamespace(
        perf_counter=time.perf_counter, process_time=lambda: sum(spent),
        sleep=lambda seconds: spent.append(next(shares) * seconds),
    )  # fmt: skip
    for name, fake in (("time", clock), ("StepAgreement", Mock()), ("PreemptionSignals", Mock())):
        monkeypatch.setattr(worker, name, fake)
    session = Mock()
    assert worker.measure_agreement(session)[1] == pytest.approx(0.02)
    members = worker.StepAgreement.call_args.args[0]
    assert (members.rank, members.size) == (session.world.rank, session.world.size)


@pytest.mark.long
@pytest.mark.mpi
def test_checkpoints_are_measured_drawn_and_recorded(tmp_path, capsys, monkeypatch):
    """In a directory that is named relative to this process's own, which is not the ranks'."""
    monkeypatch.chdir(tmp_path)
    record, picture = tmp_path / "record.jsonl", tmp_path / "picture.svg"
    words = [*documents.read_command("python -m benchmarks checkpoint"), "--targets"]
    written = tmp_path / "disk"
    written.mkdir()
    words += ["--directory", "disk", "--output", str(record), "--output", str(picture)]
    run(contenders.QUANTITY, words)
    printed = capsys.readouterr().out
    assert "mlp:megabytes=4, AdamW, 2 ranks (cpu), batch 8 per rank" in printed
    assert "target: a checkpoint every 50 steps, synchronous: at most 3.5% of training" in printed
    assert list(written.iterdir()) == []
    found = read_record(record)
    (measured,) = [line for line in found.others if line["kind"] == "group"]
    # Weights and two moments.
    assert 11e6 < measured["state_bytes"] < 13e6
    assert measured["state_bytes"] < measured["file_bytes"] < 1.1 * measured["state_bytes"]
    seconds = {(cell.contender, cell.at.get("part")): cell.samples[0] for cell in found.cells}
    assert 0 < seconds["asynchronous save", "stall"] < seconds["synchronous save", None]
    costs = ("raw write and flush", "checksum alone (XXH3)", "no checkpoint")
    assert all(seconds[name, None] > 0 for name in costs)
    assert 0 < measured["agreement"]["look"] < 1e-3
    assert "asynchronous save" in picture.read_text()
