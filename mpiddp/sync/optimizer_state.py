"""An optimizer's state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load momentum and the like from what ``state_dict`` returned.

    Decay, betas and the form of the implementation stay this optimizer's: the options that are
    given now decide on them, and FSDP's parameters have no fused SGD.
    """
    groups = [
        {**before, **{name: value for name, value in now.items() if name != "params"}}
        for before, now in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
