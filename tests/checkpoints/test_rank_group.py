"""Small collective calls over Gloo: what comes back, and that nothing is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.planner import WriteItemType

import checkpointed
from mpiddp.checkpoints.storage import unpickling
from pool import Pools


class Fetched:
    """Pickled as early releases of Python 3.11 pickle the member of an enumeration."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.arguments


def test_members_of_enumerations_are_found_and_nothing_else() -> None:
    member = pickle.dumps(Fetched(WriteItemType, "SHARD"))
    assert unpickling.load(member) is WriteItemType.SHARD
    for arguments in ((WriteItemType, "mro"), (WriteItemType.SHARD, "name"), (Path, "mkdir")):
        with pytest.raises(unpickling.ForbiddenError):
            unpickling.load(pickle.dumps(Fetched(*arguments)))


@pytest.mark.mpi
def test_values_come_back_and_nothing_in_them_is_run(pool: Pools, tmp_path: Path) -> None:
    found = pool("openmpi", 3).call(checkpointed.exchange, tmp_path).values
    assert [each["gather"] for each in found] == [[0, 1, 2]] * 3
    assert [each["collect"] for each in found] == [[0, 1000, 2000], [], []]
    assert [each["scatter"] for each in found] == ["a", None, (3, 4.5)]
    assert [each["broadcast"] for each in found] == [0] * 3
    # What its own rank unpickles, too; rank 0 keeps what it broadcasts.
    assert [each["refused"] for each in found] == [
        ["posix.mkdir", "posix.mkdir", "posix.mkdir", None],
        ["posix.mkdir", None, "posix.mkdir", "posix.mkdir"],
        ["posix.mkdir", None, "posix.mkdir", "posix.mkdir"],
    ]
    assert not list(tmp_path.iterdir())
    assert not any("late" in each for each in found)
