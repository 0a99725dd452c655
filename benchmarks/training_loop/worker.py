"""What runs in the ranks of the bare loop."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed

from benchmarks.baselines.ddp_step import join
from benchmarks.baselines.training_loop import Settings, train
from benchmarks.training_loop.workloads import find_workload
from mpiddp.training.step.malloc import keep_freed_memory
from mpiddp.training.task.models import build


def main() -> None:
    name, seed, given, target = sys.argv[1:]
    device = join()
    if device.type == "cpu":
        # As the trainer does: it belongs to the process, not to the loop.
        keep_freed_memory()
    workload = find_workload(name)
    module, _, function = workload.data.partition(":")
    data = getattr(import_module(module), function)(seed=int(seed))
    torch.manual_seed(int(seed))
    model = build(workload.model, data.shape, data.classes)
    features, labels = (
        torch.from_numpy(each).to(device) for each in (data.train.features, data.train.labels)
    )
    rates = train(model, features, labels, Settings(**json.loads(given)))
    if distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(rates))
    distributed.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    assert "RANK" in os.environ, "python -m mpiddp starts it"
    main()
