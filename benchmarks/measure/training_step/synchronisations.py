"""What ``python -m benchmarks training-step`` compares, in which of its two jobs; its options.

torchrun's job has the framework's own DDP, one rank without any of it, and ``nn.DataParallel``;
mpiddp's has its synchronisations, and one rank without any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from benchmarks.measure import trials
from benchmarks.records.contenders import MPI_JOB, TORCH_JOB, TRANSPORTS
from benchmarks.records.options import Count, Seconds, SeveralRanks
from benchmarks.records.workloads import SHAPES, Workload, parse_workload
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER, UNLIMITED

ALONE, OWN_ALONE, DATA_PARALLEL = "alone", "alone-mpiddp", "data-parallel"
FUSED = "framework-fused"
"""The framework's DDP with torch's fused optimizer, which mpiddp's trainer takes as well."""
BACKEND = "framework-mpiddp"
"""The framework's own DDP over the backend ``mpiddp`` in place of Gloo."""
AUTO = "auto"
RANKS = "ranks"
"""In place of a number of servers: as many as there are ranks."""
USUAL = (
    FRAMEWORK, FUSED, BACKEND, AUTO, "ring", "gather-broadcast", PARAMETER_SERVER,
    f"{PARAMETER_SERVER}:servers={RANKS}",
)  # fmt: skip
WIRE_DTYPES = ("auto", "float32", "bfloat16", "float16")
CHECKED_STEPS = 2
"""The second one moves by what the first one left in the optimizer, too."""
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.001, 0.9, 0.0005
"""Of every contender's SGD, with Nesterov's momentum; the rate is small, since the samples never
change."""


@dataclass(frozen=True)
class Synchronisation:
    sync: str
    transport: str = AUTO
    wire_dtype: str = AUTO
    servers: str = "1"
    """A number, or ``ranks``."""
    placement: str = "colocated"
    staleness: str = "0"

    @property
    def job(self) -> str:
        others = (FRAMEWORK, FUSED, BACKEND, ALONE, DATA_PARALLEL)
        return TORCH_JOB if self.sync in others else MPI_JOB

    @property
    def serves(self) -> bool:
        return self.sync == PARAMETER_SERVER

    @property
    def averages(self) -> bool:
        return self.job == MPI_JOB and not self.serves and self.sync != OWN_ALONE

    @property
    def is_in_step(self) -> bool:
        """Whether all workers have the same weights after each step."""
        return self.staleness == "0"

    @property
    def name(self) -> str:
        """All that tells it from the others."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        pairs = [f"{key}={value}" for key, value in values.items() if value != usual[key]]
        return f"{self.sync}{' ' if self.averages else ':'}{','.join(pairs[1:])}".rstrip(" :")

    def __str__(self) -> str:
        return self.name

    def count_servers(self, ranks: int) -> int:
        return ranks if self.servers == RANKS else int(self.servers)

    def count_workers(self, ranks: int) -> int:
        if self in BASES:
            return 1
        dedicated = self.serves and self.placement == "dedicated"
        return ranks - self.count_servers(ranks) if dedicated else ranks

    def configure(self, ranks: int, batch_size: int, seed: int) -> Configuration:
        """The trainer's configuration. Raises ConfigurationError."""
        # Literals by their type: they were read from a list of those, or are refused.
        chosen: dict[str, Any] = {
            "transport": self.transport,
            "wire_dtype": self.wire_dtype,
            "server_placement": self.placement,
        }
        return Configuration(
            **chosen,
            sync=self.sync if self.averages or self.serves else FRAMEWORK,
            servers=self.count_servers(ranks),
            staleness=self.staleness,
            batch_size=batch_size,
            learning_rate=LEARNING_RATE,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            seed=seed,
        ).resolve()


BASE, OWN_BASE = Synchronisation(ALONE), Synchronisation(OWN_ALONE)
"""One rank: as the framework's loops, and as mpiddp's trainer, which updates in another way and
keeps freed memory."""
BASES = (BASE, OWN_BASE)


def parse_synchronisation(text: str) -> Synchronisation:
    """Read a synchronisation as ``--sync`` has it. Raises ConfigurationError."""
    if text in (FRAMEWORK, FUSED, BACKEND, DATA_PARALLEL, AUTO):
        return Synchronisation(text)
    name, colon, rest = text.partition(":")
    if name != PARAMETER_SERVER:
        try:
            return Synchronisation(str(parse_algorithm(text)))
        except ConfigurationError as error:
            raise ConfigurationError(
                f"--sync: expected {FRAMEWORK}, {FUSED}, {BACKEND}, auto, "
                f"{PARAMETER_SERVER}, {DATA_PARALLEL}, or an algorithm: {error}"
            ) from None
    values: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        key, _, value = pair.partition("=")
        if key in values or not _is_good(key, value):
            raise ConfigurationError(
                f"--sync: {pair!r} in {text!r}: a parameter-server takes servers=N or "
                "servers=ranks, placement=colocated or placement=dedicated, and staleness=S or "
                "staleness=unlimited, each once"
            )
        values[key] = value
    return Synchronisation(PARAMETER_SERVER, **values)


def _is_good(key: str, value: str) -> bool:
    if key == "placement":
        return value in ("colocated", "dedicated")
    word = {"servers": RANKS, "staleness": UNLIMITED}.get(key)
    is_number = value.isdecimal() and (key == "staleness" or int(value) >= 1)
    return word is not None and (value == word or is_number)


def expand(
    contender: Synchronisation, transports: tuple[str, ...], wire_dtypes: tuple[str, ...]
) -> list[Synchronisation]:
    """One for each transport and wire type, where they have an effect."""
    if not contender.averages:
        return [contender]
    return [
        dataclasses.replace(contender, transport=transport, wire_dtype=wire_dtype)
        for transport in transports
        for wire_dtype in wire_dtypes
    ]


@dataclass(frozen=True)
class LoopSpec:
    """What ranks are told to train, as JSON."""

    contender: Synchronisation
    workload: Workload
    batch_size: int
    """Samples per worker and step."""
    seed: int
    straggler: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepPlan(trials.Plan):
    """What is measured."""

    ranks: SeveralRanks = ()
    """Numbers of ranks (default: 2 4; with srun 4)."""
    models: Annotated[tuple[Workload, ...], Argument("MODEL", parse_workload)] = tuple(
        map(parse_workload, SHAPES)
    )
    """convnet, resnet18, mlp or mlp:megabytes=M (default: all, the mlp with 67)."""
    sync: Annotated[tuple[Synchronisation, ...], Argument("SYNC", parse_synchronisation)] = ()
    """See below (default: those below, and data-parallel if one process has as many GPUs as there
    are ranks)."""
    transports: Annotated[tuple[str, ...], Argument(choices=TRANSPORTS)] = ("auto",)
    """Of mpiddp's gradients."""
    wire_dtype: Annotated[tuple[str, ...], Argument(choices=WIRE_DTYPES)] = ("auto",)
    """Types in which mpiddp sends gradients."""
    batch_size: Count = 8
    """Samples per worker."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes GPUs if every rank has one."""
    straggler: Annotated[str | None, Argument("WHO=FACTOR")] = None
    """Slow one worker's passes: RANK=FACTOR, or random=FACTOR for a worker drawn in each step."""
    repetitions: Count = 6
    deadline: Seconds = 300.0

    @property
    def contenders(self) -> tuple[Synchronisation, ...]:
        named = self.sync or map(parse_synchronisation, USUAL)
        rows = (row for each in named for row in expand(each, self.transports, self.wire_dtype))
        return tuple(dict.fromkeys(rows))

    def specify(self, workload: Workload, contender: Synchronisation) -> LoopSpec:
        """What its ranks are told."""
        straggler = None if contender in BASES else self.straggler
        return LoopSpec(contender, workload, self.batch_size, self.seed, straggler)


def read_spec(found: Mapping[str, Any]) -> LoopSpec:
    contender, workload = Synchronisation(**found["contender"]), Workload(**found["workload"])
    return LoopSpec(**{**found, "contender": contender, "workload": workload})
