"""Runs a script on the ranks of a pool, whose session it finds."""

import runpy

import torch

from mpiddp.launch.session import Session


def run(session: Session, path: str) -> None:
    # Several threads for so small models only wait for each other on a busy machine.
    torch.set_num_threads(1)
    runpy.run_path(path, run_name="__main__")
