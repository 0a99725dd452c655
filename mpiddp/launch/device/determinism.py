"""Whether GPUs compute the same bits each time."""

from __future__ import annotations

import os

import torch

from mpiddp import environment
from mpiddp.launch.exported_variables import export_for_good

WORKSPACE = ":4096:8"
"""Of cuBLAS, with which its results do not depend on what else runs (cuBLAS, Reproducibility)."""


def set_determinism(is_wanted: bool) -> None:
    """Take deterministic algorithms only, or the quickest; before the first work on a GPU.

    An operation that has no deterministic algorithm raises an error. The user's own setting of
    cuBLAS is kept.
    """
    if is_wanted and environment.CUBLAS_WORKSPACE_CONFIG not in os.environ:
        export_for_good({environment.CUBLAS_WORKSPACE_CONFIG: WORKSPACE})
    torch.use_deterministic_algorithms(is_wanted)
    torch.backends.cudnn.benchmark = not is_wanted
