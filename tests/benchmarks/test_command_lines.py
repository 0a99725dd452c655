"""What several commands of the benchmarks refuse alike, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from benchmarks.checkpoint import command as checkpoint
from benchmarks.collectives import command as collectives
from benchmarks.collectives import options
from benchmarks.models import explain, numerics, prove, simulate
from benchmarks.startup import command as startup
from benchmarks.stragglers import command as stragglers
from benchmarks.training_step import command as training_step
from mpiddp.errors import ConfigurationError


def check_collective(name: str, words: Sequence[str]) -> None:
    collectives.check(options.parse(name, words))


COMMANDS: dict[str, Callable[[Sequence[str]], object]] = {
    "startup": lambda words: startup.check(startup.parse(words)),
    **{name: partial(check_collective, name) for name in options.QUANTITIES},
    "training-step": lambda words: training_step.check(training_step.parse(words)),
    "stragglers": lambda words: stragglers.check(stragglers.parse(words)),
    "checkpoint": lambda words: checkpoint.check(checkpoint.parse(words)),
    "explain": lambda words: explain.main(["ring", *words]),
    "simulate": simulate.main,
    "prove": prove.main,
    "numerics": numerics.main,
}
MEASURING = ("startup", "allreduce", "training-step", "stragglers", "checkpoint")
BETWEEN_RANKS = ("allreduce", "training-step")
MESSAGES = ("point-to-point", "all-pairs")
RECORDED = (*MEASURING, "simulate", "prove", "numerics")
PLOTTED = (*MEASURING, "simulate", "numerics")

RULES = [
    (("startup", "explain", "simulate", "prove"), "--ranks 0",
     "--ranks: expected an integer >= 1, found '0'"),
    (("startup",), "--ranks two", "found 'two'"),
    ((*BETWEEN_RANKS, "stragglers", "numerics"), "--ranks 1",
     "--ranks: expected an integer >= 2, found '1'"),
    (("numerics",), "--ranks 0", "--ranks: expected an integer >= 2, found '0'"),
    (MEASURING, "--repetitions 0", "--repetitions: expected an integer >= 1"),
    (("startup", *BETWEEN_RANKS), "--warm-up -1", "--warm-up: expected an integer >= 0"),
    (BETWEEN_RANKS, "--iterations 0", "--iterations: expected an integer >= 1"),
    (MEASURING, "--deadline nan", "--deadline: expected seconds > 0"),
    (MEASURING, "--launcher no-such-mpirun", "'no-such-mpirun' is not a program"),
    (MEASURING, "--launcher false", "--version failed"),
    (("startup", *BETWEEN_RANKS), "--nodes 2", "--nodes needs a cluster"),
    (BETWEEN_RANKS, "--link", "--link needs two nodes"),
    (RECORDED, "--json /none/a.json", "there is no directory /none"),
    (RECORDED, "--json /", "is a directory"),
    (PLOTTED, "--plot /none/a.svg", "there is no directory /none"),
    (MEASURING, "--csv /none/a.csv", "there is no directory /none"),
    (("allreduce", "reduce"), "--nccl-tests /none/a", "there is no directory /none"),
    (("startup", "stragglers", "all-pairs"), "--nccl-tests a", "unknown option --nccl-tests"),
    ((*MESSAGES, "reduce", "broadcast"), "--targets", "unknown option --targets"),
    (("allreduce",), "--csv a --nccl-tests a", "a is named for two outputs"),
    (PLOTTED, "--plot a.gif", "expected a name that ends in .svg, .png, .pdf"),
    (PLOTTED, "--json a.svg --plot a.svg", "a.svg is named for two outputs"),
    (BETWEEN_RANKS, "--transports pigeon", "found 'pigeon'"),
    (MESSAGES, "--launcher no-such-mpirun", "'no-such-mpirun' is not a program"),
    (MESSAGES, "--json /none/a.json", "there is no directory /none"),
    (("allreduce", "broadcast"), "--algorithms star", "no algorithm is called 'star'"),
    (("training-step",), "--sync star", "no algorithm is called 'star'"),
    (("simulate", "prove", "numerics"), "star", "no algorithm is called 'star'; there are ring"),
    (MEASURING, "stray", "unexpected argument 'stray'"),
    (tuple(COMMANDS), "--unknown", "unknown option --unknown"),
]  # fmt: skip
CASES = [(name, words, message) for names, words, message in RULES for name in names]


@pytest.mark.parametrize(
    ("name", "words", "message"), CASES, ids=[f"{name} {words}" for name, words, _ in CASES]
)
@pytest.mark.usefixtures("writable")
def test_a_mistake_is_one_line_before_anything_is_measured(name, words, message, capsys):
    with pytest.raises(ConfigurationError) as caught:
        COMMANDS[name](words.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
