"""A script that leaves in some way while its last checkpoint is being written.

    python tests/programs/leaving.py FOLDER WAY [SLOW]

It prints a line when it leaves. ``SLOW``: what writing takes longer, in seconds; a ``late`` one
fails once somebody was told that it is waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.checkpoints.storage import directory
from mpiddp.launch.session import find_session
from mpiddp.process import background

folder, way = sys.argv[1:3]
slow = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
write_shards, print_message = directory.write_shards, background.print_message
told = threading.Event()


def write_slowly(*arguments: Any) -> Any:
    if way == "late":
        told.wait()
    else:
        time.sleep(slow)
    if way in ("full", "late"):
        raise OSError(28, "No space left on device")
    return write_shards(*arguments)


def tell(line: str) -> None:
    print_message(line)
    told.set()


directory.write_shards, background.print_message = write_slowly, tell


class StopEarlyError(Exception):
    pass


def save() -> mpiddp.Checkpointer:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpointer = mpiddp.Checkpointer(folder, model, optimizer)
    checkpointer.restore()
    checkpointer.save(7)
    print("leaves", flush=True)
    return checkpointer


def leave_function() -> None:
    save()


def leave() -> None:
    if way in ("end", "full", "late"):
        kept.append(save())
    elif way == "forgotten":
        leave_function()
    elif way == "group":
        kept.append(save())
        dist.destroy_process_group()
    elif way == "exit":
        with save():
            sys.exit(0)
    elif way == "preempted":
        with save():
            raise SystemExit(75)
    elif way == "failing":
        with save():
            raise StopEarlyError("the script's own mistake")
    elif way == "raising":
        kept.append(save())
        raise StopEarlyError("the script's own mistake")


kept: list[mpiddp.Checkpointer] = []
if find_session() is not None and not dist.is_initialized():
    dist.init_process_group("gloo")
leave()
