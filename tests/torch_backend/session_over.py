"""A session whose torch.distributed is mpiddp's backend, or Gloo's; rank 0 prints what it leaves.

    export PYTHONPATH=tests/programs:tests/support
    python -m mpiddp -n 2 --collectives WHICH tests/torch_backend/session_over.py FOLDER

The trainer's weights; a script's state, saved and restored by a Checkpointer; what stacks shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed

import checkpointed
import mpiddp
from mpiddp import environment
from mpiddp.training import Trainer


def train() -> str:
    """A digest of the trainer's weights."""
    trainer = Trainer(data="toy", samples=200, epochs=1, sync="framework", name="run")
    for step in trainer.steps():
        step.take()
    found = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def show_stacks() -> str:
    """What ``mpiddp stacks`` prints; torch's own barrier is then the last call."""
    words = [sys.executable, "-m", "mpiddp", "stacks", os.environ[environment.JOB_DIRECTORY]]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def main() -> None:
    with mpiddp.init(backend="gloo") as session:
        found = {"trained": train()}
        for name, ends in (("whole", (4,)), ("restored", (2, 4))):
            for end in ends:
                states = checkpointed.train(session, Path(name), "ddp", end)
            found[name] = {**states, "begun": 0}
        distributed.all_reduce(torch.ones(4321))
        if session.world.rank == 0:
            found["group"] = type(distributed.group.WORLD).__module__
            found["stacks"] = show_stacks()
            print("found", json.dumps(found))
        distributed.barrier()


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    main()
