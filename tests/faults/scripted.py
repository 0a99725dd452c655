"""Somebody's training loop with mpiddp.Checkpointer: python scripted.py FOLDER KIND STEPS FILE

It goes on from the newest checkpoint in FOLDER up to STEPS; FILE gets what rank 0 has then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import checkpointed
import mpiddp

if __name__ == "__main__":
    folder, kind, steps, file = sys.argv[1:]
    with mpiddp.init() as session:
        found = checkpointed.train(session, Path(folder), kind, int(steps))
        if session.world.rank == 0:
            Path(file).write_text(json.dumps(found))
