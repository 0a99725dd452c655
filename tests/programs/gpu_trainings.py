"""Small trainings on one GPU, each of which says whether it was good by its exit code.

    gpu_trainings.py formats     number formats and layouts side by side, with and without dropout
    gpu_trainings.py overflow    fp16, with gradients and losses that overflow
    gpu_trainings.py resume      killed after a checkpoint, resumed, and compared bit by bit

They need an MPI for the last one only, and write into the current directory.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch

import launchers
import mpiddp
from mpiddp.launch.session import find_failure_handler
from mpiddp.training.options.config import parse
from mpiddp.training.records.metrics import Row
from mpiddp.training.task.task import Task, cross_entropy
from mpiddp.training.trainer import train
from observed import without_dropout

SMALL = ("--data", "synthetic", "--samples", "400", "--epochs", "2", "--save-every", "never")
WAYS = {
    "fp32, deterministic": ("--deterministic",),
    "the same again": ("--deterministic",),
    "fp32": (),
    "fp32, channels last": ("--channels-last",),
    "bf16": ("--precision", "bf16"),
    "bf16, channels last": ("--precision", "bf16", "--channels-last"),
    "fp16": ("--precision", "fp16"),
}
TOLERANCE = 0.1
"""Of a test loss, by that of fp32, without dropout."""


def run(session: mpiddp.Session, name: str, *options: str, task: Task | None = None) -> Row:
    words = [*SMALL, "--name", name.replace(" ", "-").replace(",", ""), *options]
    return train(parse(words), session, find_failure_handler(session), task=task)


def train_pair(session: mpiddp.Session, name: str, *options: str) -> tuple[Row, Row]:
    """With dropout and without."""
    one = run(session, name, *options)
    with without_dropout():
        return one, run(session, f"{name} plain", *options)


def compare_formats() -> int:
    """Print losses in one table. Returns 1 if one differs without dropout, or bits do."""
    with mpiddp.init() as session:
        on_gpu = session.device.type == "cuda"
        rows = {
            name: train_pair(session, name, *options)
            for name, options in WAYS.items()
            if on_gpu or "fp16" not in options
        }
    if on_gpu:
        with mpiddp.init(devices="cpu") as session:
            rows["fp32 on the CPU"] = train_pair(session, "CPU")
    wanted, bad = rows["fp32"][1].test_loss, []
    print(f"{'':22}{'loss':>10}{'test loss':>10}   without dropout")
    for name, pair in rows.items():
        cells = "   ".join(f"{row.loss:10.5f}{row.test_loss:10.5f}" for row in pair)
        print(f"{name:22}{cells}")
        if not math.isclose(pair[1].test_loss, wanted, rel_tol=TOLERANCE):
            bad.append(f"{name}: {pair[1].test_loss} without dropout, fp32: {wanted}")
    for one, other in zip(rows["fp32, deterministic"], rows["the same again"], strict=True):
        if one.parameters != other.parameters:
            bad.append("deterministic trainings differ in bits")
    print("\n".join(bad or [f"all within {TOLERANCE:.0%} of fp32 without dropout"]))
    return bool(bad)


class Overflowing:
    """A loss whose gradients overflow in fp16 until the scaler has adapted, and now and then
    is not finite itself."""

    FACTOR, PERIOD = 1e4, 5

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.steps += torch.is_grad_enabled()
        is_bad = torch.is_grad_enabled() and self.steps % self.PERIOD == 0
        scores = outputs * 1e30 if is_bad else outputs
        return self.FACTOR * cross_entropy(scores, targets)


def overflow() -> int:
    """Train with a loss that overflows. Returns 1 if the scaler or the weights did not stand it."""
    loss, scales = Overflowing(), list[float]()
    update = torch.amp.GradScaler.update

    def note(scaler: torch.amp.GradScaler, *arguments: object) -> None:
        update(scaler, *arguments)
        scales.append(scaler.get_scale())

    options = ["--precision", "fp16", "--on-nan", "skip", "--epochs", "4", "--optimizer", "sgd"]
    # A step of SGD grows with the loss, unlike one of Adam.
    options += ["--momentum", "0.9", "--learning-rate", str(0.05 / Overflowing.FACTOR)]
    with mock.patch.object(torch.amp.GradScaler, "update", note), mpiddp.init() as session:
        row = run(session, "overflow", *options, task=Task(loss=loss))
    print(f"scales {scales}")
    print(f"steps {loss.steps}, left out in the last epoch {row.left_out}, loss {row.loss}")
    print(f"test loss {row.test_loss}, by chance {Overflowing.FACTOR * math.log(10)}")

    was_good = scales[-1] < 2**16 and row.left_out > 0
    return not (was_good and row.test_loss < Overflowing.FACTOR * math.log(10))


def resume() -> int:
    """Kill a training that has a checkpoint, resume it. Returns 1 if its weights have other bits
    than those of a training that nobody killed."""
    words = ["-m", "mpiddp.train", "--data", "synthetic", "--samples", "2000", "--batch-size", "16"]
    words += ["--epochs", "5", "--save-every", "50steps", "--deterministic"]

    def finish(name: str) -> str:
        more = ["--name", name, "--export", f"{name}.pt"]
        return launchers.run("openmpi", 1, [*words, *more]).expect(0).output

    begin = time.monotonic()
    finish("whole")
    print(f"a training that nobody kills: {time.monotonic() - begin:.1f} s", flush=True)
    more = ["--name", "killed", "--export", "killed.pt"]
    with launchers.start("openmpi", 1, [*words, *more]) as job:
        # One that is being written has more in its name.
        saved = Path("runs", "killed", "checkpoints")
        job.until(lambda: [*saved.glob("step-*[0-9]")], "a checkpoint")
        os.kill(job.rank(0), signal.SIGKILL)
        code = job.wait().returncode
    print(f"killed after a checkpoint: exit code {code}", flush=True)
    told = [line for line in finish("killed").splitlines() if "Resumed from" in line]
    print("\n".join(told))
    whole, killed = (torch.load(f"{name}.pt", weights_only=True) for name in ("whole", "killed"))
    different = [name for name in whole if not torch.equal(whole[name], killed[name])]
    print(f"weights that differ: {different or 'none'}")
    return not told or code == 0 or bool(different) or whole.keys() != killed.keys()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit({"formats": compare_formats, "overflow": overflow, "resume": resume}[sys.argv[1]]())
