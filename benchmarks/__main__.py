"""``python -m benchmarks COMMAND``."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence

from benchmarks.records.environment import PROGRAM
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.options.checks import did_you_mean
from mpiddp.wording import print_text

COMMANDS = {
    "allreduce": "all-reduces by size: the framework's, MPI's, a plain ring's, mpiddp's",
    "reduce-scatter": "the same of reduce-scatters",
    "all-gather": "the same of all-gathers",
    "broadcast": "the same of broadcasts",
    "reduce": "the same of reductions to one rank",
    "point-to-point": "messages between two ranks of a node and of two nodes, and additions",
    "all-pairs": "latency and bandwidth of each pair of nodes; slow links are named",
    "startup": "launch to first all-reduce, as whole processes: mpiddp beside torchrun",
    "training-step": "a training step and its parts, by how gradients are synchronised",
    "training-loop": "the trainer's steps and a bare loop's, in turns in one process",
    "programs": "whole programs of torch.distributed, over mpiddp's backend and over Gloo",
    "stragglers": "training to an accuracy while a worker is slow: all-reduce, servers",
    "checkpoint": "what checkpoints cost a training: synchronous, beside it, a raw write",
    "fit": "α, β and γ of this cluster, of messages and additions that were measured",
    "simulate": "the time of each algorithm on a machine that you describe, or that was fitted",
    "tune": "the fastest algorithm by size on this cluster, as a table that auto follows",
    "compare": "two records of a command: which cells became slower, with a stated error rate",
    "report": "records as one page: errors, the fastest contenders by size, curves, machines",
    "explain": "a collective or a training step: as text, as a picture, as an animated page",
    "prove": "every algorithm is an all-reduce, for every number of ranks",
    "numerics": "the rounding errors of each algorithm's order of summation, by type",
    "export": "an all-reduce as a plan of MSCCL or MSCCL++, or a trace for simulators",
}
"""What measures; what learns from records; what is said of algorithms alone."""
_COLLECTIVES = frozenset(
    {
        "allreduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "point-to-point",
        "all-pairs",
    }
)  # fmt: skip
"""Commands of one folder, which has a `Quantity` for each."""
_STUDIES = {"fit": "fitting", "report": "reporting", **{
    name: name for name in ("explain", "export", "numerics", "prove", "simulate")
}}  # fmt: skip
"""Commands that launch nothing, by the module of ``study/``; each other one has a folder in
``measure/``."""
_MODULES = {"tune": "tuning", "compare": "comparison"}
"""Of folders without a `benchmarks.measure.engine.Quantity`, the module that has ``main``."""


def run_command(name: str, arguments: Sequence[str]) -> None:
    """Import what a command needs, and run it."""
    folder = name.replace("-", "_")
    if name in _STUDIES:
        importlib.import_module(f"benchmarks.study.{_STUDIES[name]}").main(arguments)
    elif folder in _MODULES:
        importlib.import_module(f"benchmarks.measure.{folder}.{_MODULES[folder]}").main(arguments)
    else:
        if name in _COLLECTIVES:
            collectives = importlib.import_module("benchmarks.measure.collectives.measurement")
            found = collectives.QUANTITIES[name]
        else:
            found = importlib.import_module(f"benchmarks.measure.{folder}.contenders").QUANTITY
        importlib.import_module("benchmarks.measure.engine").run(found, arguments)


def describe_commands() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [OPTION …]",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help shows a command's options.",
        ]
    )


def run(arguments: Sequence[str]) -> None:
    """Run a command. Raises ConfigurationError if there is none, or not that one."""
    if not arguments:
        raise ConfigurationError(f"no COMMAND given; {PROGRAM} --help lists them")
    name, *rest = arguments
    if name in ("-h", "--help"):
        print_text(describe_commands())
        return
    if name not in COMMANDS:
        raise ConfigurationError(
            f"{name!r} is not a benchmark{did_you_mean(name, COMMANDS)}: expected "
            f"{' or '.join(COMMANDS)}; {PROGRAM} --help describes them"
        )
    run_command(name, rest)


def _ignore_closed_output() -> None:
    """A reader of the first lines only, for example head, causes no error.

    Raises BrokenPipeError again if it was another pipe.
    """
    output = select.poll()
    output.register(sys.stdout, 0)
    if not any(events & select.POLLERR for _, events in output.poll(0)):
        raise
    # What is still to be written at the end goes nowhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    # A request to end arrives as an exception, so that running programs are ended, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with FailureHandler():
        try:
            run(sys.argv[1:])
            sys.stdout.flush()
        except BrokenPipeError:
            _ignore_closed_output()
