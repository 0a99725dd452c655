"""Puts a model where it is trained, in the wrapper that the options name, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.sync.parameter_server.server import UpdateRule
from mpiddp.sync.parameter_server.serving import Roles
from mpiddp.training.data.factories import Factory
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.parallelism import ParallelismOptions
from mpiddp.training.options.groups.synchronisation import FRAMEWORK
from mpiddp.training.step.divergence import LossGuard, MarkedModel, SharedRefusal
from mpiddp.training.step.learning_rate import LearningRate
from mpiddp.training.step.moving_average import MovingAverage
from mpiddp.training.step.optimizer_step import LocalUpdate, Refusal, Treatment, make_optimizer
from mpiddp.training.step.stages import StageClock, make_clock, time_buffers
from mpiddp.training.step.step import Engine, Forward, split_batch
from mpiddp.training.step.traffic import Traffic, find_traffic
from mpiddp.training.step.weight_averaging import AveragingUpdate, Weights
from mpiddp.training.wrapping import overlap
from mpiddp.training.wrapping.activations import recompute
from mpiddp.training.wrapping.module_groups import find_groups, find_innermost
from mpiddp.training.wrapping.parameters import late_sparse_named
from mpiddp.training.wrapping.shared_model import (
    choose_mean,
    find_bound,
    replicate,
    serve,
    share_weights,
)
from mpiddp.wording import count_noun


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of."""

    module: nn.Module
    """On the CPU for FSDP, elsewhere on this rank's device."""
    forward: Forward
    batch: Batch
    """The first of the data, on this rank's device."""
    rate: LearningRate
    optimizer: Factory | None = None
    """Makes a user's own one."""


@dataclass(frozen=True)
class _Wrapped:
    """A model that its ranks share."""

    model: nn.Module
    hold: Callable[[], AbstractContextManager[object]] = nullcontext
    refusal: Refusal | None = None
    about: str = ""
    gathers: bool = False
    pace: overlap.Pace | None = None
    traffic: Traffic = field(default_factory=Traffic)


def start_engine(
    configuration: Configuration,
    session: Session,
    roles: Roles | None,
    start: EngineParts,
    fail: Callable[[BaseException], object],
) -> tuple[Configuration, Engine, overlap.Pace | None]:
    """Make what takes this rank's steps; collective.

    ``fail`` is called with the error that ends a parameter server's thread. Returns the
    configuration with what was chosen by measurement, and what was measured of overlap.

    Raises ConfigurationError for what is not possible here.
    """
    if configuration.sync != FRAMEWORK and session.device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"sync: {configuration.sync} expected CPUs, or GPUs of NVIDIA or AMD, found "
            f"{session.device}: mpiddp's own collectives have no calls for it; use --sync framework"
        )
    module, forward = start.module, start.forward
    clock = make_clock(session.device, session.world.size)
    passes, skips = configuration.accumulation_steps, configuration.on_nan == "skip"
    recompute_some(module, configuration)
    if roles is not None:
        module.to(session.device)
        make = partial(make_optimizer, configuration, own=start.optimizer)
        rule = UpdateRule(make, start.rate, find_bound(configuration), skips)
        serving = serve(session, roles, module, rule, fail)
        guard = LossGuard(module, skips=skips, marked=None)
        model = compile_model(module, configuration)
        engine = Engine(
            model, module, serving, guard, forward, passes,
            clock=clock, traffic=Traffic(servers=serving.sent, hides_nothing=True),
        )  # fmt: skip
        return configuration, engine, None
    if configuration.average_every is not None:
        share_weights(module)
        traffic = Traffic(hides_nothing=True)
        wrapped = _Wrapped(compile_model(module, configuration), traffic=traffic)
        clock = make_clock(session.device, ranks=1)
    else:
        configuration, wrapped = _wrap(configuration, session, start)
    update = _make_update(configuration, start, wrapped.refusal, clock)
    marked = wrapped.refusal if isinstance(wrapped.refusal, MarkedModel) else None
    guard = LossGuard(module, skips=skips, marked=marked)
    if configuration.parallel == "ddp" and configuration.average_every is None:
        time_buffers(clock, wrapped.model, module)
    engine = Engine(
        wrapped.model, module, update, guard, forward, passes, wrapped.hold,
        about=wrapped.about, gathers=wrapped.gathers, clock=clock, traffic=wrapped.traffic,
    )  # fmt: skip
    return configuration, engine, wrapped.pace


def _wrap(
    configuration: Configuration, session: Session, start: EngineParts
) -> tuple[Configuration, _Wrapped]:
    module, ranks = start.module, session.world.size
    if configuration.parallel == "ddp":
        return _wrap_in_ddp(configuration, session.device, start)
    if configuration.parallel == "fsdp":
        # It takes a second to import.
        from mpiddp.training.wrapping import fsdp

        about = fsdp.shard(module, session, configuration)
        refusal = SharedRefusal(session.device) if configuration.on_nan == "skip" else None
        model = compile_model(module, configuration)
        hold = partial(fsdp.hold_gradients, module)
        traffic = Traffic(fsdp.count_bytes(module, configuration.accumulation_steps))
        wrapped = _Wrapped(model, hold, refusal, about, gathers=True, traffic=traffic)
        return configuration, wrapped
    if ranks > 1:
        raise ConfigurationError(
            f"parallel: {configuration.parallel} is for one rank, found {ranks}: start one, or use "
            "--parallel ddp or fsdp"
        )
    model = module
    if configuration.parallel == "dp":
        model = _spread(module, session)
    return configuration, _Wrapped(compile_model(model, configuration))


def _wrap_in_ddp(
    configuration: Configuration, device: torch.device, start: EngineParts
) -> tuple[Configuration, _Wrapped]:
    part = split_batch(start.batch, configuration.accumulation_steps)[0]
    with late_sparse_named(start.module):
        replica = replicate(start.module, device, configuration)
        traffic = find_traffic(replica.model, replica.hook)
        # What torch makes of the wrapper has its attributes, too.
        compiled: Any = compile_model(replica.model, configuration)
        replica = replace(replica, model=compiled)
        configuration, pace = overlap.settle(configuration, replica, part, start.forward)
    hold = replica.model.no_sync
    wrapped = _Wrapped(replica.model, hold, replica.marked, pace=pace, traffic=traffic)
    return configuration, wrapped


def _spread(module: nn.Module, session: Session) -> nn.Module:
    found = len(session.gpus)
    if found < 2:
        raise ConfigurationError(
            f"parallel: dp is for one process with several GPUs, found {count_noun(found, 'GPU')}: "
            "use --parallel ddp or none"
        )
    return nn.DataParallel(module, device_ids=session.gpus)


def recompute_some(module: nn.Module, options: ParallelismOptions) -> None:
    """Have the model's larger parts recomputed in backward passes, if that is asked for."""
    if not options.activation_checkpointing:
        return
    groups = list(find_innermost(find_groups(module, options.wrap_parameters)))
    if not groups:
        raise ConfigurationError(
            "activation_checkpointing: expected modules with wrap_parameters = "
            f"{options.wrap_parameters} or more, found none: use a smaller --wrap-parameters"
        )
    recompute(groups)


def compile_model(model: nn.Module, options: ParallelismOptions) -> nn.Module:
    """The model as torch.compile makes it, if that is asked for.

    Raises ConfigurationError if the compiler does not work.
    """
    if not options.compile:
        return model
    device = next(model.parameters()).device
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:  # The compilers' errors have no type in common.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"compile: torch.compile does not work here: {type(error).__name__}: {reason}: leave "
            "out --compile"
        ) from None
    # One program for each size of batch: which one is used does not depend on earlier sizes.
    compiled: Any = torch.compile(model, dynamic=False)
    return cast(nn.Module, compiled)


def _make_update(
    configuration: Configuration, start: EngineParts, refusal: Refusal | None, clock: StageClock
) -> LocalUpdate:
    module = start.module
    optimizer = make_optimizer(configuration, list(module.parameters()), start.optimizer, module)
    decay = configuration.ema
    average = None if decay is None else MovingAverage(module, decay)
    scaler = start.forward.precision.scaler
    treatment = Treatment(
        refusal, scaler, configuration.clip_norm, average, keeps_sparse=start.optimizer is not None
    )
    every = configuration.average_every
    if every is None:
        return LocalUpdate(module, optimizer, start.rate, treatment)
    mean = choose_mean(configuration, next(module.parameters()).device)
    weights = Weights(module, mean, every, clock)
    return AveragingUpdate(module, optimizer, start.rate, treatment, weights)
