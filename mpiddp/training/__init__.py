"""The trainer, and what a task and its data are made of.

    from mpiddp.training import Task, Trainer

    Trainer(Task(model=Net), data="digits", epochs=3).fit()

Names are loaded when they are first used: importing this imports neither torch nor numpy, so that
``--help`` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.training.data.data_sets import DataSet, IterableStyle, MapStyle, Split
    from mpiddp.training.data.samples import Batch
    from mpiddp.training.records.metrics import Row
    from mpiddp.training.script_trainer import Trainer
    from mpiddp.training.task.task import Task

__all__ = ["Batch", "DataSet", "IterableStyle", "MapStyle", "Row", "Split", "Task", "Trainer"]

_DATA_SETS = ("DataSet", "IterableStyle", "MapStyle", "Split")
_HOMES = {
    **dict.fromkeys(_DATA_SETS, "mpiddp.training.data.data_sets"),
    "Batch": "mpiddp.training.data.samples",
    "Row": "mpiddp.training.records.metrics",
    "Task": "mpiddp.training.task.task",
    "Trainer": "mpiddp.training.script_trainer",
}


def __dir__() -> list[str]:
    """The public names, for completion and ``help(mpiddp.training)``."""
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mpiddp.training' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found
