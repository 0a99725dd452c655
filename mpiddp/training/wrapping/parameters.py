"""What a parameter may be with which options: looked at once, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mpiddp.checkpoints.ddp_buckets import list_sparse
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import quote
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.optimisation import LEARNING_RATES
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER
from mpiddp.training.wrapping.module_groups import find_groups, list_parameters


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model, and how it is trained."""

    name: str
    tensor: nn.Parameter
    is_sparse: bool
    """Whether its gradients are sparse."""
    dtype: torch.dtype
    """Of the first trained parameter that is sent together with it."""

    @property
    def is_trained(self) -> bool:
        return self.tensor.requires_grad

    @property
    def has_other_type(self) -> bool:
        return self.is_trained and self.tensor.dtype != self.dtype

    @property
    def is_empty(self) -> bool:
        return self.is_trained and self.tensor.numel() == 0

    @property
    def is_complex(self) -> bool:
        return self.is_trained and self.tensor.is_complex()


@dataclass(frozen=True)
class ParameterRule:
    """Some parameters cannot be trained with some values of an option."""

    option: str
    applies: Callable[[Configuration, str], bool]
    """To these options, with this backend of torch.distributed."""
    is_met: Callable[[Parameter], bool]
    found: str
    """What such a parameter is; ``{dtype}`` and ``{other}`` are types, its own and the others'."""
    advice: str


def _is_fsdp(configuration: Configuration, _: str = "") -> bool:
    return configuration.parallel == "fsdp"


def _has_servers(configuration: Configuration, _: str) -> bool:
    return configuration.sync == PARAMETER_SERVER


def _averages_gradients(configuration: Configuration) -> bool:
    return configuration.parallel == "ddp" and configuration.average_every is None


def _has_schedules(configuration: Configuration, _: str) -> bool:
    others = (FRAMEWORK, PARAMETER_SERVER)
    return _averages_gradients(configuration) and configuration.sync not in others


def _has_nccl(configuration: Configuration, backend: str) -> bool:
    is_framework = configuration.sync == FRAMEWORK
    return _averages_gradients(configuration) and is_framework and backend == "nccl"


def _clips_sparse(configuration: Configuration, _: str) -> bool:
    return configuration.clip_norm is not None and configuration.optimizer not in LEARNING_RATES


SCALED = (torch.float32, torch.float64)
"""Types of gradients that torch's loss scaler takes on GPUs."""
SPARSE, COMPLEX = "has sparse gradients", "is complex"
EMPTY, TYPES = "has no elements", "is of {dtype} beside others of {other}"
RULES = (
    ParameterRule(
        "model",
        lambda *_: True,
        lambda each: each.tensor.is_meta,
        "is on the device meta, without values",
        "make the model on the CPU",
    ),
    ParameterRule(
        "sync",
        _has_schedules,
        lambda each: each.is_sparse,
        SPARSE,
        "make its embedding with sparse=False, or give --sync framework",
    ),
    ParameterRule(
        "sync",
        _has_nccl,
        lambda each: each.is_sparse,
        f"{SPARSE}, which NCCL does not add",
        "make its embedding with sparse=False, or give --backend gloo",
    ),
    ParameterRule(
        "sync", _has_servers, lambda each: each.is_complex, COMPLEX, "give --sync framework"
    ),
    ParameterRule(
        "sync", _has_servers, lambda each: each.has_other_type, TYPES, "give --sync auto"
    ),
    ParameterRule(
        "parallel",
        _is_fsdp,
        lambda each: each.is_sparse,
        SPARSE,
        "make its embedding with sparse=False, or give --parallel ddp",
    ),
    ParameterRule("parallel", _is_fsdp, lambda each: each.is_empty, EMPTY, "give --parallel ddp"),
    ParameterRule(
        "parallel",
        _is_fsdp,
        lambda each: each.has_other_type,
        TYPES,
        "give --parallel ddp, or a smaller --wrap-parameters, so that they are in separate groups",
    ),
    ParameterRule(
        "clip_norm",
        _clips_sparse,
        lambda each: each.is_sparse,
        SPARSE,
        "make its embedding with sparse=False, or leave out --clip-norm",
    ),
    ParameterRule(
        "precision",
        lambda configuration, _: configuration.precision == "fp16",
        lambda each: each.is_trained and each.tensor.dtype not in SCALED,
        "is of {dtype}",
        "give --precision bf16 or fp32",
    ),
)
"""FSDP gathers a group's parameters as one tensor, torch has no norm of sparse gradients, and
servers hold one flat tensor of real numbers."""


def check_parameters(module: nn.Module, configuration: Configuration, backend: str) -> None:
    """Raise ConfigurationError if a parameter cannot be trained as the options say.

    ``backend``: the session's.
    """
    for each in _list_parameters(module, configuration):
        for rule in RULES:
            if rule.applies(configuration, backend) and rule.is_met(each):
                value = getattr(configuration, rule.option)
                found = rule.found.format(dtype=each.tensor.dtype, other=each.dtype)
                raise ConfigurationError(
                    f"{rule.option} = {quote(value)} cannot be combined with parameter "
                    f"{each.name}, which {found}: {rule.advice}"
                )


def _list_parameters(module: nn.Module, configuration: Configuration) -> Iterator[Parameter]:
    groups = find_groups(module, configuration.wrap_parameters) if _is_fsdp(configuration) else []
    sparse = {id(each) for each in list_sparse(module).values()}
    names = {id(each): name for name, each in module.named_parameters()}
    for group in list_parameters(module, groups):
        dtype = next((each.dtype for each in group if each.requires_grad), torch.float32)
        for each in group:
            yield Parameter(names[id(each)], each, id(each) in sparse, dtype)


@contextmanager
def late_sparse_named(module: nn.Module) -> Iterator[None]:
    """Names the parameter if DDP fails because of a sparse gradient that no module declares.

    Raises ConfigurationError.
    """
    try:
        yield
    except NotImplementedError:
        told = list_sparse(module)
        for name, each in module.named_parameters():
            if each.grad is not None and each.grad.is_sparse and name not in told:
                raise ConfigurationError(
                    f"parallel = 'ddp' cannot be combined with parameter {name}, which {SPARSE} "
                    "although it is in no nn.Embedding or nn.EmbeddingBag with sparse=True, the "
                    "only ones that DDP knows of: put it into one, or compute it with sparse=False"
                ) from None
        raise
