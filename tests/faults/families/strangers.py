"""Strangers: at the ports of a job that starts, and in what a checkpoint holds."""

from __future__ import annotations

import contextlib
import pickle
import resource
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
from attempts import Family, Finding
from checkpointed import Hostile
from laboratory import Laboratory, Training, find_resumed
from mpiddp.checkpoints.storage.manifest import list_checkpoints
from saves import METADATA, SHARD, make_hostile

RANKS = 2
WAYS = ("idle", "hostile list", "garbage", "hostile shard")


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "way": WAYS[number % len(WAYS)],
        "connections": parameters["connections"],
        "bytes": dice.randbytes(64).hex(),
    }


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    training = Training(folder, RANKS)
    if choice["way"].startswith("hostile"):
        return load_hostile(training, laboratory, choice)
    laboratory.find_whole(RANKS)
    with training.start(None) as job, flood(job, choice) as ports:
        job.wait().expect(0)
    assert ports, "no port was found"
    laboratory.check_end(training)
    return Finding("no effect, bitwise equal")


# Ports


@contextlib.contextmanager
def flood(job: launchers.Job, choice: Mapping[str, Any]) -> Iterator[dict[int, int]]:
    """Connect to each port as soon as a rank, or its companion, listens; until training begins.

    Yields the connections that were made, by port. They stay.
    """
    made: dict[int, int] = {}
    connections: list[socket.socket] = []
    ended = threading.Event()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    text = b"" if choice["way"] == "idle" else bytes.fromhex(choice["bytes"])

    def run() -> None:
        while not ended.wait(0.005) and "Starting distributed training" not in job.stdout():
            for host, port in job.places():
                for _ in range(0 if port in made else choice["connections"]):
                    with contextlib.suppress(OSError):
                        connections.append(connect(host, port, text))
                        made[port] = made.get(port, 0) + 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()
        for each in connections:
            each.close()


def connect(host: str, port: int, text: bytes) -> socket.socket:
    found = socket.create_connection((host, port), 1)
    found.setblocking(False)
    with contextlib.suppress(OSError):
        found.sendall(text)
    return found


# Pickles


def load_hostile(training: Training, laboratory: Laboratory, choice: Mapping[str, Any]) -> Finding:
    """The manifest fits, as somebody makes it who may write there."""
    whole = laboratory.find_whole(RANKS)
    shutil.copytree(whole.run, training.run)
    for name in ("outcome.json", "lock"):
        (training.run / name).unlink()
    newest, older = list_checkpoints(training.run / "checkpoints")[:2]
    trace = training.folder / "trace"
    content = pickle.dumps(Hostile(trace))
    pickle.loads(content)
    trace.rmdir()
    is_list = choice["way"] == "hostile list"
    name = METADATA if is_list else SHARD
    make_hostile(newest, name, content.ljust((newest / name).stat().st_size))
    if is_list:
        output = training.finish()
        assert find_resumed(output) == int(older.name.partition("-")[2]), output
        outcome = "never run, fell back"
    else:
        # Whose digest is right holds what the run is to go on from, as far as anybody can tell.
        with training.start(None) as job:
            result = job.wait()
        assert result.returncode != 0, result
        outcome = "never run, refused"
    assert not trace.exists(), "it was run"
    return Finding(outcome)


STRANGER = Family(choose, attempt)
