"""A loss that is not finite, and samples that cannot be read: all ranks act on the same step."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import broken_data
import launchers
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.training import trainer
from mpiddp.training.data.batches import Cut, make_training_batches
from mpiddp.training.data.samples import Samples
from mpiddp.training.options.config import Configuration
from mpiddp.training.run_state import Position
from mpiddp.training.step.divergence import LossGuard, MarkedModel
from pool import Pools
from trainings import read_rows

RANKS, EPOCHS = 2, 2
BAD = [17, 60]
"""Training samples."""
TOY = Configuration(data="toy", samples=200, epochs=EPOCHS).resolve()
WORDS = (
    "--data", "toy", "--samples", "200", "--epochs", str(EPOCHS), "--model", "broken_data:build",
)  # fmt: skip


def compare(found: list[Any], kind: str) -> list[tuple[int, int, list[int]]]:
    """Each rank's weights with those of one process, which finds bad samples there."""
    model, _, bad = broken_data.train_alone(TOY, kind, BAD, RANKS)
    for _, weights in found:
        for name, tensor in model.named_parameters():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor.detach())
    return bad


@pytest.mark.parametrize("sync", ["framework", "ring", "parameter-server"])
def test_a_step_with_a_loss_that_is_not_finite_is_left_out_on_all_ranks(sync, pool, tmp_path):
    words = [*WORDS, "--sync", sync, "--on-nan", "skip", "--name", "skip"]
    called = pool("openmpi", RANKS).call(broken_data.run, "nan", BAD, *words, cwd=tmp_path)
    bad = compare(called.values, "nan")
    steps = {step for step, _, _ in bad}
    # In one of them rank 0's own loss is finite: its buffers are those that all get at the end.
    assert {step for step, rank, _ in bad if rank == 0} < steps
    last, weights = called.values[0]
    # The batches that the model's running averages are of.
    assert weights["1.num_batches_tracked"] == last["step"] - len(steps)
    for rank in range(RANKS):
        lines = re.findall(
            rf"rank {rank} of {RANKS} on \S+: the loss is nan in step (\d+), with training samples "
            rf"([\d, ]+) and (\d+) more: the step is left out",
            called.stderr[rank],
        )
        assert [(int(step), samples, int(more)) for step, samples, more in lines] == [
            (step, ", ".join(map(str, samples[:8])), len(samples) - 8)
            for step, who, samples in bad
            if who == rank
        ]
    assert sum(row["left_out"] for row in read_rows(tmp_path / "runs/skip")) == len(bad)


def test_what_does_not_train_imports_no_compiler() -> None:
    program = "import sys, mpiddp.training.evaluation; assert 'torch._dynamo' not in sys.modules"
    launchers.run_python("-c", program).expect(0)


def test_a_compiled_model_marks_a_bad_loss() -> None:
    marked = MarkedModel(nn.Linear(3, 2))
    assert marked(input=torch.ones(4, 3)).shape == (4, 2)
    compiled = torch.compile(marked, backend="aot_eager")
    marks = []
    # The first pass, which is compiled, is one of the rehearsed ones.
    for loss in (None, torch.tensor(math.nan), torch.tensor(1.0)):
        marked.begin_step()
        outputs = compiled(torch.ones(4, 3))
        marked.loss = loss
        outputs.sum().backward()
        marks.append(marked.flag.grad.item())
    assert marks == [0, 1, 0]


def test_servers_that_do_not_wait_drop_a_bad_gradient(pool: Pools, tmp_path: Path) -> None:
    words = [*WORDS, "--sync", "parameter-server", "--staleness", "unlimited", "--on-nan", "skip"]
    called = pool("openmpi", RANKS).call(broken_data.run, "nan", BAD, *words, cwd=tmp_path)
    for _, weights in called.values:
        assert all(torch.isfinite(torch.from_numpy(each)).all() for each in weights.values())
    assert "the step is left out" in called.output


def test_a_sample_that_cannot_be_read_is_left_out(pool: Pools, tmp_path: Path) -> None:
    words = [*WORDS, "--on-bad-sample", "skip", "--name", "skip"]
    called = pool("openmpi", RANKS).call(broken_data.run, "unreadable", BAD, *words, cwd=tmp_path)
    for step, rank, samples in compare(called.values, "unreadable"):
        numbers = [each for each in samples if each in BAD]
        text = f"sample{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} cannot be read: "
        error = f"OSError: [Errno 5] Input/output error; left out of step {step}\n"
        assert f"training {text}{error}" in called.stderr[rank]


def test_skipping_ends_where_the_weights_are_not_finite() -> None:
    module = nn.Linear(2, 2)
    guard = LossGuard(module, skips=True, marked=None)
    assert guard.examine(torch.tensor(float("nan")), lambda: "in step 3")
    with torch.no_grad():
        module.bias[1] = float("inf")
    with pytest.raises(MpiddpError, match="found nan in step 3: the weights are not finite"):
        guard.examine(torch.tensor(float("nan")), lambda: "in step 3")


class Several(nn.Module):
    """Returns more than one tensor, of which a loss may need some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, features: torch.Tensor) -> Any:
        scores = self.layer(features)
        return {"scores": scores, "more": (scores * 2, [features, None]), "step": 3}


def test_every_output_of_several_is_marked() -> None:
    module = Several()
    marked, features = MarkedModel(module), torch.randn(4, 3)
    for value in (1e38, math.inf, -math.inf, math.nan):
        for choose in (
            lambda found: found["scores"].sum(),
            lambda found: found["more"][0].sum(),
            lambda found: found["scores"].sum() + found["more"][0].sum(),
        ):
            module.zero_grad()
            choose(module(features)).backward()
            expected = [each.grad.clone() for each in module.parameters()]
            module.zero_grad()
            marked.begin_step()
            marked.loss = torch.tensor(value)
            outputs = marked(features)
            assert outputs["more"][1][0] is features and outputs["step"] == 3
            choose(outputs).backward()
            assert marked.is_refused(is_bad=False) == (not math.isfinite(value))
            for parameter, gradient in zip(module.parameters(), expected, strict=True):
                assert torch.equal(parameter.grad, gradient)


class Opaque(Several):
    def forward(self, features: torch.Tensor) -> Any:
        return SimpleNamespace(scores=self.layer(features))


def test_outputs_that_cannot_be_marked_are_refused() -> None:
    marked = MarkedModel(Opaque())
    with pytest.raises(ConfigurationError, match=r"on_nan: .* found SimpleNamespace: return one"):
        marked(torch.ones(4, 3))
    with torch.no_grad():
        assert marked(torch.ones(4, 3)).scores.shape == (4, 2)


ALL = set(range(10))


class BrokenFiles:
    """Ten samples, of which some cannot be read; the features are the positions."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int, /) -> tuple[torch.Tensor, int]:
        if position in self.bad:
            raise ValueError("broken file")
        return torch.tensor([float(position)]), position


class Uneven(BrokenFiles):
    def __getitem__(self, position: int, /) -> tuple[torch.Tensor, int]:
        return torch.zeros(position), position


@pytest.mark.parametrize(
    ("files", "skips", "message"),
    [
        (
            BrokenFiles(ALL),
            False,
            r"samples \d, \d cannot .* in step 8; --on-bad-sample skip leaves it out of .*",
        ),
        (BrokenFiles(ALL), True, "in step 8; nothing is left of the batch"),
        (Uneven(set()), True, "at entry 1, in step 8"),
    ],
    ids=["stops", "skips", "no batch"],
)
def test_a_batch_that_cannot_be_read_names_the_step(files, skips, message):
    training: Any = SimpleNamespace(
        batches=make_training_batches(Samples(files, skips=skips), Cut(2, 0, 1)),
        configuration=SimpleNamespace(on_bad_sample="skip" if skips else "stop"),
        session=SimpleNamespace(world=SimpleNamespace(rank=0)), workers=(0,),
    )  # fmt: skip
    with pytest.raises(MpiddpError, match=f"{message}$"):
        list(trainer._read_batches(training, SimpleNamespace(position=Position(step=7))))
