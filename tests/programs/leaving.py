"""A script that leaves in some way while its last checkpoint is being written.

    python tests/programs/leaving.py FOLDER WAY[,WAY…] [SLOW]

It prints a line when it leaves. Of several ways each is that of a forked process, with a folder of
its name in FOLDER, and its exit code is printed. ``SLOW``: what writing takes longer, in seconds; a
``late`` one fails once somebody was told that it is waited for.
"""

import gc
import os
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


def save() -> mpiddp.Checkpointer:
    # Without an optimizer, for which torch would import its compiler.
    checkpointer = mpiddp.Checkpointer(folder, torch.nn.Linear(2, 2))
    checkpointer.restore()
    checkpointer.save(7)
    print("leaves", flush=True)
    return checkpointer


def leave() -> None:
    if way == "forgotten":
        save()
    elif way in ("exit", "preempted"):
        with save():
            sys.exit(75 if way == "preempted" else 0)
    elif way == "failing":
        with save():
            raise RuntimeError("the script's own mistake")
    else:
        kept.append(save())
    if way == "group":
        dist.destroy_process_group()
    if way == "raising":
        raise RuntimeError("the script's own mistake")


kept: list[mpiddp.Checkpointer] = []
if "," in way:
    # At its end a child would look at, and so copy, all that was imported.
    gc.freeze()
    top, ways = folder, way.split(",")
    for way in ways:
        folder = f"{top}/{way}"
        if not (child := os.fork()):
            break
        print(f"{way}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
    else:
        sys.exit()
if find_session() is not None and not dist.is_initialized():
    dist.init_process_group("gloo")
leave()
