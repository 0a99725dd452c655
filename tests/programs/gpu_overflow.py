"""A small training in fp16 on one GPU, with gradients and losses that overflow.

Its exit code says whether it was good. It writes into the current directory.
"""

import math
import sys
import warnings
from unittest import mock

import torch

import mpiddp
from mpiddp.launch.session import find_failure_handler
from mpiddp.training.options.config import parse
from mpiddp.training.task.task import Task, cross_entropy
from mpiddp.training.trainer import train


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
    """Returns 1 if the scaler or the weights did not stand it."""
    loss, scales = Overflowing(), list[float]()
    update = torch.amp.GradScaler.update

    def note(scaler: torch.amp.GradScaler, *arguments: object) -> None:
        update(scaler, *arguments)
        scales.append(scaler.get_scale())

    options = ["--data", "synthetic", "--samples", "400", "--save-every", "never", "--name", "fp16"]
    options += ["--precision", "fp16", "--on-nan", "skip", "--epochs", "4", "--optimizer", "sgd"]
    # A step of SGD grows with the loss, unlike one of Adam.
    options += ["--momentum", "0.9", "--learning-rate", str(0.05 / Overflowing.FACTOR)]
    with mock.patch.object(torch.amp.GradScaler, "update", note), mpiddp.init() as session:
        row = train(parse(options), session, find_failure_handler(session), task=Task(loss=loss))
    print(f"scales {scales}")
    print(f"steps {loss.steps}, left out in the last epoch {row.left_out}, loss {row.loss}")
    print(f"test loss {row.test_loss}, by chance {Overflowing.FACTOR * math.log(10)}")

    was_good = scales[-1] < 2**16 and row.left_out > 0
    return not (was_good and row.test_loss < Overflowing.FACTOR * math.log(10))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(overflow())
