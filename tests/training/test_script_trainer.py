"""mpiddp.training.Trainer, in this process and in a job of its own."""

import copy
import errno
import os
import pickle
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import interrupted
import launchers
import mpiddp
import preempted
import trainings
from mpiddp import models
from mpiddp.checkpoints.packing import unpack
from mpiddp.checkpoints.storage import directory
from mpiddp.checkpoints.storage.finding import Found
from mpiddp.checkpoints.storage.manifest import read_manifest
from mpiddp.checkpoints.storage.shards import read_shards
from mpiddp.errors import CheckpointError, ConfigurationError, MpiddpError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.process.outcome import read_outcome
from mpiddp.process.preemption_signals import find_signals
from mpiddp.training import Task, Trainer, exported_weights, script_trainer
from mpiddp.training.data.batches import Batch
from mpiddp.training.data.data_sets import load
from mpiddp.training.options.config import parse
from mpiddp.training.prediction import _take_output
from mpiddp.training.resuming import check_fit, list_deciding, name_values
from mpiddp.training.saving import Saver
from mpiddp.training.script_trainer import named_as_keywords
from mpiddp.training.trainer import train

pytestmark = pytest.mark.usefixtures("writable")
SMALL: dict[str, Any] = {"data": "toy", "samples": 200, "epochs": 2, "resume": "never"}


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def test_a_script_trains_as_the_command_does(session: Session) -> None:
    words = ["--data", "toy", "--samples", "200", "--epochs", "2", "--name", "command"]
    expected = train(parse(words), session, FailureHandler())
    row = Trainer(**SMALL, name="script").fit()
    assert row.parameters == expected.parameters
    own = Trainer(**SMALL, name="loop")
    numbers = []
    for step in own.steps():
        numbers.append((step.epoch, step.number, len(step.batch.targets)))
        step.take()
    assert own.row is not None and own.row.parameters == expected.parameters
    assert numbers == [(1 + n // 10, n + 1, 16) for n in range(20)]
    read = [Path("runs", each, "config.toml").read_text() for each in ("command", "loop")]
    same = read[0].replace('"command"', '"loop"').replace('resume = "auto"', 'resume = "never"')
    assert same == read[1]


def test_a_step_computes_what_the_script_says(session: Session) -> None:
    seen = []

    def compute(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(batch.inputs)
        seen.append(len(batch.targets))
        return outputs, 0 * outputs.sum()

    trainer = Trainer(Task(model=build), **SMALL, weight_decay=0.0)
    for step in trainer.steps():
        step.take(compute)
    assert sum(seen) == 2 * 160
    assert trainer.row is not None and trainer.row.loss == 0
    # Nothing was learned.
    torch.manual_seed(0)
    expected = build((10,), 2)
    saved = sorted(Path("runs").glob("*/checkpoints/step-20"))
    assert trainer.configuration.model == f"{__name__}:build"
    assert torch.equal(read_shards(saved[0], "model.")["weight"], expected.weight)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_loop_that_is_left_is_a_normal_end(is_taken, session, capsys):
    trainer = Trainer(**SMALL, name="left", export="left.pt")
    for step in trainer.steps():
        if step.number < 13 or is_taken:
            step.take()
        if step.number == 13:
            break
    # The script may be about to fail: nothing is done before it goes on.
    assert read_outcome(Path("runs/left")) is None and not Path("left.pt").exists()
    session.do_postponed()
    last = 13 if is_taken else 12
    outcome = read_outcome(Path("runs/left"))
    assert (outcome["code"], outcome["reason"]) == (0, f"left after step {last}")
    assert Path("left.pt").exists()
    # As in a later job: it has finished, and has the row of the epoch before.
    find_failure_handler(session).entered_runs.clear()
    capsys.readouterr()
    again = Trainer(**{**SMALL, "resume": "auto"}, name="left", export="left.pt")
    assert list(again.steps()) == []
    assert again.row is not None and again.row.epoch == 1
    said = f"Finished before: left after step {last} (run directory runs/left)\n"
    assert capsys.readouterr().out == said
    # It can be gone on from, with the time of the epoch so far, and ends as one that was not left.
    source = f"runs/left/checkpoints/step-{last}"
    assert unpack(read_shards(Path(source), "epoch."))["seconds"] > 0
    row = Trainer(**{**SMALL, "resume": source}, name="right").fit()
    assert row.parameters == Trainer(**SMALL, name="whole").fit().parameters


def test_rows_of_steps_are_written_with_the_checkpoint_that_has_them(session, monkeypatch):
    found, write = [], Saver.write

    def look_and_write(saver: Saver) -> None:
        # The job may be killed once there is a checkpoint.
        found.append([row["step"] for row in trainings.read_rows(Path("runs/rows"))])
        write(saver)

    monkeypatch.setattr(Saver, "write", look_and_write)
    for step in Trainer(**SMALL, name="rows", log_every=1, save_every="2steps").steps():
        if step.number == 6:
            break
        step.take()
    session.do_postponed()
    assert found == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_a_loop_that_fails_is_not_taken_for_one_that_is_left(session, monkeypatch):
    signals = preempted.MadeUpSignals()
    monkeypatch.setattr(session, "signals", signals)

    def fail(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError("no loss")

    def run() -> None:
        for step in Trainer(**SMALL, name="failed").steps():
            assert signals._is_heeded
            step.take(fail)

    with pytest.raises(ValueError, match="no loss"):
        run()
    session.do_postponed()
    assert read_outcome(Path("runs/failed")) is None
    assert not list(Path("runs/failed/checkpoints").glob("step-*"))
    # TERM is not for a training that is over.
    Trainer(**SMALL).fit()
    assert not signals._is_heeded


def test_each_training_and_checkpointer_of_a_script_is_preempted(session, monkeypatch, tmp_path):
    first, second = (
        script_trainer._find_session(Trainer(**SMALL).configuration)[1] for _ in range(2)
    )
    assert first is second is find_signals()
    monkeypatch.setattr(first, "received", signal.SIGUSR2)
    with mpiddp.Checkpointer(tmp_path, nn.Linear(1, 1)) as checkpointer:
        assert checkpointer.preempted


@pytest.mark.parametrize("before", ["framework", "parameter-server"])
def test_the_way_to_synchronise_cannot_change_to_or_from_servers(before, tmp_path):
    manifest = SimpleNamespace(configuration={"sync": before, "servers": 2})
    found = Found(tmp_path, cast(Any, manifest))
    values = {**name_values(parse([])), "sync": before, "servers": 2}
    known = {name: values[name] for name in list_deciding()}
    manifest.configuration.update({**known, "sync": before, "servers": 2})
    assert check_fit(found, values) == []
    other = "parameter-server" if before == "framework" else "framework"
    with pytest.raises(CheckpointError, match=f"sync '{before}', now '{other}'"):
        check_fit(found, {**values, "sync": other})
    if before == "parameter-server":
        with pytest.raises(CheckpointError, match="servers 2, now 3"):
            check_fit(found, {**values, "servers": 3})


def fill(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_end_does_not_lose_the_weights(session, monkeypatch):
    monkeypatch.setattr(directory, "write_shards", fill)
    with pytest.raises(MpiddpError, match=r"could not be written: .*No space left on device"):
        Trainer(**SMALL, name="full", export="full.pt").fit()
    assert torch.load("full.pt", weights_only=True)
    # A run that is to stop then does not train on until another checkpoint is due.
    steps = Trainer(**SMALL, save_every="2steps", on_save_error="stop").steps()
    for _ in range(3):
        step = next(steps)
        assert wait_until(lambda step=step: not step._loop.saver._checkpointer.is_busy, 60)
        step.take()
    with pytest.raises(MpiddpError, match=r"could not be written: .*No space left on device"):
        next(steps)


def test_weights_that_cannot_be_written_do_not_lose_the_last_checkpoint(session, monkeypatch):
    def run(name: str, left: bool) -> None:
        for step in Trainer(**SMALL, name=name, export="full.pt").steps():
            step.take()
            if left:
                break
        session.do_postponed()

    monkeypatch.setattr(exported_weights, "export_weights", fill)
    for left in (False, True):
        name = f"full-{left}"
        with pytest.raises(ConfigurationError, match=r"export: .*No space left on device"):
            run(name, left)
        assert Path(f"runs/{name}/checkpoints/step-{1 if left else 20}").is_dir()
        assert read_outcome(Path(f"runs/{name}")) is None


def test_a_finished_training_is_not_the_result_of_other_options(session: Session) -> None:
    options = {**SMALL, "resume": "auto", "name": "same", "checkpoint_dir": "shared"}
    row = Trainer(**options).fit()
    again = {**options, "runs_dir": "others"}
    with pytest.raises(ConfigurationError, match=r"learning_rate .*no epoch is left"):
        Trainer(**again, learning_rate=0.5).fit()
    few = {**again, "epochs": row.epoch - 1}
    with pytest.raises(ConfigurationError, match=rf"epochs: expected {row.epoch} or more, .* end"):
        Trainer(**few).fit()
    assert Trainer(**again).fit().parameters == row.parameters


def test_an_epoch_that_was_tested_has_a_checkpoint_though_no_step_was_left(session: Session):
    options = {**SMALL, "epochs": 1}
    for step in Trainer(**options, name="left").steps():
        step.take()
        if step.number == 9:
            break
    session.do_postponed()
    options |= {"resume": "runs/left", "batch_size": 32, "last_batch": "drop"}
    Trainer(**options, name="on").fit()
    assert read_manifest(Path("runs/on/checkpoints/step-9")).score is not None


def test_each_step_is_taken_once(session: Session) -> None:
    steps = Trainer(**SMALL).steps()
    next(steps)
    with pytest.raises(MpiddpError, match=r"take\(\) .* step 1"):
        next(steps)
    step = next(Trainer(**SMALL).steps())
    step.take()
    with pytest.raises(MpiddpError, match=r"one take\(\) for step 1"):
        step.take()
    # The run ends here, while its directory is there.
    session.do_postponed()


def test_a_run_that_has_finished_is_not_trained_again(session, capsys):
    options = {**SMALL, "resume": "auto"}
    first = Trainer(**options, name="first").fit()
    Trainer(**options, name="second").fit()
    # Two trainers of a job with one name are a mistake, and may have different tasks.
    for name in ("first", "second"):
        more = r"choose another name=; to train on from it: resume=runs/\w+, with another name= and"
        with pytest.raises(ConfigurationError, match=more):
            Trainer(**options, name=name).fit()
    find_failure_handler(session).entered_runs.clear()  # As in a later job.
    capsys.readouterr()
    again = Trainer(**options, name="first", log_every=7)
    assert list(again.steps()) == []
    assert again.row == first
    line = r"Finished before: test accuracy \d+\.\d+% after 2 epochs \(run directory runs/first\)\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    refused = {
        r"with other options \(seed 0, now 1\)": {"name": "first", "seed": 1},
        r"with other options \(export None, now 'w.pt'\)": {"name": "first", "export": "w.pt"},
    }
    for text, changed in refused.items():
        with pytest.raises(ConfigurationError, match=text):
            Trainer(**{**options, **changed}).fit()
    Path("runs/first/metrics.jsonl").write_text('{"epoch": 2}\n')
    with pytest.raises(ConfigurationError, match="finished, but its files cannot be read"):
        Trainer(**options, name="first").fit()


def test_a_script_predicts_with_what_was_trained(session: Session) -> None:
    options = {**SMALL, "resume": "auto", "name": "whole", "ema": 0.9, "export": "whole.pt"}
    trainer = Trainer(**options)
    with pytest.raises(ConfigurationError, match=r"nothing is trained yet: call fit\(\)"):
        trainer.predict([1])
    row = trainer.fit()
    tests = load(trainer.configuration).test
    scores = trainer.predict(torch.from_numpy(tests.features))
    right = (scores.argmax(dim=1) == torch.from_numpy(tests.labels)).sum().item()
    assert row.test_accuracy == right / len(tests) == row.list_values()["test_accuracy"]
    assert row.accuracy == row.metrics["accuracy"]
    assert copy.copy(row) == pickle.loads(pickle.dumps(row))
    with pytest.raises(AttributeError, match="no 'acuracy'; its metrics are accuracy, test_acc"):
        _ = row.acuracy
    # The average, as it is exported, and a model that is not the trainer's.
    model = models.mlp((10,), 2)
    model.load_state_dict(torch.load("whole.pt", weights_only=True))
    for each in (model, trainer.model):
        assert torch.equal(each(torch.from_numpy(tests.features)), scores)
    find_failure_handler(session).entered_runs.clear()  # As in a later job.
    again = Trainer(**options)
    again.fit()
    given = Trainer(**SMALL, weights="whole.pt")
    for other in (again, given):
        assert torch.equal(other.predict(tests), scores)
        two = other.predict([tests[0], tests[5]])
        torch.testing.assert_close(two, scores[[0, 5]])
    with pytest.raises(ConfigurationError, match=r"^predict: .* inputs of the training data"):
        trainer.predict([{"a": 1}])
    trainer.model.train()
    with pytest.raises(MpiddpError, match="given samples 0, 1 make no batch"):
        trainer.predict([tests[0], {"a": 1}])
    assert trainer.model.training


def test_a_run_that_has_finished_predicts_with_its_own_weights(session: Session) -> None:
    torch.save(models.mlp((10,), 2).state_dict(), "first.pt")
    options = {**SMALL, "resume": "auto", "name": "tuned", "checkpoint_dir": "kept"}
    samples = torch.eye(10)
    trainer = Trainer(**options, weights="first.pt")
    trainer.fit()
    find_failure_handler(session).entered_runs.clear()  # As in a later job.
    again = Trainer(**options, weights="first.pt")
    before = again.predict(samples)
    again.fit()
    assert torch.equal(again.predict(samples), trainer.predict(samples))
    assert not torch.equal(again.predict(samples), before)
    # And not with those of a checkpoint from before its end.
    unsaved = {**SMALL, "resume": "auto", "name": "unsaved"}
    for step in Trainer(**unsaved, save_every="5steps").steps():
        if step.number == 7:
            break
        step.take()
    find_failure_handler(session).entered_runs.clear()
    session.do_postponed()
    Path("runs/unsaved/outcome.json").unlink()  # As if it had been preempted.
    Trainer(**unsaved, save_every="never").fit()
    find_failure_handler(session).entered_runs.clear()
    last = Trainer(**unsaved)
    last.fit()
    with pytest.raises(ConfigurationError, match=r"cannot read .*/step-20: No such file"):
        last.predict(samples)


def test_ranks_predict_with_one_model_and_the_same_samples(pool: Any, tmp_path: Path) -> None:
    found = pool("openmpi", 2).call(trainings.predict_within, cwd=tmp_path).values
    expected = found[0]["own"]
    for each in found:
        assert each["is training"]
        for name in ("within", "left", "model"):
            np.testing.assert_allclose(each[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        assert "data to predict must be the same on all ranks" in each["said"]
    # Each rank has seen other samples: without this the test shows nothing.
    assert not np.allclose(found[1]["own"], expected)


def test_a_loop_that_some_ranks_do_not_run_cannot_predict(pool: Any, tmp_path: Path) -> None:
    found = pool("openmpi", 3).call(trainings.predict_beside_servers, cwd=tmp_path).values
    assert [length for _, length in found] == [10, 10, 10]
    assert ["expected a call after the loop" in said for said, _ in found] == [True, True, False]


@pytest.mark.parametrize("output", [torch.ones(2, 3), torch.ones(()), 3.0, SimpleNamespace()])
def test_outputs_that_are_none_of_single_samples_are_refused(output: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"predict: expected outputs .* for 3 samples"):
        _take_output(3, output)
    assert _take_output(3, torch.ones(3)).shape == (3,) and _take_output(3, None) is None


def test_messages_name_a_scripts_keywords() -> None:
    said = "give --last-batch drop, another --name or --resume PATH, --resume runs/a; see --foo"
    expected = "give last_batch='drop', another name= or resume=PATH, resume=runs/a; see --foo"
    with pytest.raises(MpiddpError) as caught, named_as_keywords():
        raise MpiddpError(said)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"epoch": 3}, ["unknown option epoch", "did you mean epochs?"]),
        ({"epochs": "3"}, ["epochs", "an integer", "'3' (str)"]),
        ({"timeout": 60}, ["timeout = 60.0", "the session is open", "mpiddp.init"]),
        ({"evaluate_only": True}, ["evaluate_only", "python -m mpiddp.train", "Trainer"]),
        ({"model": "mlp"}, ["model = 'mlp'", "task", f"{__name__}:build"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_option_is_refused(options, fragments, session):
    with pytest.raises(ConfigurationError) as caught:
        Trainer(Task(model=build), **options)
    assert [each for each in fragments if each not in str(caught.value)] == []


LEFT = """
import atexit
from pathlib import Path
from mpiddp.training import Trainer

trainer = Trainer(data="toy", epochs=4, name="left")
steps = trainer.steps()
for step in steps:
    step.take()
    if step.number == 7:
        break
atexit.register(lambda: print("saved:", Path("runs/left/checkpoints/step-7").is_dir()))
"""


@pytest.mark.mpi
def test_a_script_that_leaves_its_loop_and_ends_has_saved(tmp_path: Path) -> None:
    # The script keeps the iterator, closes nothing, and its own functions of atexit find the save.
    (tmp_path / "script.py").write_text(LEFT)
    words = ["-m", "mpiddp", "script.py"]
    done = launchers.run("openmpi", 2, words, cwd=tmp_path).expect(0)
    assert done.stdout.count("saved: True") == 2
    outcome = read_outcome(tmp_path / "runs" / "left")
    assert [outcome[name] for name in ("code", "reason", "step")] == [0, "left after step 7", 7]


RESTARTED = """
import os
import time
from pathlib import Path
from mpiddp.training import Trainer

options = {"data": "toy", "samples": 1000, "epochs": 1, "name": "run", "save_every": "10steps"}
trainer = Trainer(**options, resume="never")
for step in trainer.steps():
    step.take()
    if step.number == 33 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while not Path("runs/run/checkpoints/step-30").exists():
            time.sleep(0.01)
        os._exit(9)
"""


@pytest.mark.mpi
def test_a_restart_goes_on_from_what_its_own_job_has_saved(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESTARTED)
    # Several threads for so small a model only wait for each other on a busy machine.
    variables = {**launchers.WAITING, "OMP_NUM_THREADS": "1"}
    words = ["-m", "mpiddp", "-n", "1", "--restarts", "1", "script.py"]
    done = launchers.run_python(*words, cwd=tmp_path, env=variables).expect(0)
    # The first attempt starts over; the second one goes on from it.
    assert re.findall(r"Resumed from runs/run/checkpoints/step-(\d+):", done.stdout) == ["30"]


def test_a_restart_does_not_go_on_from_what_another_job_has_saved(session, monkeypatch, capsys):
    words = ["--data", "toy", "--samples", "1000", "--epochs", "1", "--name", "run"]
    words += ["--save-every", "10steps", "--resume"]
    own = "runs/run/checkpoints/step-"

    def attempt(job: str, restarts: int, resume: str, cut: int) -> list[str]:
        """The step at which an attempt of a front's job went on that is cut off after a step."""
        monkeypatch.setenv("MPIDDP_JOB_DIRECTORY", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        capsys.readouterr()
        interrupted.run(session, [*words, resume], [cut], False)
        return re.findall(f"Resumed from {own}(\\d+):", capsys.readouterr().out)

    # A job that ended after step 20 without a restart; then one that branches off before.
    assert attempt("first", 0, "never", 25) == []
    assert Path(f"{own}20").exists()
    assert attempt("second", 0, f"{own}10", 13) == ["10"]
    assert attempt("second", 1, f"{own}10", 13) == ["10"]
    assert attempt("second", 2, f"{own}10", 23) == ["10"]
    assert attempt("second", 3, f"{own}10", 33) == ["20"]
