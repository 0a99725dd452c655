"""Lets mpiddp do what a script asks Gloo for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpiddp import torch_backend
from mpiddp.torch_backend.group import BACKEND_BASE, NAME
from mpiddp.torch_internals import fill, find_backend_config
from mpiddp.wording import print_message


def replace_gloo() -> Callable[[], None]:
    """From now on groups whose backend is Gloo use mpiddp's for CPU tensors; returns what ends it.

    ``get_backend()`` still says gloo. NCCL is left alone: before torch 2.14 a backend in Python
    cannot stand beside another one in a group, and then a group with both keeps Gloo.
    """
    torch_backend.register()
    config = find_backend_config()
    original = config.__init__

    def choose(self: Any, backend: Any) -> None:
        original(self, backend)
        devices = self.device_backend_map
        if devices.get("cpu") != "gloo":
            return
        others = {name for name in devices.values() if name != "gloo"}
        if others and torch.cuda.is_available() and BACKEND_BASE is None:
            print_message(
                f"a group with gloo and {', '.join(sorted(others))} keeps Gloo: for --collectives "
                "mpiddp in it, torch 2.14 or newer is needed"
            )
            return
        self.device_backend_map = {
            device: NAME if name == "gloo" else name for device, name in devices.items()
        }

    fill(config, __init__=choose)

    def restore() -> None:
        fill(config, __init__=original)

    return restore
