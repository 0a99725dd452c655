"""Options of the parallelism: how the ranks share a model, and how a step is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mpiddp.options.checks import check, is_positive, positive
from mpiddp.options.fields import Argument


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """How ranks share a model, and how a step is computed."""

    parallel: Literal["ddp", "fsdp", "dp", "none"] = "ddp"
    """Each rank has the whole model (ddp) or a shard of it (fsdp); dp is nn.DataParallel, for one
    process with several GPUs; none is for one rank."""

    accumulation_steps: int = 1
    """Passes into which a step's batch is split: less memory, the same step."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of forward passes; parameters stay in fp32. fp16 needs GPUs."""

    compile: bool = False
    """Compile the model with torch.compile."""

    channels_last: bool = False
    """Store images with their channels last, which is quicker for convolutions on many GPUs."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, for modules with at least wrap_parameters
    parameters."""

    wrap_parameters: int = 1_000_000
    """Minimum number of parameters for a separate FSDP group, not counting those of modules inside
    that have their own."""

    shard_within: Literal["world", "node"] = "world"
    """Ranks over which fsdp shards the parameters: all, or those of one node."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in main memory, with fsdp on GPUs."""

    bucket_mb: Annotated[float, Argument("MB", positive("a number of MB"))] = 25
    """Size of DDP's gradient buckets in MB."""

    find_unused_parameters: bool = False
    """Have DDP look in each step for parameters that take no part in the loss; it waits for the
    gradients of all parameters otherwise."""

    deterministic: bool = False
    """Use deterministic algorithms only, so that a GPU computes the same bits each time."""

    def __post_init__(self) -> None:
        passes = self.accumulation_steps
        check("accumulation_steps", passes >= 1, "1 or more", passes)
        least = self.wrap_parameters
        check("wrap_parameters", least >= 1, "1 or more parameters", least)
        size = self.bucket_mb
        check("bucket_mb", is_positive(size), "a number of MB > 0", size)
