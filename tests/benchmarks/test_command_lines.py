"""What the commands of the benchmarks refuse, in one line, before anything is measured."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import pytest

from benchmarks.measure.collectives.measurement import QUANTITIES
from benchmarks.measure.compare import comparison
from benchmarks.measure.tune import tuning
from benchmarks.study import explain, export, numerics, prove, simulate
from benchmarks.study import fitting as fit
from benchmarks.study import reporting as report
from mpiddp.errors import ConfigurationError


def check_quantity(name: str, words: Sequence[str]) -> None:
    folder = name.replace("-", "_")
    quantity = QUANTITIES.get(name)
    quantity = quantity or import_module(f"benchmarks.measure.{folder}.contenders").QUANTITY
    quantity.find_launcher(quantity.parse(words))


OTHERS = ("checkpoint", "programs", "startup", "stragglers", "training-loop", "training-step")
COMMANDS: dict[str, Callable[[Sequence[str]], object]] = {
    **{name: partial(check_quantity, name) for name in (*QUANTITIES, *OTHERS)}, "fit": fit.main,
    "tune": tuning.main, "compare": comparison.main, "report": report.main,
    "explain": explain.main, "simulate": simulate.main, "prove": prove.main,
    "numerics": numerics.main, "export": export.main,
}  # fmt: skip
MEASURING = ("startup", "allreduce", "training-step", "programs", "stragglers", "checkpoint")
WHOLE = {"compare": "compare a b", "report": "report a --output a.html", "explain": "explain ring",
         "export": "export ring --output a.xml"}  # fmt: skip
"""Commands that need words, with them."""
BETWEEN_RANKS = ("allreduce", "training-step")
MESSAGES = ("point-to-point", "all-pairs")
RECORDED = (*MEASURING, "simulate", "prove", "numerics")

RULES = [
    (("startup", WHOLE["explain"], "simulate", "prove"), "--ranks 0",
     "--ranks: expected an integer >= 1, found '0'"),
    ((*BETWEEN_RANKS, "stragglers", "numerics"), "--ranks 1",
     "--ranks: expected an integer >= 2, found '1'"),
    (MEASURING, "--repetitions 0", "--repetitions: expected an integer >= 1"),
    (("startup", *BETWEEN_RANKS), "--warm-up -1", "--warm-up: expected an integer >= 0"),
    (MEASURING, "--deadline nan", "--deadline: expected seconds > 0"),
    (MEASURING, "--launcher no-such-mpirun", "'no-such-mpirun' is not a program"),
    (("allreduce",), "--launcher false", "--version failed"),
    (("startup", *BETWEEN_RANKS), "--nodes 2", "--nodes needs a cluster"),
    (BETWEEN_RANKS, "--link", "--link needs two nodes"),
    (RECORDED, "--output /none/a.jsonl", "there is no directory /none"),
    (("startup", "stragglers", "all-pairs"), "--output a.txt", "expected a name that ends in"),
    (("simulate", "numerics"), "--algo ring", "ALGORITHM is typed without an option"),
    (("allreduce", "programs", "startup"), "--nproc_per_node=2", "for mpiddp, type --ranks N"),
    ((*MESSAGES, "reduce", "broadcast"), "--targets", "unknown option --targets"),
    (BETWEEN_RANKS, "--transports pigeon", "found 'pigeon'"),
    (("allreduce", "broadcast"), "--algorithms star", "no algorithm is called 'star'"),
    (("training-step",), "--sync star", "no algorithm is called 'star'"),
    (("simulate", "prove", "numerics"), "star", "no algorithm is called 'star'; there are ring"),
    (("simulate", "prove"), "own/b.py", "no algorithm is called 'own/b.py'; type --load own/b.py"),
    (tuple(WHOLE.get(name, name) for name in COMMANDS), "--unknown", "unknown option --unknown"),
]  # fmt: skip
OWN = [
    ("allreduce --sizes 6", "expected whole elements of 4 bytes (float32), found 6"),
    ("all-gather --sizes 4K:1K", "expected sizes of at least a byte that rise"),
    ("allreduce --sizes 1K:1M:2", "FROM:TO:xFACTOR, as in 1K:256M:x2, found '1K:1M:2'"),
    ("allreduce --sizes 512G", "of memory (7 buffers for each rank)"),
    ("reduce --operators xor", "found 'xor'"),
    ("allreduce --budget 0", "--budget: expected seconds > 0"),
    ("allreduce --busy -1", "--busy: expected an integer >= 0"),
    ("broadcast --operators sum", "unknown option --operators"),
    ("point-to-point --ranks 4", "unknown option --ranks"),
    ("all-pairs --algorithms ring", "unknown option --algorithms"),
    ("training-step --models vgg", "no model is called 'vgg'; there are convnet, resnet18, mlp"),
    ("training-step --models mlp:megabytes=0", "mlp:megabytes=… with 0.1 to 4000"),
    ("training-step --models convnet:megabytes=4", "found 'convnet:megabytes=4'"),
    ("training-step --sync parameter-server:place=here", "'place=here'"),
    ("training-step --sync parameter-server:staleness=never", "'staleness=never'"),
    ("training-step --sync parameter-server:servers=3", "can have 1 to 2 colocated servers"),
    ("training-step --sync parameter-server:servers=2,placement=dedicated --ranks 4 2",
     "2 ranks can have 1 to 1 dedicated servers, not 2"),
    ("training-step --sync central", "leaves out the gradients of 1 of 2 ranks"),
    ("training-step --sync data-parallel --device cpu", "drives GPUs"),
    ("training-step --straggler 2=4", "expected a rank below 2"),
    ("training-loop --models vgg", "--models: expected convnet or resnet18"),
    ("stragglers --stragglers 2=4", "--stragglers: expected ranks 0 to 1, found '2=4'"),
    ("stragglers --stragglers first=4", "RANK=FACTOR"),
    ("stragglers --staleness some", "staleness: expected a number of steps, or unlimited"),
    ("stragglers --accuracy 97", "--accuracy: expected at most 1, found 97"),
    ("checkpoint --directory /none", "--directory: /none is not a directory"),
    ("checkpoint --save-every 0", "--save-every: expected an integer >= 1, found '0'"),
    ("checkpoint --launcher srun", "srun"),
    *((f"compare old new --tolerance={text}", "--tolerance: expected a share")
      for text in ("0", "100%", "much")),
    ("fit", "no RECORD given"),
    ("tune --repetitions 5", "expected 6 or more, since fewer"),
    ("explain broadcast --by ring", "ring makes all-gather, not broadcast"),
    ("explain ring --by direct", "--by is not for ring"),
    ("explain reduce --buckets 2", "--buckets is not for reduce"),
    ("explain training-step --compute 0", "expected milliseconds > 0, found '0'"),
    ("explain ring:segments=2 --segments 3", "give the segments once"),
    ("explain ring --ranks 3 --nodes 4", "3 ranks go on 1 to 3 nodes, not on 4"),
    ("explain ring --ranks 5000", "python -m benchmarks simulate prices them"),
    ("explain ring --ranks 300", "more than a picture can show"),
    ("explain ring --beside direct", "--beside needs --output FILE.html"),
    ("explain ring --inside-latency 1", "is for nodes of several ranks"),
    ("explain ring --nodes 2 --inside-latency 11",
     "--inside-latency 11 must not be above --latency 10"),
    ("simulate --latency -1", "expected µs >= 0, found '-1'"),
    ("simulate --ranks 99999999999999999999", "expected an integer <= 16777216"),
    ("simulate --output a.svg --bytes 1M", "a picture needs two sizes at least"),
    ("simulate --fit a --latency 5us", "--latency: the machine is that of --fit already"),
    ("simulate --fit /none/fit.json", "/none/fit.json cannot be read"),
    ("simulate --map ring:segments=2 --ranks 2048", "no algorithm has a closed form for 2048"),
    ("numerics --elements 0", "--elements: expected an integer >= 1, found '0'"),
    ("export ring", "the following arguments are required: --output"),
    ("export central --output a.xml", "rank 7 of this one only serves"),
    ("export ring --output /none/a.xml", "there is no directory /none"),
    ("export ring --output a.gaol", ".goal (a schedule for LogGOPSim), found 'a.gaol'"),
]  # fmt: skip
"""What one command alone refuses."""
CASES = [(f"{name} {words}", message) for names, words, message in RULES for name in names] + OWN


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
@pytest.mark.usefixtures("writable")
def test_a_mistake_is_one_line_before_anything_is_measured(line, message, capsys, monkeypatch):
    monkeypatch.setattr(numerics, "measure", None)
    monkeypatch.delenv("MPIDDP_TUNING", raising=False)
    name, *words = line.split()
    with pytest.raises(ConfigurationError) as caught:
        COMMANDS[name](words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
