"""Ranks called from Python: their start beside the front's own, and what a call takes.

    PYTHONPATH=. python benchmarks/measure/baselines/rank_calls.py RANKS ROUNDS

Prints seconds of a start and an end, in turns with a script of as many ranks under
``python -m mpiddp``, and milliseconds of calls: of an empty function, with 64 MiB of arguments, and
with 64 MiB of results from each rank. Medians; the last decile of empty calls beside it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

import mpiddp

SCRIPT = "import mpiddp\nwith mpiddp.init():\n    pass\n"
COUNT = 16 << 20
"""Elements of 64 MiB."""
EMPTY_CALLS, LARGE_CALLS = 200, 10


def do_nothing() -> None:
    """What an empty call runs."""


def take(_: torch.Tensor) -> None:
    """Get an argument, and read none of it."""


def give() -> torch.Tensor:
    """Return a tensor that is there already."""
    return KEPT


def measure(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each call of ``work``, after one that is not counted."""
    seconds = []
    for _ in range(count + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def start_front(ranks: int) -> None:
    """The same ranks, with a session and nothing to do, as a shell starts them."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(SCRIPT)
        file.flush()
        command = [sys.executable, "-m", "mpiddp", "-n", str(ranks), "--quiet", file.name]
        subprocess.run(command, check=True)


def main() -> None:
    ranks, rounds = map(int, sys.argv[1:])
    starts: dict[str, list[float]] = {"mpiddp.ranks": [], "python -m mpiddp": []}
    for _ in range(rounds):
        starts["mpiddp.ranks"] += measure(lambda: mpiddp.ranks(ranks).close(), 1)
        starts["python -m mpiddp"] += measure(lambda: start_front(ranks), 1)
    for name, seconds in starts.items():
        print(f"start and end of {ranks} ranks by {name}: {median(seconds):.2f} s")
    with mpiddp.ranks(ranks) as started:
        empty = measure(lambda: started.run(do_nothing), EMPTY_CALLS)
        last = quantiles(empty, n=10)[-1]
        print(f"empty call: {1e3 * median(empty):.2f} ms (last decile {1e3 * last:.2f})")
        argument = torch.ones(COUNT)
        for name, work in {
            "64 MiB of arguments": lambda: started.run(take, argument),
            "64 MiB of results of each rank": lambda: started.run(give),
        }.items():
            print(f"{name}: {1e3 * median(measure(work, LARGE_CALLS)):.1f} ms")
        copies = measure(argument.clone, LARGE_CALLS)
        print(f"a copy of 64 MiB in this process: {1e3 * median(copies):.1f} ms")


KEPT = torch.ones(COUNT)
if __name__ == "__main__":
    # What is sent by name must not be in "__main__", whose functions go by value.
    from benchmarks.measure.baselines import rank_calls

    rank_calls.main()
