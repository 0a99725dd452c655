"""What a checkpoint holds of a training, and that saving changes nothing in it."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import layouts
import mpiddp
from mpiddp.checkpoints.optimizer_state import STRIDES, OptimizerState
from mpiddp.checkpoints.packing import pack, unpack
from mpiddp.checkpoints.storage.shards import list_stored
from mpiddp.errors import CheckpointError, ConfigurationError
from pool import Pools

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
"""All of torch's."""
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9}, "LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 4},
    "Muon": {"lr": 0.01}, "SparseAdam": {"lr": 0.01},
}  # fmt: skip
STEPS = 4
expect_equal = partial(assert_close, rtol=0, atol=0)
"""Bit for bit, types included."""


class Net(nn.Module):
    """With a head that is not always used, and weights that Muon and SparseAdam take."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.is_sparse = name == "SparseAdam"
        self.first = nn.Embedding(5, 4, sparse=self.is_sparse)
        has_bias = name not in ("Muon", "SparseAdam")
        self.second = nn.Linear(4, 3, bias=has_bias)
        self.head = nn.Linear(4, 3, bias=has_bias)
        if self.is_sparse:
            self.second.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, numbers: torch.Tensor, *, uses_head: bool = False) -> torch.Tensor:
        hidden = self.first(numbers)
        return self.second(hidden) + (self.head(hidden) if uses_head else 0)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for each in model.parameters() if each.requires_grad]
    # LBFGS takes one group alone.
    groups = parameters if name == "LBFGS" else [{"params": [each]} for each in parameters]
    return OPTIMIZERS[name](groups, **OPTIONS.get(name, {}))


def take_step(model: Net, optimizer: torch.optim.Optimizer, step: int, **options: bool) -> None:
    numbers = torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(step))

    def find_loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(numbers, **options) - step).square().mean()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(find_loss)
    # As scripts without a schedule do.
    for place, group in enumerate(optimizer.param_groups):
        group["lr"] *= 1 - 0.01 * (1 + place)


def read_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of all state, in a form that can be compared."""
    return [
        [each.detach().clone() for each in model.parameters()],
        copy.deepcopy(optimizer.state_dict()),
        torch.get_rng_state(),
    ]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_saves_change_nothing_and_each_can_be_gone_on_from(name: str, tmp_path: Path) -> None:
    plain = Net(name)
    optimizer = make_optimizer(name, plain)
    expected = [read_all(plain, optimizer)]
    for step in range(STEPS):
        take_step(plain, optimizer, step)
        expected.append(read_all(plain, optimizer))
    model = Net(name)
    optimizer = make_optimizer(name, model)
    with mpiddp.Checkpointer(tmp_path, model, optimizer, keep=STEPS + 1) as checkpointer:
        for step in range(STEPS):
            checkpointer.save(step)
            take_step(model, optimizer, step)
            expect_equal(read_all(model, optimizer), expected[step + 1])
    for step in range(STEPS):
        model = Net(name)
        optimizer = make_optimizer(name, model)
        with mpiddp.Checkpointer(tmp_path / "other", model, optimizer) as checkpointer:
            state = checkpointer.restore(tmp_path / f"step-{step}")
        assert state == {"step": step}
        expect_equal(read_all(model, optimizer), expected[step])
        for each in range(step, STEPS):
            take_step(model, optimizer, each)
        expect_equal(read_all(model, optimizer), expected[STEPS])


def test_a_parameter_without_a_gradient_has_no_state_yet(tmp_path: Path) -> None:
    models = [Net(), Net()]
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in models]
    for step in range(2):
        take_step(models[0], optimizers[0], step)
    with mpiddp.Checkpointer(tmp_path, models[0], optimizers[0]) as checkpointer:
        checkpointer.save(2)
    with mpiddp.Checkpointer(tmp_path, models[1], optimizers[1]) as checkpointer:
        assert checkpointer.restore() == {"step": 2}
    assert models[1].head.weight not in optimizers[1].state
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2, 5):
            take_step(model, optimizer, step, uses_head=True)
    expect_equal(read_all(models[0], optimizers[0]), read_all(models[1], optimizers[1]))


def freeze(model: Net) -> torch.optim.Optimizer:
    """An optimizer that does not have the head, as one that is tuned later."""
    parts = [*model.first.parameters(), *model.second.parameters()]
    return torch.optim.Adam(parts, 0.1)


def freeze_gradients(model: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model.head.requires_grad_(False)
    return optimizer


def add_head(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.1})


def exchange(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """The head in place of another part: the optimizer has as many parameters as before."""
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [*model.first.parameters(), *model.head.parameters()]})


@pytest.mark.parametrize(
    ("begin", "unfreeze"),
    [
        (freeze, add_head),
        (freeze, exchange),
        (freeze_gradients, lambda model, _: model.head.requires_grad_(True)),
    ],
)
def test_state_of_a_frozen_parameter_waits_until_it_is_trained_again(begin, unfreeze, tmp_path):
    model = Net()
    whole = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(3):
        take_step(model, whole, step, uses_head=True)
    with mpiddp.Checkpointer(tmp_path, model, whole) as checkpointer:
        checkpointer.save(3)
    for _ in range(2):
        model = Net()
        optimizer = begin(model)
        with mpiddp.Checkpointer(tmp_path, model, optimizer) as checkpointer:
            assert checkpointer.restore() == {"step": 3}
            checkpointer.save(3)
    unfreeze(model, optimizer)
    take_step(model, optimizer, 3, uses_head=True)
    found = optimizer.state[model.head.weight]
    assert int(found["step"]) == 4
    assert found["exp_avg"].abs().sum() > 0


def test_an_optimizer_with_parameters_of_nobody_is_refused(tmp_path: Path) -> None:
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.1)
    with pytest.raises(ConfigurationError, match=r"group 0 as number 2 one of shape \(1, 2\)"):
        mpiddp.Checkpointer(tmp_path, model, optimizer)
    torch.autograd.backward(head(model(torch.ones(4, 3))).sum())
    optimizer.step()
    with mpiddp.Checkpointer(tmp_path, model, optimizer, head=head) as checkpointer:
        checkpointer.save(1)
    expected = copy.deepcopy((head.state_dict(), optimizer.state_dict()))
    optimizer.step()
    with mpiddp.Checkpointer(tmp_path, model, optimizer, head=head) as checkpointer:
        checkpointer.restore()
    expect_equal(expected, (head.state_dict(), optimizer.state_dict()))


def test_what_does_not_fit_is_named_with_what_to_do(tmp_path: Path) -> None:
    def make(features: int = 3, size: int = 3) -> nn.Module:
        model = nn.Linear(features, 2)
        model.register_buffer("seen", torch.arange(size), persistent=False)
        return model

    with mpiddp.Checkpointer(tmp_path, make()) as checkpointer:
        checkpointer.save(1)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make().parameters(), 0.1), 5)
    for other, more, problem in (
        (make(features=4), {}, r"weight: expected \(2, 4\), found \(2, 3\)"),
        (nn.Sequential(make()), {}, r"0\.\w+ is not in it"),
        (make(size=1), {}, r".*\b(size|shape)\b.*"),
        (make(), {"schedule": schedule}, "it has no state of 'schedule'"),
    ):
        with pytest.raises(CheckpointError) as caught:
            mpiddp.Checkpointer(tmp_path, other, **more).restore()
        said = str(caught.value)
        assert re.search(f"step-1 does not fit: {problem}; go on with the model", said), said
        assert "a directory of their own" in said and "\n" not in said


ON_RANKS = {
    "ddp": ("store_channels_last", "transpose", "tie", "flatten", "freeze", "give_type"),
    "fsdp": ("store_channels_last", "transpose", "tie", "expand"),
}
"""FSDP takes no more of either."""
MODELS = {
    "ddp": ("dense", "integer", "frozen", "tied", "complex", "sparse", "empty", "mixed"),
    "fsdp": ("dense", "integer", "frozen", "tied"),
}


def choose_optimizer(kind: str) -> str:
    return "plain SGD" if kind == "sparse" else "RMSprop"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "AdamW") for kind in layouts.KINDS),
        *(("transpose", name) for name in ("SGD", "Adagrad", "RMSprop")),
        *((kind, choose_optimizer(kind)) for kind in (*MODELS["ddp"], "unused")),
    ],
)
def test_a_resumed_process_ends_as_one_that_nobody_stops(kind, name, tmp_path):
    ((whole, found),) = layouts.train(None, tmp_path, "alone", {kind: name})
    assert layouts.compare(found, whole) == []


@pytest.mark.parametrize("parallel", ON_RANKS)
def test_resumed_ranks_end_as_those_that_nobody_stops(parallel, pool, tmp_path):
    kinds = dict.fromkeys(ON_RANKS[parallel], "AdamW")
    kinds |= {kind: choose_optimizer(kind) for kind in MODELS[parallel]}
    for found in pool("openmpi", 3).call(layouts.train, tmp_path, parallel, kinds).values:
        for kind, (whole, resumed) in zip(kinds, found, strict=True):
            assert layouts.compare(resumed, whole) == [], kind


class Holder:
    """A script's own part, which takes the tensors that it is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_state() -> dict[str, Any]:
    buffer, numbers = torch.arange(24.0).view(4, 6), torch.tensor([1 + 2j, 3 - 4j])
    alike = torch.ones(3)
    return {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "with gaps": torch.arange(20.0)[::2].view(2, 5),
        "thin": torch.arange(3.0).as_strided((3, 1), (1, 7)),
        "one row": torch.arange(3.0).as_strided((1, 3), (1, 1)),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "windows": torch.arange(8).unfold(0, 3, 1), "conjugate": torch.tensor([5 + 6j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parts": [buffer[:2], buffer[1:], buffer.t(), buffer.view(torch.int32)[3]],
        "numbers": (torch.view_as_real(numbers), numbers, numbers.conj()),
        "alike": {"one": alike, "other": alike}, "apart": list(torch.arange(12.0).view(3, 4)),
        "leaf": torch.ones(2, requires_grad=True), "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2, 3).t(), requires_grad=False),
        "bits": torch.tensor([float("nan"), -0.0, float("inf")]), "nothing": torch.empty(0, 3).t(),
    }  # fmt: skip


def flatten(state: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(state)


@pytest.mark.parametrize("wait", [False, True])
def test_a_part_of_a_script_gets_its_tensors_as_they_were(wait: bool, tmp_path: Path) -> None:
    model, state = nn.Linear(2, 2), make_state()
    with mpiddp.Checkpointer(tmp_path, model, part=Holder(state)) as checkpointer:
        checkpointer.save(1, wait=wait, **state)
    part = Holder({})
    with mpiddp.Checkpointer(tmp_path, model, part=part) as checkpointer:
        values = checkpointer.restore()
    expected = list(map(describe, flatten(state)))
    for found in (part.state, {key: values[key] for key in state}):
        assert list(found) == list(state)
        assert list(map(describe, flatten(found))) == expected
        # What is written to one of those that share memory is in the others.
        assert find_effects(found) == find_effects(state)
        assert found["alike"]["one"] is found["alike"]["other"]
    assert "part.apart.1" in list_stored(tmp_path / "step-1")


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    return *layouts.describe(tensor)[:-1], tensor.requires_grad, type(tensor), repr(tensor)


def find_effects(state: dict[str, Any]) -> list[list[bool]]:
    """Which tensors change if the first element of one changes, for each of them."""
    tensors = [each.detach() for each in flatten(state)]
    found = []
    for each in tensors:
        if not each.numel():
            continue
        before = [other.resolve_conj().resolve_neg().clone() for other in tensors]
        first = each.as_strided((1,), (1,), each.storage_offset())
        kept = first.clone()
        first.fill_(7)
        found.append(
            [not torch.equal(other, old) for other, old in zip(tensors, before, strict=True)]
        )
        first.copy_(kept)
    return found


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_could_not_come_back_is_refused(tmp_path: Path) -> None:
    model, ones = nn.Linear(2, 2), torch.ones(3)
    notes = {
        "found set": {1, 2}, "found tuple": {(1, 2): 3},
        "found Typed, which could": ones.as_subclass(layouts.Typed),
        "quantized": torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
        "sparse_coo": ones.to_sparse(),
    }  # fmt: skip
    with mpiddp.Checkpointer(tmp_path, model) as checkpointer:
        for said, note in notes.items():
            with pytest.raises(ConfigurationError, match=f"state given.note: .*{said}"):
                checkpointer.save(1, note=note, wait=True)
    model.register_buffer("mask", torch.ones(1).expand(4))
    with (
        mpiddp.Checkpointer(tmp_path, model) as checkpointer,
        pytest.raises(ConfigurationError, match=r"state mask: .*an expanded one.*clone\(\)"),
    ):
        checkpointer.save(1)


def begin() -> tuple[nn.Module, dict[str, Any]]:
    """A model whose weights have their channels last, and the packed state of its optimizer."""
    model, optimizer = layouts.make("store_channels_last", "AdamW", "alone")
    layouts.take_steps(model, optimizer, 0, 2)
    return model, OptimizerState(optimizer, {"": model}).state_dict()


def drop_layout(state: dict[str, Any]) -> dict[str, Any]:
    """As before strides were stored."""
    del state[STRIDES]
    states = {
        name: {key: value.contiguous() for key, value in each.items()}
        for name, each in state["state"].items()
    }
    return {**state, "state": states}


@pytest.mark.parametrize("change", [drop_layout, dict])
@pytest.mark.parametrize("kind", ["store_channels_last", "flatten"])
def test_state_has_the_layout_of_its_parameter(change: Callable[[Any], Any], kind: str) -> None:
    """Even if the checkpoint is old, or was saved from another layout."""
    model, state = begin()
    other, optimizer = layouts.make(kind, "AdamW", "alone")
    other.load_state_dict(model.state_dict())
    OptimizerState(optimizer, {"": other}).load_state_dict(unpack(pack(change(state))))
    for parameter in other.parameters():
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert optimizer.state[parameter][key].stride() == parameter.stride()


def test_state_that_lies_otherwise_than_its_parameter_stays_so(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    square = torch.arange(9.0).view(3, 3).t()
    optimizer.state[model.weight] = {"square": square, "list": [square], "name": "own"}
    with mpiddp.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
        optimizer.state.clear()
        checkpointer.restore()
    found = optimizer.state[model.weight]
    assert found["square"].stride() == (1, 3) and torch.equal(found["square"], square)
    assert found["list"][0] is found["square"] and found["name"] == "own"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_second_optimizer_keeps_types_and_strides(is_old, tmp_path, monkeypatch):
    """Also from a checkpoint that has its state by the numbers of its parameters."""
    model, head = nn.Linear(3, 2), nn.Linear(4, 2).to(torch.bfloat16)
    head.weight = nn.Parameter(head.weight.detach().t().contiguous().t())
    first, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, head))
    momentum = torch.full((2, 4), 1.001).t().contiguous().t()
    second.state[head.weight] = {"momentum_buffer": momentum, "others": [momentum / 3]}
    with monkeypatch.context() as patch:
        if is_old:
            patch.setattr("mpiddp.checkpoints.checkpointer._keep_by_names", lambda part, _: part)
        with mpiddp.Checkpointer(tmp_path, model, first, head=head, second=second) as checkpointer:
            checkpointer.save(1)
    second.state.clear()
    with mpiddp.Checkpointer(tmp_path, model, first, head=head, second=second) as checkpointer:
        checkpointer.restore()
    found = second.state[head.weight]
    for one, other in ((found["momentum_buffer"], momentum), (found["others"][0], momentum / 3)):
        assert one.dtype == torch.float32 and one.stride() == (1, 2) and torch.equal(one, other)


def test_a_second_optimizer_of_sharded_parameters_goes_on(pool: Pools, tmp_path: Path) -> None:
    for whole, resumed, said in pool("openmpi", 2).call(layouts.resume_two, tmp_path).values:
        assert layouts.compare(resumed, whole) == []
        assert "of the shape of its parameter, (4, 6), found (6,), which" in said
