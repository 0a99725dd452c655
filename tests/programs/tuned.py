"""What ranks do with a tuning table: what they say of it, and what runs."""

import os
from pathlib import Path
from typing import Any

import torch

import mpiddp
from mistakes import hear, set_variable
from mpiddp.collectives.bootstrap import ensure_communicator
from pool_rank import renew

VARIABLE = "MPIDDP_TUNING"


def run(session: mpiddp.Session, path: Path, counts: tuple[int, ...]) -> dict[str, Any]:
    """All-reduces by auto with a table: what was said, and what ran for each count of float32."""
    renew(session)
    set_variable(VARIABLE, str(path))
    described = mpiddp.describe_collectives()
    communicator, ran = ensure_communicator(), []
    for count in counts:
        tensor = torch.ones(count)
        mpiddp.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((count,), float(session.world.size)))
        plan = list(communicator._plans.values())[-1]
        ran.append(plan._execution.description.call)  # type: ignore[attr-defined]
    set_variable(VARIABLE, None)
    return {"tuning": described["tuning"], "ran": ran}


def differ(session: mpiddp.Session, paths: list[str | None]) -> str:
    """What is said if the ranks have these tables; afterwards all is well without."""
    renew(session)
    set_variable(VARIABLE, paths[session.world.rank])
    said = hear(mpiddp.describe_collectives)
    set_variable(VARIABLE, None)
    assert hear(lambda: mpiddp.all_reduce(torch.ones(3))) == "nothing was said"
    assert os.environ.get(VARIABLE) is None
    return said
