"""What a run reports: rows, lines, logs, bytes at the interfaces, and who is waited for."""

import contextlib
import json
import math
import re
import resource
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainings
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.training.options.config import parse
from mpiddp.training.rank_costs import SHORTEST, SLOW, RankCosts, add_costs, describe_slow_rank
from mpiddp.training.records import metrics_file, trackers
from mpiddp.training.records.metrics import (
    Row,
    StepsRow,
    Totals,
    describe_end,
    describe_epoch,
    describe_staleness,
    describe_start,
)
from mpiddp.training.records.metrics_file import MetricsFile, read_last_row
from mpiddp.training.records.network import Counters, Network, NetworkMeter, describe, read_counters
from mpiddp.training.records.profiling import ACTIVE, WAIT, WARM_UP, StepProfiler
from mpiddp.training.records.trackers import Run, Tracker, list_values
from mpiddp.training.run_output import RankLog
from mpiddp.training.step.stages import Costs, StepStage
from mpiddp.training.trainer import train
from pool import Pools

ROW = Row(
    attempt=1, epoch=1, step=45, loss=0.2345674, metrics={"accuracy": 0.92344}, learning_rate=0.05,
    samples_per_second=1000.0, seconds=1.5,
)  # fmt: skip

TIMES = {
    "seconds", "samples_per_second", "stages", "data_seconds", "bandwidth", "host_memory",
    "evaluate_seconds",
}  # fmt: skip
"""Values of a row that differ between two runs."""

STEPS_ROW = StepsRow(
    attempt=1, epoch=1, step=5, epochs=0.1, loss=2.5, metrics={"gap": 3.0}, learning_rate=0.05
)


def test_rows_of_steps_wait_and_are_not_doubled(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    rows = [replace(STEPS_ROW, step=step) for step in (5, 40, 45, 50)]
    rows[3] = replace(rows[3], loss=math.nan)
    file = MetricsFile(path)
    for row in rows[:3]:
        file.append(row)
    assert not path.exists()
    file.append(ROW)
    monkeypatch.setattr(metrics_file, "WRITE_SECONDS", 0.0)
    file.append(rows[3])
    written = [*rows[:3], ROW, rows[3]]
    assert path.read_text() == "".join(f"{row.to_json()}\n" for row in written)
    assert read_last_row(path) == ROW
    # The next attempt goes on from step 40. Rows of epochs stay.
    MetricsFile(path, 40)
    assert path.read_text() == "".join(f"{row.to_json()}\n" for row in (*rows[:2], ROW))


def test_the_metrics_of_a_task_are_in_the_row_and_in_the_line() -> None:
    row = replace(ROW, metrics={"gap": 2.5}, test_loss=0.5, test_metrics={"gap": 3.0})
    values = json.loads(row.to_json())
    assert (values["gap"], values["test_gap"], values["test_loss"]) == (2.5, 3.0, 0.5)
    assert "accuracy" not in values
    assert describe_epoch(ROW) == "Epoch 1 - Avg Loss: 0.234567, Accuracy: 92.34%"
    assert describe_epoch(row) == "Epoch 1 - Avg Loss: 0.234567, Gap: 2.5, Test Gap: 3"
    without = replace(row, metrics={}, test_metrics={})
    assert describe_epoch(without) == "Epoch 1 - Avg Loss: 0.234567, Test Loss: 0.500000"
    assert describe_end(without, 1, Path("runs/first")).startswith("Training done: test loss 0.5")


def test_a_row_is_read_as_it_was_written() -> None:
    tested = replace(
        ROW, test_loss=0.5, test_metrics={"accuracy": 0.9, "top5_accuracy": 1.0},
        stages={"read": 0.1}, bandwidth=[None, 2.5], staleness={0: 6, 3: 1}, parameters="ab",
    )  # fmt: skip
    for row in (ROW, tested, replace(tested, metrics={}, test_metrics={})):
        assert Row.from_json(row.to_json()) == row
    # A metric that is not finite is null.
    row = replace(ROW, metrics={"ratio": math.inf, "gap": 1.5}, test_metrics={"ratio": math.nan})
    values = json.loads(row.to_json())
    assert (values["ratio"], values["gap"], values["test_ratio"]) == (None, 1.5, None)
    assert math.isnan(Row.from_json(row.to_json()).metrics["ratio"])


def test_sums_are_the_same_now_and_later() -> None:
    def count_positive(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return (outputs > 0).sum() if targets.any() else 0

    now, later = (Totals(CPU, {"positive": count_positive}) for _ in range(2))
    # As a GPU, whose values are not read in each step.
    later._defers = True
    for step in range(5):
        outputs, targets = torch.linspace(-1, 2, 7) / 3, torch.full((7,), step % 2)
        for totals in (now, later):
            totals.add(outputs[step].exp().requires_grad_(), outputs, targets)
            if step == 2:
                before = totals.save()
                totals.add(torch.tensor(math.nan), outputs, targets)
                totals.restore(before)
                totals.leave_out()
    assert not any(later._sums[:2])
    assert torch.equal(now.sums, later.sums)
    assert now.sums[1:].tolist() == [35, 1, 2 * int((outputs > 0).sum())]
    with pytest.raises(ValueError, match=r"expected 4 sums, found shape \(3,\)"):
        now.load(later.sums[:3])


@contextlib.contextmanager
def writing_forbidden(most: int = 0) -> Iterator[None]:
    """No file can grow beyond so many bytes meanwhile, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_half_a_row_of_a_killed_attempt_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epoch": 2, "los')
    # Whole rows outlive whatever stops the repair.
    with writing_forbidden(), contextlib.suppress(OSError):
        MetricsFile(path)
    assert path.read_text().startswith('{"epoch": 1}\n')
    MetricsFile(path).append(ROW)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 1]


def test_metrics_have_whole_rows_and_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.append(ROW) == ""
    before = path.read_text()
    with writing_forbidden(len(before) + 20):
        for _ in range(2):
            problem = file.append(ROW)
            assert "metrics.jsonl could not be written: File too large" in problem
            assert path.read_text() == before
    assert file.append(ROW) == ""
    assert path.read_text() == 4 * before


def test_the_line_of_staleness() -> None:
    assert describe_staleness({0: 6, 1: 1, 3: 1}) == (
        "Staleness, in updates: mean 0.50, at most 3 (0: 75.0%, 1: 12.5%, 3: 12.5%)"
    )
    assert describe_staleness(dict.fromkeys(range(8), 1)).endswith("5: 12.5%, 2 more)")


@pytest.mark.parametrize(
    ("device", "nodes", "first", "product"),
    [
        ("cpu", [1], "1 CPU", "1 node x 1 rank per node = 1 rank"),
        ("cuda", [4, 4, 4, 4], "16 GPUs", "4 nodes x 4 ranks per node = 16 ranks"),
        ("cuda", [2, 3, 3], "8 GPUs", "2 nodes x 3 ranks + 1 node x 2 ranks = 8 ranks"),
    ],
)
def test_the_first_lines(device: str, nodes: list[int], first: str, product: str) -> None:
    lines = describe_start(device, nodes, "node001", batch_size=64, workers=sum(nodes))
    begin = f"Starting distributed training on {first}"
    assert lines[:3] == [begin, product, "Master node: node001"]
    total = 64 * sum(nodes)
    batch = rf"Effective batch: 64 samples per rank x \d+ ranks? = {total} samples per step"
    assert re.fullmatch(batch, lines[3])


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


def test_infiniband_counts_in_four_octets(tmp_path: Path) -> None:
    for device, text in (("mlx5_0", "25"), ("mlx5_1", "N/A (no counter)")):
        folder = tmp_path / device / "ports" / "1" / "counters"
        folder.mkdir(parents=True)
        (folder / "port_xmit_data").write_text(f"{text}\n")
        (folder / "port_rcv_data").write_text("50\n")
    found = dict(read_counters(tmp_path))
    assert found.pop("mlx5_0/1") == (100, 200)
    # This machine has a loopback interface, and perhaps others.
    assert "lo" in found and not any(name.startswith("mlx5_1") for name in found)


def test_what_came_before_is_not_counted() -> None:
    counters: list[Counters] = [
        {"eth0": (100, 50), "eth1": (5, 5)},
        {"eth0": (150, 60), "eth2": (7, 7)},
    ]
    meter = NetworkMeter(True, lambda: counters.pop(0))
    # Ten steps of the epoch, each of eight bytes, were taken by an earlier attempt.
    meter.begin(steps=10)
    found = meter.measure(sent_bytes=240, steps=30)
    assert found.counted_bytes == 160
    assert found.interfaces == {"eth0": {"sent_bytes": 50, "received_bytes": 10}}
    other = NetworkMeter(False, read_counters)
    other.begin(0)
    assert other.measure(0, 0).interfaces == {}


def test_ranks_are_joined_by_their_node() -> None:
    counts = {"eth0": {"sent_bytes": 9_000_000, "received_bytes": 7_000_000}}
    networks = [("a", 5_000_000, counts), ("b", 1, counts), ("a", 3_000_000, {})]
    ranks = [
        RankCosts(host, Costs(steps=1), 1, None, Network(counted, interfaces))
        for host, counted, interfaces in networks
    ]
    first, second = add_costs(ROW, ranks).network or ()
    assert second == {"host": "b", "counted_bytes": 1, "interfaces": counts}
    assert describe(first) == "Network of a: 8.0 MB counted; eth0 sent 9.0 MB and received 7.0 MB"
    assert add_costs(ROW, [replace(ranks[0], network=None)]).network is None


def make_rank(
    read: float = 0.0, forward: float = 1.0, waited: float = 0.0, steps: int = 100
) -> RankCosts:
    seconds = [0.0] * len(StepStage)
    seconds[StepStage.READ], seconds[StepStage.FORWARD] = read, forward
    seconds[StepStage.COMMUNICATION] = waited
    return RankCosts("node1", Costs(seconds, steps), 10**8, None)


def test_the_rank_that_waits_least_is_named_with_what_is_slow() -> None:
    usual = make_rank(waited=2.0)
    line = describe_slow_rank([usual, usual, make_rank(forward=3.0, waited=0.1)])
    assert line == (
        "Straggler: rank 2 on node1 takes 3.0 times as long as the others, computing 30.0 ms of a "
        "step instead of 10.0"
    )
    line = describe_slow_rank([make_rank(read=2.0), usual, usual])
    assert line.endswith("reading 20.0 ms of a step instead of 0.0") and "rank 0" in line


def test_nobody_is_named_for_little() -> None:
    usual = make_rank(waited=1.0)
    assert describe_slow_rank([usual, make_rank(forward=SLOW - 0.01)]) is None
    assert describe_slow_rank([make_rank()]) is None
    quick = make_rank(forward=SHORTEST / 2, waited=1.0)
    assert describe_slow_rank([quick, make_rank(forward=SHORTEST)]) is None
    # A rank's work takes long, but is done before the others': what they wait for is another.
    assert describe_slow_rank([make_rank(waited=0.0), make_rank(forward=3.0, waited=1.0)]) is None


def test_ranks_that_only_serve_are_left_out() -> None:
    server = make_rank(forward=0.0, steps=0)
    assert describe_slow_rank([server, make_rank()]) is None
    line = describe_slow_rank([server, make_rank(waited=2.0), make_rank(forward=3.0)])
    assert line is not None and "rank 2" in line


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.data())
def test_workers_that_took_different_numbers_of_steps_are_compared_by_step(steps, data):
    slow = data.draw(st.integers(0, len(steps) - 1))
    found = [
        make_rank(forward=(3.0 if place == slow else 1.0) * count, waited=2.0 * count, steps=count)
        for place, count in enumerate(steps)
    ]
    found[slow].costs.seconds[StepStage.COMMUNICATION] = 0
    line = describe_slow_rank(found)
    assert re.match(rf"Straggler: rank {slow} on node1 takes 3.0 times", line)


TOY = ["--data", "toy", "--samples", "400", "--epochs", "1"]
CPU = torch.device("cpu")


def read_events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def run_steps(path: Path, steps: int, warnings: list[str]) -> None:
    profiler = StepProfiler(path, CPU, warnings.append)
    for _ in range(steps):
        torch.ones(3, 4) @ torch.ones(4, 5)
        profiler.step()
    profiler.close()


@pytest.mark.parametrize("more", [0, 7, 2 - ACTIVE])
def test_some_steps_are_recorded(more: int, tmp_path: Path) -> None:
    path, warnings = tmp_path / "profile" / "rank-0.json", []
    run_steps(path, WAIT + WARM_UP + ACTIVE + more, warnings)
    assert warnings == []
    first, *others = (event for event in read_events(path) if event.get("name") == "aten::mm")
    assert len(others) + 1 == ACTIVE + min(more, 0)
    assert first["args"]["Input Dims"] == [[3, 4], [4, 5]]
    assert any(event.get("name") == "[memory]" for event in read_events(path))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_recorded_is_told(tmp_path: Path) -> None:
    warnings: list[str] = []
    run_steps(tmp_path / "a.json", 3, warnings)
    assert warnings == [f"no profile: it begins after {WAIT + WARM_UP} steps"]
    (tmp_path / "file").touch()
    run_steps(tmp_path / "file" / "a.json", 20, warnings)
    assert len(warnings) == 2 and "a.json could not be written" in warnings[1]


def test_the_ranks_that_are_named_write_a_trace(pool: Pools, tmp_path: Path) -> None:
    words = [["--name", name, *TOY, "--profile", name] for name in ("all", "1")]
    pool("openmpi", 2).call(trainings.run, *words, cwd=tmp_path)
    for said in pool("openmpi", 2).call(trainings.refuse, *TOY, "--profile", "2").values:
        assert said.startswith("2: --profile 2 names none of the job's ranks")
    for name, expected in (("all", [0, 1]), ("1", [1])):
        folder = tmp_path / "runs" / name / "profile"
        assert sorted(path.name for path in folder.iterdir()) == [
            f"rank-{rank}.json" for rank in expected
        ]
        names = {event.get("name") for event in read_events(folder / "rank-1.json")}
        assert {"aten::addmm", "gloo:all_reduce"} <= names


@pytest.mark.parametrize("words", [["--profile"], ["--profile", *TOY], ["--profile=0"]])
def test_rank_0_is_meant_where_no_rank_is_named(words: list[str]) -> None:
    assert parse(words).profile == "0"
    assert parse(["--profile", "1", *TOY]).profile == "1"


TIMED = replace(ROW, stages={"read": 0.5}, sent_bytes=[10, 30], bandwidth=[None, 5.0])


def test_the_numbers_of_a_row_have_names() -> None:
    values = list_values(TIMED)
    assert values["loss"] == ROW.loss and values["accuracy"] == ROW.metrics["accuracy"]
    assert values["stages/read"] == 0.5
    assert values["sent_bytes"] == 20 and values["bandwidth"] == 5
    assert "test_loss" not in values and "parameters" not in values and "step" not in values


class Client:
    """Notes what it is told; fails, or does not answer, where it is to."""

    def __init__(self, run: Run) -> None:
        self.logged: list[tuple[Mapping[str, float], int]] = []
        self.ends: list[bool] = []
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.answers.wait(30)
        if self.error is not None:
            raise self.error
        self.logged.append((values, step))

    def close(self, *, is_done: bool) -> None:
        self.ends.append(is_done)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    made = Client(Run(Path(), {}, 0))
    monkeypatch.setitem(trackers.CLIENTS, "wandb", lambda run: made)
    yield made
    made.answers.set()


def test_an_error_is_one_warning_and_no_answer_holds_up_nothing(client, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
    warnings: list[str] = []
    for error in (OSError("no\nnetwork"), None):
        client.error = error
        if error is None:
            client.answers.clear()
        tracker = Tracker("wandb", Run(Path("runs/first"), {}, 0), warnings.append)
        for _ in range(3):
            tracker.log(TIMED)
        tracker.close(is_done=True)
    assert warnings == [
        "wandb does not take the metrics, and gets no more: OSError: no",
        "wandb did not take all metrics within 0.1 s",
    ]


def test_weights_and_biases_is_called_as_its_documentation_says(monkeypatch):
    """https://docs.wandb.ai/ref/python/init/ and /run/: `init`, `Run.log`, `Run.finish`."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, arguments, options))
            return run

        return call

    run = types.SimpleNamespace(log=note("log"), finish=note("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=note("init")))
    for step, resume in ((0, None), (45, "allow")):
        calls.clear()
        client = trackers.WeightsAndBiases(Run(Path("runs/a b#1"), {"epochs": 2}, step))
        client.log({"loss": 1.0}, 90)
        client.close(is_done=False)
        given = {
            "project": "mpiddp", "name": "a b#1", "id": "a-b-1", "dir": "runs/a b#1",
            "config": {"epochs": 2}, "resume": resume,
        }  # fmt: skip
        assert calls == [
            ("init", (), given),
            ("log", ({"loss": 1.0},), {"step": 90}),
            ("finish", (), {"exit_code": 1}),
        ]


def run_trainer(session: Session, folder: Path, *words: str) -> None:
    common = ["--data", "toy", "--samples", "200", "--epochs", "2", "--name", "first"]
    train(parse([*common, "--runs-dir", str(folder), *words]), session, FailureHandler())


def test_the_trainer_tells_each_epoch(client, session, tmp_path, monkeypatch):
    monkeypatch.setattr("mpiddp.training.shared_run.check_library", lambda name: None)
    run_trainer(session, tmp_path, "--track", "wandb", "--log-every", "5")
    assert [step for _, step in client.logged] == [5, 10, 10, 15, 20, 20]
    assert client.logged[5][0]["test_accuracy"] > 0.5
    names = {"steps/epochs", "steps/loss", "steps/accuracy", "steps/learning_rate", "steps/epoch"}
    assert client.logged[3][0].keys() == names
    assert client.ends == [True]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_tensorboard_holds_the_rows(session: Session, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run_trainer(session, tmp_path, "--track", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "first" / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("loss")] == [10, 20]
    assert [each.step for each in events.Scalars("stages/forward")] == [10, 20]
    assert "configuration/text_summary" in events.Tags()["tensors"]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_mlflow_holds_the_rows_of_all_attempts(session: Session, tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed")
    run_trainer(session, tmp_path, "--track", "mlflow")
    (tmp_path / "first" / "outcome.json").unlink(missing_ok=True)
    run_trainer(session, tmp_path, "--track", "mlflow", "--epochs", "3")
    (run,) = mlflow.search_runs(experiment_names=["mpiddp"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["data"] == "toy"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [each.step for each in history] == [10, 20, 30]
