"""Options that would have no effect, or cannot be had, together with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import quote
from mpiddp.training.options.groups.data import AUTO_BATCH
from mpiddp.training.options.groups.optimisation import LEARNING_RATES
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER


@dataclass(frozen=True)
class OptionRule:
    """``options`` may differ from their defaults only if the option ``other`` allows it."""

    options: tuple[str, ...]
    other: str
    allows: Callable[[Any], bool]
    """Whether ``options`` may be given beside this value of ``other``."""
    advice: str
    """What to give instead."""
    unless: str = ""
    """The rule does not apply if this option is given."""
    values: tuple[Any, ...] = ()
    """The values of ``options`` that the rule is about; if empty, all but the default."""


RULES = (
    OptionRule(
        ("evaluate_only", "weights_prefix", "weights_except"),
        "weights",
        lambda path: path is not None,
        "give --weights FILE.pt or RUN",
    ),
    OptionRule(
        ("weights",),
        "resume",
        lambda resume: resume in ("auto", "never"),
        "both say where the run begins: leave out one of them",
        unless="evaluate_only",
    ),
    OptionRule(("export",), "evaluate_only", lambda only: not only, "leave out --evaluate-only"),
    OptionRule(("predict",), "evaluate_only", bool, "give --evaluate-only and --weights"),
    OptionRule(
        ("augment",),
        "data",
        lambda name: name in ("mnist", "cifar10", "imagefolder"),
        "it is for mnist, cifar10 and imagefolder",
    ),
    OptionRule(
        ("download",), "data", lambda name: name in ("mnist", "cifar10"), "it is for mnist, cifar10"
    ),
    OptionRule(("text", "context"), "data", lambda name: name == "text", "give --data text"),
    OptionRule(
        ("image_size",), "data", lambda name: name == "imagefolder", "it is for imagefolder"
    ),
    OptionRule(("shape",), "data", lambda name: name == "synthetic", "it is for synthetic"),
    OptionRule(
        ("transport", "wire_dtype", "overlap"),
        "sync",
        lambda sync: sync not in (FRAMEWORK, PARAMETER_SERVER),
        "give --sync auto, or --sync ALGORITHM",
    ),
    OptionRule(
        ("load",),
        "sync",
        lambda sync: sync not in (FRAMEWORK, "auto", PARAMETER_SERVER),
        "name its algorithm: --sync NAME",
    ),
    OptionRule(
        ("servers", "server_placement", "staleness"),
        "sync",
        lambda sync: sync == PARAMETER_SERVER,
        "give --sync parameter-server",
    ),
    OptionRule(
        ("sync",),
        "parallel",
        lambda parallel: parallel == "ddp",
        "its gradients are exchanged in another way: leave out --sync, or give --parallel ddp",
    ),
    OptionRule(
        ("bucket_mb", "find_unused_parameters"),
        "parallel",
        lambda parallel: parallel == "ddp",
        "give --parallel ddp",
    ),
    OptionRule(
        ("bucket_mb", "find_unused_parameters"),
        "sync",
        lambda sync: sync != PARAMETER_SERVER,
        "servers get all gradients at once: give another --sync",
    ),
    OptionRule(
        ("batch_size",),
        "parallel",
        lambda parallel: parallel in ("ddp", "none"),
        "a rank cannot take a step by itself to try a size: give a number",
        values=(AUTO_BATCH,),
    ),
    OptionRule(
        ("average_every",),
        "parallel",
        lambda parallel: parallel == "ddp",
        "only there has each rank of several the whole model: give --parallel ddp",
    ),
    OptionRule(
        ("average_every",),
        "sync",
        lambda sync: sync != PARAMETER_SERVER,
        "servers hold the weights: give another --sync, or --staleness STEPS",
    ),
    OptionRule(
        ("wire_dtype", "overlap", "bucket_mb", "find_unused_parameters"),
        "average_every",
        lambda steps: steps is None,
        "it is about gradients, and weights are sent: leave out one of them",
    ),
    OptionRule(
        ("shard_within", "cpu_offload"),
        "parallel",
        lambda parallel: parallel == "fsdp",
        "give --parallel fsdp",
    ),
    OptionRule(
        ("wrap_parameters",),
        "parallel",
        lambda parallel: parallel == "fsdp",
        "give --parallel fsdp, or --activation-checkpointing",
        unless="activation_checkpointing",
    ),
    OptionRule(
        ("cpu_offload",),
        "clip_norm",
        lambda longest: longest is None,
        "GPUs cannot add up norms that are in main memory: leave out one of them",
    ),
    OptionRule(
        ("clip_norm", "ema"),
        "sync",
        lambda sync: sync != PARAMETER_SERVER,
        "a server has no rank's whole gradient, and no rank has every update: give another --sync",
    ),
    OptionRule(
        ("precision",),
        "sync",
        lambda sync: sync != PARAMETER_SERVER,
        "servers know of no loss scale: give --precision bf16",
        values=("fp16",),
    ),
    OptionRule(
        ("momentum", "weight_decay"),
        "optimizer",
        lambda name: name in LEARNING_RATES,
        "they are for sgd and adamw: have your function set them",
    ),
    OptionRule(
        ("step_epochs", "step_factor"),
        "schedule",
        lambda schedule: schedule == "step",
        "give --schedule step",
    ),
)


def refuse_contradictions(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, with both names, for options that do not go together."""
    for rule in RULES:
        if rule.allows(values[rule.other]) or (rule.unless and values[rule.unless]):
            continue
        is_missing = values[rule.other] is None
        other = _describe(rule.other, values[rule.other])
        clash = f"needs {rule.other}" if is_missing else f"cannot be combined with {other}"
        for name in rule.options:
            found = values[name]
            if found in rule.values or (not rule.values and found != defaults[name]):
                raise ConfigurationError(f"{_describe(name, found)} {clash}: {rule.advice}")
    batch, passes = values["batch_size"], values["accumulation_steps"]
    if batch % passes:
        raise ConfigurationError(
            f"accumulation_steps: expected a divisor of batch_size = {batch}, found {passes}"
        )


def _describe(name: str, value: object) -> str:
    """As in TOML."""
    if name == "batch_size" and value == AUTO_BATCH:
        value = "auto"
    return f"{name} = {str(value).lower() if isinstance(value, bool) else quote(value)}"
