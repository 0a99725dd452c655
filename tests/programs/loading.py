"""What the ranks of a pool load, where their disks differ, and where nothing is there yet."""

from typing import Any

import torch

from mpiddp.launch.session import Session
from mpiddp.training.data.reading import BatchReader, BatchReading
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.options.config import parse
from mpiddp.training.task.loading import choose_samples, load_on_all
from mpiddp.training.task.task import find_task


def read_on_gpu(session: Session) -> dict[str, Any]:
    """Whether data that fits is on this rank's GPU, and arrives there whole in any case."""
    task, configuration = find_task(parse(["--data", "synthetic"]), None)
    data = load_on_all(configuration, task, session)
    moved, _ = choose_samples(configuration, data, session.device)
    key = Key(1, [3, 1, 200])
    expected = Samples(data.train).read(key)
    batch = moved[key].batch
    (pinned,) = BatchReader(Samples(data.train), BatchReading(pins=True)).read([key])
    copied = pinned.to(session.device)
    assert batch is not None
    return {
        "on the GPU": batch.inputs.device == batch.targets.device == session.device,
        "pinned": pinned.inputs.is_pinned(),
        "alike": [
            torch.equal(each.inputs.cpu(), expected.inputs)
            and torch.equal(each.targets.cpu(), expected.targets)
            for each in (batch, copied)
        ],
    }
