"""Imports torchvision, with help if it needs some.

Its wheels are built beside torch's for CUDA. Beside a torch for CPUs the library with its own
operators cannot be loaded, and its import ends with ``operator torchvision::nms does not exist``:
two operators are described to torch in Python, but stand in that library. Once torch knows their
schemas the rest (models, data sets, transforms) works.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from mpiddp.errors import ConfigurationError

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []
"""What torch forgets once nobody holds it."""


def import_torchvision() -> ModuleType:
    """The module ``torchvision``. Raises ConfigurationError if it is not installed."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ConfigurationError(
            "this model or data set needs torchvision: pip install 'mpiddp[vision]', or the "
            f"release that fits torch {torch.__version__}"
        ) from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    _describe_operators()
    return importlib.import_module("torchvision")


def _describe_operators() -> None:
    # What a failed import has left behind would be taken for the whole.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        # torch has no type for it.
        library.define(name + _SCHEMA)
    _libraries.append(library)
