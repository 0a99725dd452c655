"""What runs in the ranks of ``python -m benchmarks programs``.

Both backends have a group in the same processes, and each program is made once for each of them.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import distributed
from torch._dynamo.exc import BackendCompilerFailed

import mpiddp.torch_backend  # noqa: F401 - registers the backend
from benchmarks.measure.launching import worker_loop
from benchmarks.measure.launching.worker_loop import SessionMember
from benchmarks.measure.programs import objects, training, transformer
from benchmarks.measure.programs.contenders import BACKENDS, CHECKED_STEPS, OWN
from mpiddp.errors import ConfigurationError

WARM_UP = 3
"""Untimed steps of a visit."""


class SteppedProgram(Protocol):
    """Made of a process group or, to be compared with, of None: then one process does the work of
    so many ranks. Both do the same for the same seed."""

    def step(self) -> None: ...

    def look(self) -> torch.Tensor:
        """Numbers, in one dimension, that all steps so far decide; alike on all ranks."""


MAKERS: Mapping[str, Callable[..., SteppedProgram]] = {
    "tokens": partial(transformer.Generation, split=transformer.split_by_hand),
    "tokens-compiled": partial(transformer.Generation, split=transformer.split_compiled),
    "tokens-dtensor": partial(transformer.Generation, split=transformer.split_by_tensors),
    "ddp": training.train_by_ddp,
    "fsdp2": training.train_by_fsdp,
    "broadcast_object_list": objects.Broadcast,
    "all_gather_object": objects.Gathering,
    "barrier": objects.Barrier,
}


class Bench:
    """Does what is ordered."""

    def __init__(self, member: SessionMember) -> None:
        """Collective."""
        self._ranks = member.size
        self._groups = {name: distributed.new_group(backend=name) for name in BACKENDS}
        self._kept: dict[tuple[str, str], SteppedProgram] = {}

    def perform(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if command["do"] == "let go":
            self._kept.clear()
            gc.collect()
            return {}
        name, backend = key = command["program"], command["backend"]
        if command["do"] == "measure":
            return self._measure(self._kept[key], self._groups[backend], command["steps"])
        make = partial(MAKERS[name], ranks=self._ranks, seed=command["seed"])
        try:
            self._kept[key] = make(self._groups[backend])
            before = self._count_own_calls()
            found = check(self._kept[key], make(None))
            return {**found, "own_calls": self._count_own_calls() - before}
        except ConfigurationError as error:
            return {"refused": str(error)}
        except BackendCompilerFailed as error:
            # As without a C++ compiler.
            reason = str(error.inner_exception).strip().partition("\n")[0]
            return {"refused": f"torch.compile failed: {reason}"}

    def _count_own_calls(self) -> int:
        return int(self._groups[OWN.name]._get_sequence_number_for_group())

    def _measure(
        self, program: SteppedProgram, group: distributed.ProcessGroup, steps: int
    ) -> dict[str, Any]:
        """``seconds`` of so many steps, one after the other."""
        gc.disable()
        try:
            for _ in range(WARM_UP):
                program.step()
            distributed.barrier(group)
            begin = time.perf_counter()
            for _ in range(steps):
                program.step()
            seconds = time.perf_counter() - begin
            # No rank sleeps again before all have finished.
            distributed.barrier(group)
        finally:
            gc.enable()
        return {"seconds": seconds}


def check(program: SteppedProgram, alone: SteppedProgram) -> dict[str, Any]:
    """The first steps of both: the ``error``, relative to what one process found, and a ``digest``
    of what the ranks did."""
    for each in (program, alone):
        for _ in range(CHECKED_STEPS):
            each.step()
    found, expected = program.look(), alone.look()
    error = (found - expected).norm() / expected.norm()
    return {
        "error": error.item(),
        "digest": hashlib.sha256(found.contiguous().numpy().tobytes()).hexdigest(),
    }


def main() -> None:
    worker_loop.run(
        lambda session, _: SessionMember(session), None, lambda member: Bench(member).perform
    )


if __name__ == "__main__":
    main()
