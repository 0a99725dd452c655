"""Trainings whose tensors lie in memory in unusual ways, or are of unusual kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kinds
import mpiddp
from mistakes import hear
from mpiddp.checkpoints.state import find_module

CUT, STEPS = 3, 7
Bits = dict[str, Any]


class Typed(torch.Tensor):
    """A type of tensors of somebody's own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images).mean(dim=(2, 3))
        self.get_buffer("total")[0] += hidden.detach().sum()
        return self.third(self.second(hidden))

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 3, 6, 6, generator=generator)


def store_channels_last(net: Net) -> None:
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def transpose(net: Net) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach().t())


def tie(net: Net) -> None:
    net.third.weight = net.second.weight


def flatten(net: Net) -> None:
    """All parameters are views of one piece of memory."""
    parameters = list(net.parameters())
    flat = torch.cat([each.detach().flatten() for each in parameters])
    sizes = [each.numel() for each in parameters]
    for each, part in zip(parameters, flat.split(sizes), strict=True):
        each.data = part.view_as(each)


def freeze(net: Net) -> None:
    transpose(net)
    net.second.requires_grad_(False)


def give_type(net: Net) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach().as_subclass(Typed))
    net.register_buffer("total", torch.zeros(1).as_subclass(Typed), persistent=False)


def expand(net: Net) -> None:
    net.register_buffer("total", torch.zeros(1).expand(5), persistent=False)


def conjugate(net: Net) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j]).conj()
    net.register_buffer("phase", numbers)
    net.register_buffer("sign", numbers.imag)


KINDS: dict[str, Callable[[Net], None]] = {
    each.__name__: each
    for each in (store_channels_last, transpose, tie, flatten, freeze, give_type, expand, conjugate)
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.9),
    # Checkpoints hold no sparse momentum.
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
}


def make(kind: str, optimizer: str, parallel: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net: Any = Net() if kind in KINDS else kinds.Model(kind, 10, 4)
    if kind in KINDS and (parallel != "fsdp" or kind not in ("store_channels_last", "transpose")):
        # FSDP takes contiguous parameters alone.
        KINDS[kind](net)
    model: nn.Module = net
    if parallel == "ddp":
        # Which ranks add first depends on the buckets, so a resumed run must have the same ones.
        model = DistributedDataParallel(net, bucket_cap_mb=1e-4)  # type: ignore[arg-type]
    elif parallel == "fsdp":
        fully_shard(model)
    return model, OPTIMIZERS[optimizer]([each for each in net.parameters() if each.requires_grad])


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int, rank: int = 0
) -> None:
    net: Any = find_module(model)
    for step in range(begin, end):
        samples = net.draw(torch.Generator().manual_seed(100 * step + rank))
        loss = model(samples).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def read(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """The numbers of parameters, buffers and the optimizer's state, how they lie, and their types.

    Of sharded ones this rank's part.
    """
    module = find_module(model)
    found: dict[str, Any] = dict(module.named_buffers())
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {name: parameter, **{f"{name}.{key}": each for key, each in state.items()}}
    return {name: describe(each) for name, each in found.items()}


def compare(found: Bits, expected: Bits) -> list[str]:
    """The names of what differs: whole states are too long to be shown."""
    return [name for name in expected | found if found.get(name) != expected.get(name)]


def describe(tensor: Any) -> tuple[Any, ...]:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    flags = tensor.is_conj(), tensor.is_neg()
    kind = type(tensor.detach()).__name__, tensor.dtype, tensor.stride(), *flags
    return *kind, tensor.detach().resolve_conj().resolve_neg().tolist()


def train(
    session: mpiddp.Session | None, folder: Path, parallel: str, kinds: dict[str, str]
) -> list[tuple[Bits, Bits]]:
    """For each kind, by its optimizer: what a training ends with that nobody stops, and one that
    goes on from a checkpoint."""
    torch.set_num_threads(1)
    rank, found = session.world.rank if session else 0, []
    for kind, name in kinds.items():
        model, optimizer = make(kind, name, parallel)
        with mpiddp.Checkpointer(folder / f"{kind}-{name}", model, optimizer) as checkpointer:
            take_steps(model, optimizer, 0, CUT, rank)
            checkpointer.save(CUT)
            take_steps(model, optimizer, CUT, STEPS, rank)
        whole = read(model, optimizer)
        model, optimizer = make(kind, name, parallel)
        with mpiddp.Checkpointer(folder / f"{kind}-{name}", model, optimizer) as checkpointer:
            assert checkpointer.restore() == {"step": CUT}
        take_steps(model, optimizer, CUT, STEPS, rank)
        found.append((whole, read(model, optimizer)))
    return found


def resume_two(session: mpiddp.Session, folder: Path) -> tuple[Bits, Bits, str]:
    """Sharded modules with an optimizer each, as ``train``; and what is said of sharded state of
    another shape."""

    def make_two() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        fully_shard(model)
        return model, [torch.optim.AdamW(each.parameters(), 0.01) for each in model]

    def take(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
        for _ in range(steps):
            torch.autograd.backward(model(torch.ones(3, 4)).square().mean())
            for each in optimizers:
                each.step()
                each.zero_grad()

    model, (first, second) = make_two()
    with mpiddp.Checkpointer(folder, model, first, second=second) as checkpointer:
        take(model, [first, second], 2)
        checkpointer.save(2)
        take(model, [first, second], 2)
    whole = read(model, second)
    model, (first, second) = make_two()
    with mpiddp.Checkpointer(folder, model, first, second=second) as checkpointer:
        checkpointer.restore()
    take(model, [first, second], 2)
    resumed = read(model, second)
    weight = next(iter(second.state))
    second.state[weight]["row"] = weight.detach().sum(dim=0)
    with mpiddp.Checkpointer(folder / "more", model, first, second=second) as checkpointer:
        return whole, resumed, hear(lambda: checkpointer.save(1))
