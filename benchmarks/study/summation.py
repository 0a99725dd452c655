"""What a schedule's order of summation costs in accuracy, for one type and way of adding.

The schedule is played on tensors, so it alone says what is added when. The error is measured
against the sum in float64 of the inputs as the type holds them: their own rounding is not counted.

Two numbers explain what comes out. The *depth* is the longest chain of additions in the reduction
tree: no element is off by more than about depth · u · Σ|x|, where u is the unit roundoff (Higham,
"The accuracy of floating point summation", SIAM J. Sci. Comput. 14(4), 1993). The *growth* is
what to expect of independent roundings: the sum of k independent inputs is √k times as large as
one of them, and so is the error of rounding it, so after the roundings of k₁, k₂, … inputs' sums
the relative error of the sum of n is √((k₁ + k₂ + …) / n) times that of one rounding. Added one
after the other that is about √(n/2), in a balanced tree √(lg n).

All ranks end with the same bits, the payloads of NaNs left aside, which proof.py shows by equal
reduction trees; here it is checked on the values.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpiddp.errors import ScheduleError
from mpiddp.schedules.proof import finish
from mpiddp.schedules.schedule import Schedule

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
"""The types whose sums are measured, by their names in torch."""

ROUNDING = 0.212
"""RMS error of one rounding relative to the RMS of the values, in units of the type's epsilon.

For normal values √(E[ulp²] / 12) / σ, which is between 0.2118 and 0.2129 wherever σ lies between
two powers of two.
"""


class Accumulation(enum.Enum):
    """In which type partial sums are added, kept and sent."""

    NATIVE = "native"
    """The result of every addition is rounded to the type."""
    STEP = "float32 in a step"
    """A rank adds in float32 all that it has of one step, and rounds what it keeps and sends.

    The bytes sent are those of the type. This helps if many values meet in a step, for example
    in direct, one-shot and central: one rounding for all of them. If two do, as on a ring, no bit
    changes: their sum rounded to float32 and then to the type is their sum rounded to the
    type at once, since 24 ≥ 2p + 2 for p = 8 (bfloat16) and p = 11 (float16) significant bits
    (Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
    """
    THROUGHOUT = "float32 throughout"
    """Partial sums are kept and sent as float32, twice the bytes, and rounded once, at the end."""


def list_accumulations(dtype: str) -> tuple[Accumulation, ...]:
    """The ways that differ: of float32 only the native one."""
    return (Accumulation.NATIVE,) if dtype == "float32" else tuple(Accumulation)


# ---- the order ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SummationOrder:
    """What a schedule's order of summation lets expect."""

    depth: int
    """The longest chain of additions, of any chunk."""
    growth: float
    """Expected error, in roundings, where every addition is rounded."""
    growth_by_step: float
    """The same where what a rank adds in one step is rounded once."""

    def expect(self, accumulation: Accumulation) -> float:
        if accumulation is Accumulation.THROUGHOUT:
            return 1.0
        return self.growth if accumulation is Accumulation.NATIVE else self.growth_by_step


class _Sum(NamedTuple):
    """A partial sum: how many inputs, and of each rounding on its way how many inputs' sum."""

    inputs: int
    depth: int
    rounded: int
    rounded_by_step: int


def _add_symbols(values: Sequence[_Sum]) -> _Sum:
    total = values[0]
    for value in values[1:]:
        inputs = total.inputs + value.inputs
        total = _Sum(
            inputs,
            max(total.depth, value.depth) + 1,
            total.rounded + value.rounded + inputs,
            total.rounded_by_step + value.rounded_by_step,
        )
    return total._replace(rounded_by_step=total.rounded_by_step + total.inputs)


def describe_order(schedule: Schedule) -> SummationOrder:
    """Depth and growth of an all-reduce; the growth is that of the chunks' mean square."""
    state = finish(schedule, lambda rank, chunk: _Sum(1, 0, 0, 0), _add_symbols)
    sums = [value for value in state[schedule.members[0]] if value is not None]
    inputs = len(sums) * len(schedule.members)
    return SummationOrder(
        max(each.depth for each in sums),
        math.sqrt(sum(each.rounded for each in sums) / inputs),
        math.sqrt(sum(each.rounded_by_step for each in sums) / inputs),
    )


# ---- the values ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Error:
    """How far a sum is from its reference; not finite where the type's range was left."""

    rms: float
    """‖sum − reference‖₂ / ‖reference‖₂"""
    largest: float
    """The largest error of an element, relative to the RMS of the reference."""


def draw_inputs(ranks: int, elements: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normal values of standard deviation ``scale``: a row of ``elements`` float64 per rank.

    Drawn by NumPy's default generator, PCG64, row by row.
    """
    import numpy
    import torch

    values = numpy.random.default_rng(seed).standard_normal((ranks, elements))
    return torch.from_numpy(values * scale)


def all_reduce(
    schedule: Schedule, inputs: torch.Tensor, accumulation: Accumulation
) -> torch.Tensor:
    """The sum as each member ends with it: a row per member, of the inputs' type.

    ``inputs`` has a row per rank; a rank that is no member contributes nothing.
    """
    import torch

    wire = torch.float32 if accumulation is Accumulation.THROUGHOUT else inputs.dtype
    bounds = schedule.bounds(inputs.shape[1])
    sizes = [high - low for low, high in itertools.pairwise(bounds)]
    chunks = [row.split(sizes) for row in inputs.to(wire)]
    add = _add_wide if accumulation is Accumulation.STEP else _add
    state = finish(schedule, lambda rank, chunk: chunks[rank][chunk], add)
    rows = [
        torch.cat([value for value in state[rank] if value is not None])
        for rank in schedule.members
    ]
    return torch.stack(rows).to(inputs.dtype)


def _add(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(lambda left, right: left + right, values)


def _add_wide(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return _add([value.float() for value in values]).to(values[0].dtype)


def check_same_bits(schedule: Schedule, results: torch.Tensor) -> None:
    """Raise ScheduleError unless all rows, one per member, are bitwise equal.

    One NaN is as good as another: its bits depend on which operand comes first.
    """
    import torch

    integer = torch.int16 if results.element_size() == 2 else torch.int32
    bits = results.masked_fill(results.isnan(), math.nan).view(integer)
    different = (bits != bits[0]).any(dim=1).tolist()
    if any(different):
        first, other = schedule.members[0], schedule.members[different.index(True)]
        raise ScheduleError(f"ranks {first} and {other} ended with sums of different bits")


def measure_error(result: torch.Tensor, reference: torch.Tensor) -> Error:
    """The error of one member's result; ``reference`` is float64."""
    error = result.double() - reference
    size = reference.norm()
    rms = size / math.sqrt(reference.numel())
    return Error(float(error.norm() / size), float(error.abs().max() / rms))


def measure(schedule: Schedule, inputs: torch.Tensor, accumulation: Accumulation) -> Error:
    """Sum ``inputs``, a row per rank, as the schedule does, and compare with float64.

    Raises ScheduleError if the members do not end with the same bits.
    """
    results = all_reduce(schedule, inputs, accumulation)
    check_same_bits(schedule, results)
    reference = inputs[list(schedule.members)].double().sum(dim=0)
    return measure_error(results[0], reference)
