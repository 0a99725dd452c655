"""Which GPUs the ranks of a node take, by ``--devices``, counted among those that they see."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpiddp.errors import ConfigurationError
from mpiddp.launch.device.vendors import TYPES, VENDORS
from mpiddp.options.checks import check
from mpiddp.wording import count_noun

if TYPE_CHECKING:
    from mpiddp.launch.mpi.world import World

AUTO, CPU = "auto", "cpu"
WORDS = (AUTO, CPU, *TYPES)


def read_list(devices: str) -> tuple[int, ...] | None:
    """The numbers in a list of GPUs; None if it is one of the words.

    Raises ConfigurationError for anything else, and for a number that is given twice.
    """
    if devices in WORDS:
        return None
    # A script may give init() a number.
    is_list = re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", str(devices), re.ASCII)
    good = type(devices) is str and is_list is not None
    check("devices", good, f"{', '.join(WORDS)}, or numbers of GPUs such as '0,2'", devices)
    numbers = tuple(map(int, devices.split(",")))
    check("devices", len(set(numbers)) == len(numbers), "each GPU once", devices)
    return numbers


def choose_gpus(
    devices: str, visible: int, world: World, *, allow_sharing: bool, unseen: str = ""
) -> tuple[int, ...]:
    """Numbers of the GPUs that the ranks of this node take, by local rank; empty for the CPU.

    ``visible``: how many GPUs this process sees; ``allow_sharing``: whether a list may be too
    short; ``unseen``: why it sees none, if that is known. Raises ConfigurationError if ``devices``
    asks for what this rank does not see.
    """
    numbers = read_list(devices)
    if devices == CPU:
        return ()
    if devices in TYPES and not visible:
        makers = " or ".join(vendor.name for vendor in VENDORS if vendor.type == devices)
        raise ConfigurationError(
            f"--devices {devices}: this rank sees no GPU of {makers}: "
            f"{f'{unseen}; ' if unseen else ''}ask Slurm for GPUs (--gpus-per-node), start no "
            "ranks on this host, or let ranks without one use the CPU: --devices auto"
        )
    if numbers is None:
        return tuple(range(visible))
    if absent := [str(number) for number in numbers if number >= visible]:
        raise ConfigurationError(
            f"--devices {devices}: there is no GPU {' or '.join(absent)}: this rank sees "
            f"{count_noun(visible, 'GPU')}, counted from 0"
        )
    if world.local_size > len(numbers) and not allow_sharing:
        raise ConfigurationError(
            f"--devices {devices} is {count_noun(len(numbers), 'GPU')} for "
            f"{count_noun(world.local_size, 'rank')} on this host: name one for each rank, start "
            "fewer, or share on purpose: --allow-shared-gpu"
        )
    return numbers
