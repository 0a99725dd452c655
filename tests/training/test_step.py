"""One step: passes over parts of a batch, clipping, number formats, the average of the weights."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.groups import straggler
from mpiddp.training.options.groups.optimisation import OptimisationOptions
from mpiddp.training.options.groups.straggler import Slowdown, Straggler, parse_straggler
from mpiddp.training.records.metrics import Totals
from mpiddp.training.step.divergence import LossGuard
from mpiddp.training.step.learning_rate import LearningRate, make_learning_rate
from mpiddp.training.step.moving_average import MovingAverage
from mpiddp.training.step.optimizer_step import LocalUpdate, Treatment
from mpiddp.training.step.precision import Precision
from mpiddp.training.step.step import Engine, Forward
from mpiddp.training.wrapping.activations import recompute
from mpiddp.training.wrapping.module_groups import count_parameters, find_groups, find_innermost

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def draw(samples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, 6, generator=generator)
    return Batch(features, torch.randint(0, 3, (samples,), generator=generator))


def make_engine(module: nn.Module, treatment: Treatment | None = None, **options: Any) -> Engine:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    update = LocalUpdate(module, optimizer, lambda step: 0.1, treatment)
    guard = LossGuard(module, skips=False, marked=None)
    forward = Forward(nn.CrossEntropyLoss(), Precision(options.pop("precision", "fp32"), CPU))
    return Engine(module, module, update, guard, forward, **options)


def train(module: nn.Module, batches: list[Batch], **options: Any) -> torch.Tensor:
    """The sums of losses, right classes and samples."""
    engine, totals = make_engine(module, **options), Totals(CPU, {})
    for batch in batches:
        engine.take_step(batch, CPU, totals, lambda: "")
    return totals.sums


def find_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_accumulation_equals_one_pass_up_to_rounding():
    # The last batch is no multiple of the passes, and the one before has fewer samples than them.
    batches = [draw(16, 1), draw(16, 2), draw(3, 3), draw(7, 4)]
    whole, parts = make_model(), make_model()
    sums = [train(whole, batches), train(parts, batches, passes=4)]
    assert 0 < find_difference(whole, parts) < 1e-6
    assert sums[1] == pytest.approx(sums[0])
    assert sums[1][1] == 42


def test_ranks_exchange_gradients_in_the_last_pass_alone():
    calls = []

    class Hold:
        def __enter__(self) -> None:
            calls.append("held")

        def __exit__(self, *_: object) -> None:
            calls.append("over")

    module = make_model()
    module.register_forward_pre_hook(lambda *_: calls.append("pass"))
    train(module, [draw(8)], passes=3, hold=Hold)
    assert calls == ["held", "pass", "over"] * 2 + ["pass"]


@pytest.mark.parametrize("longest", [0.01, 1e6])
def test_a_long_gradient_is_cut_to_the_length_that_is_allowed(longest):
    module, plain = make_model(), make_model()
    train(module, [draw(16)], treatment=Treatment(clip_norm=longest))
    train(plain, [draw(16)])
    norm = nn.utils.get_total_norm([each.grad for each in module.parameters()])
    usual = nn.utils.get_total_norm([each.grad for each in plain.parameters()])
    assert norm == pytest.approx(min(longest, float(usual)), rel=1e-3)


def test_images_with_their_channels_last_stay_so_whatever_the_weights_are():
    # As with FSDP, whose weights are stored in the usual order.
    forward = Forward(nn.CrossEntropyLoss(), Precision("fp32", CPU), torch.channels_last)
    batch = Batch(torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2, 6, 6)))
    outputs, _ = forward(nn.Conv2d(3, 4, 3), batch)
    assert outputs.is_contiguous(memory_format=torch.channels_last)


def test_running_averages_take_no_second_account_of_what_is_computed_again():
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))

    plain, again = make(), make()
    recompute([again])
    for module in (plain, again):
        train(module, [draw(16, seed) for seed in range(3)])
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.get_buffer("1.num_batches_tracked") == 3


@pytest.mark.parametrize(("least", "names"), [(1, "a b c"), (20, "a c"), (60, "c"), (1000, "")])
def test_groups_of_modules_go_by_their_own_parameters(least, names):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 8)
            self.b = nn.Linear(2, 3)
            self.c = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
            self.tied = nn.Linear(8, 3, bias=False)
            self.other = nn.Linear(8, 3, bias=False)
            self.other.weight = self.tied.weight

    model = Model()
    first, second = (model.get_submodule(f"c.inner.{number}") for number in range(2))
    known = {id(model.a): "a", id(model.b): "b", id(first): "c", id(second): "c"}
    # Below 72 parameters each layer is a group, else both of them together.
    groups = find_groups(model, least)
    assert sorted({known[id(each)] for each in groups}) == names.split()
    assert find_groups(model, 100) == [model.get_submodule("c.inner")]
    assert list(find_innermost(groups)) == groups
    # What two modules share is no group's, since neither contains the other.
    counts = count_parameters(model, groups)
    assert sum(counts) == sum(each.numel() for each in model.parameters())
    assert counts[-1] >= 24


def test_a_loss_scale_leaves_the_step_as_it_is_and_drops_gradients_that_overflow():
    # The scaler is the same on a CPU; on a GPU it belongs to --precision fp16.
    module, plain = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine = make_engine(module, Treatment(scaler=scaler, clip_norm=0.5))
    engine.forward.precision.scaler = scaler
    engine.take_step(draw(16), CPU, Totals(CPU, {}), lambda: "")
    train(plain, [draw(16)], treatment=Treatment(clip_norm=0.5))
    assert find_difference(module, plain) < 1e-7
    module[2].weight.data.mul_(1e4)
    before = [each.detach().clone() for each in module.parameters()]
    scaler.update(1e38)
    engine.take_step(draw(16), CPU, Totals(CPU, {}), lambda: "")
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert engine.update.list_parts(0)["scaler"].state_dict()["scale"] < 1e38


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_first_step_that_overflows_leaves_no_momentum(kind):
    """torch's fused SGD makes its buffers there, and does not write them."""
    options = {"momentum": 0.9, "dampening": 0.5} if kind is torch.optim.SGD else {}

    def train_fused(overflows: bool) -> tuple[nn.Module, int]:
        """The trained module; and how many parameters had state after the overflow."""
        module = make_model()
        optimizer = kind(module.parameters(), 0.1, fused=True, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        update = LocalUpdate(module, optimizer, lambda step: 0.1, Treatment(scaler=scaler))
        engine = replace(make_engine(module), update=update)
        engine.forward.precision.scaler = scaler
        stateful = 0
        if overflows:
            hook = module[0].weight.register_hook(lambda gradient: gradient * torch.inf)
            engine.take_step(draw(16, 7), CPU, Totals(CPU, {}), lambda: "")
            hook.remove()
            stateful = len(optimizer.state)
        for seed in range(3):
            engine.take_step(draw(16, seed), CPU, Totals(CPU, {}), lambda: "")
        return module, stateful

    (plain, _), (module, stateful) = train_fused(False), train_fused(True)
    assert stateful == 0
    assert find_difference(plain, module) < 1e-7


def test_the_average_follows_the_weights_and_is_applied_for_a_while():
    module = make_model()
    average = MovingAverage(module, 0.5)
    expected = [each.detach().clone() for each in module.parameters()]
    engine = make_engine(module, Treatment(average=average))
    for step in range(10):
        engine.take_step(draw(16, step), CPU, Totals(CPU, {}), lambda: "")
        decay = [1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5][step]
        for kept, weights in zip(expected, module.parameters(), strict=True):
            kept.mul_(decay).add_(weights.detach(), alpha=1 - decay)
    trained = [each.detach().clone() for each in module.parameters()]
    with engine.at_average():
        torch.testing.assert_close([each.detach() for each in module.parameters()], expected)
    assert all(map(torch.equal, trained, module.parameters()))


def make_rate(steps_per_epoch: int, batch: int = 16, **options: Any) -> LearningRate:
    given = {"learning_rate": 1.0, **options}
    return make_learning_rate(OptimisationOptions(**given), steps_per_epoch, batch)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 675])
def test_the_learning_rate_rises_once_and_then_falls(total: int) -> None:
    rate = make_rate(total, epochs=1)
    rates = [rate(step) for step in range(total)]
    peak = rates.index(1.0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(0 < each <= 1 for each in rates)


def test_a_twentieth_of_all_steps_is_the_warm_up_and_a_cosine_follows() -> None:
    rate = make_rate(20, epochs=10)
    assert [rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1, 1])
    assert rate(105) == pytest.approx(0.5)
    # A step after the last one has the last one's.
    assert rate(200) == rate(199) == pytest.approx(0.5 * (1 - math.cos(math.pi / 190)))


def test_steps_multiply_the_rate_at_each_period() -> None:
    periods = {"schedule": "step", "step_epochs": 2.5, "step_factor": 0.5}
    rate = make_rate(4, epochs=8, warmup_epochs=1, **periods)
    assert [rate(step) for step in (3, 9, 10, 19, 20, 31)] == [1, 1, 0.5, 0.5, 0.25, 0.125]


def test_a_schedule_of_ones_own_multiplies_the_peak_and_the_warm_up() -> None:
    options = OptimisationOptions(learning_rate=1.0, epochs=2, base_batch=8, warmup_epochs=0.4)
    rate = make_learning_rate(options, 5, 16, lambda step, steps: 1 - step / steps)
    assert [rate(step) for step in range(10)] == pytest.approx(
        [2 * 0.5, 2 * 0.9, *(2 * (1 - step / 10) for step in range(2, 10))]
    )
    # In the first step or the last one; in others a factor of 10.
    for bad in ({0: -1.0}, {0: math.nan}, {0: None}, {9: math.nan}):
        with pytest.raises(ConfigurationError, match=rf"^schedule: .* in step {min(bad)} of 10"):
            make_learning_rate(options, 5, 16, bad.get)


WORKERS = (0, 2, 5)
GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    "text",
    ["", "3", "3=", "=4", "-1=4", "1=0.5", "1=nan", "1=inf", "one=4", "random=fast", "1=2=3"],
)
def test_a_rank_or_a_random_one_is_read_and_nothing_else(text):
    assert parse_straggler("3=4") == Straggler(3, 4.0)
    assert parse_straggler("random=1.5") == Straggler(None, 1.5)
    assert straggler.describe_straggler(Straggler(3, 4.0)).startswith("Straggler: rank 3, whose")
    with pytest.raises(ConfigurationError) as caught:
        parse_straggler(text)
    assert str(caught.value).endswith(f"for example 0=4 or random=4, found {text!r}")


def test_a_rank_that_computes_nothing_is_no_straggler():
    straggler.check_straggler(Straggler(None, 2), WORKERS)
    with pytest.raises(ConfigurationError, match=r"rank 1 computes nothing; .* 0, 2, 5"):
        straggler.check_straggler(Straggler(1, 2), WORKERS)


@given(st.integers(0, 2**63), st.integers(0, 10**6))
def test_one_worker_is_slow_in_each_step(seed, step):
    for chosen in (None, 5):
        slow = [
            Slowdown(Straggler(chosen, 4), place, WORKERS, seed, 1, CPU).is_slow(step)
            for place in range(len(WORKERS))
        ]
        assert sum(slow) == 1
        assert chosen is None or slow == [False, False, True]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_step_takes_so_many_times_as_long_and_a_gpu_does_nothing_meanwhile(device, monkeypatch):
    done = []
    monkeypatch.setattr(straggler.time, "sleep", done.append)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    for place in range(len(WORKERS)):
        Slowdown(Straggler(2, 4), place, WORKERS, 0, 0.5, device).wait(9)
    assert done == ([1.5] if device is CPU else [GPU, 1.5])
