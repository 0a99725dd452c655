"""Which GPU or CPU cores belong to this rank, decided before its backend is asked anything."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.device import nccl, nvml
from mpiddp.launch.device.binding import (
    Cpus,
    choose_masks,
    find_allotted_cpus,
    find_near_cpus,
    read_topology,
)
from mpiddp.launch.device.choice import CPU, choose_gpus
from mpiddp.launch.device.vendors import (
    AMD,
    BACKENDS,
    INTEL,
    NVIDIA,
    TYPES,
    Vendor,
    format_bus,
    is_address,
    list_masks,
)
from mpiddp.launch.device.visibility import (
    assume_vendor,
    explain_unseen,
    find_contradiction,
    find_module,
    find_vendor,
    list_visible,
)
from mpiddp.process.cpus import find_cpus, find_quota

if TYPE_CHECKING:
    import torch

    from mpiddp.launch.mpi.mpi import SleepingCommunicator
    from mpiddp.launch.mpi.world import World

SLICE = "MIG-"
"""How the UUID of a slice of a GPU (MIG, Multi-Instance GPU) begins."""


@dataclass(frozen=True)
class Placement:
    """What one rank sees, and which of it is its own; compared with its node's other ranks."""

    rank: int
    gpus: tuple[int, ...]
    """Those that ranks of its node may take, counted among the ones that it sees."""
    index: int | None
    """The one it takes; None without GPUs."""
    identity: str | None
    """Tells that GPU, or slice of one, from the others of the node; None if it is unknown."""
    cores: Cpus
    """Cores that this process may run on."""
    card: str | None = None
    """PCI address of the GPU: slices of one GPU have the same. None before CUDA is asked."""
    allotted: Cpus = frozenset()
    """Cores that it could be bound to."""
    near: Cpus = frozenset()
    """Cores of the NUMA node of its GPU; empty without a GPU, or if they are unknown."""
    quota: float = math.inf
    """The cores' worth of time that its container has."""
    unseen: str = ""
    """Why it does not see the GPUs that it was given; empty if it does, or if it was given none."""

    @property
    def visible(self) -> int:
        return len(self.gpus)


@dataclass(frozen=True)
class Assignment:
    """The outcome for one rank."""

    index: int | None
    crowded: bool
    """Whether another rank of this node uses the same GPU, or another slice of it."""
    threads: int
    """CPU threads that are this rank's fair share of its node's cores."""
    remarks: tuple[str, ...]
    """What rank 0 should point out, the same on every rank of the node."""


def find_placement(
    world: World, devices: str, *, may_initialize: bool, allow_sharing: bool
) -> Placement:
    """Look at this process's GPUs and cores. No context is made on any GPU.

    Args:
        devices: as in `choose_gpus`, whose errors this raises.
        may_initialize: whether torch may initialise GPUs. A script may still want to fork, or to
            change the variables that select them.
    """
    vendor = find_vendor()
    if vendor is not None and devices in TYPES and devices != vendor.type:
        visible, unseen = 0, f"this torch is for {vendor.name} GPUs: --devices {vendor.type}"
    else:
        visible = count_visible(may_initialize=may_initialize)
        unseen = "" if devices == CPU else _find_reason(vendor, visible)
    gpus = choose_gpus(devices, visible, world, allow_sharing=allow_sharing, unseen=unseen)
    index = choose_index(gpus, world.local_rank)
    identity = find_identity(index) if index is not None else None
    return Placement(
        rank=world.rank,
        gpus=gpus,
        index=index,
        identity=identity,
        cores=find_cpus(),
        allotted=find_allotted_cpus(),
        near=find_near_cpus(find_bus_of(identity)),
        quota=find_quota(),
        unseen=unseen,
    )


def _find_reason(vendor: Vendor | None, visible: int) -> str:
    """Why this process does not see the GPUs that it was given; empty if it sees all."""
    if visible:
        return find_contradiction(vendor) if vendor is not None else ""
    return explain_unseen()


def count_visible(*, may_initialize: bool) -> int:
    """GPUs that this process can see.

    torch cannot count slices without initialising CUDA. CUDA shows one of them, the first that
    CUDA_VISIBLE_DEVICES names (CUDA C++ Programming Guide, CUDA Environment Variables). Nor can it
    count Intel's without pyzes: the kernel's list is counted. Of AMD's it may count some that HIP
    does not show, if variables hide GPUs from each other.
    """
    import torch

    vendor, entries = find_vendor(), _list_entries()
    if not may_initialize and entries and entries[0].startswith(SLICE):
        # torch has no types for it.
        return int(torch.backends.cuda.is_built())
    if vendor is INTEL and not may_initialize and (found := list_visible(vendor)):
        return len(found)
    count: int = find_module().device_count()
    hides = vendor is not None and find_contradiction(vendor)
    return min(count, len(list_visible(vendor))) if vendor is not None and hides else count


def choose_index(gpus: Sequence[int], local_rank: int) -> int | None:
    """A single GPU is this rank's own; of several it takes the one of its local rank.

    With more ranks than GPUs the count starts again; ``find_shared`` tells whether that may be.
    """
    return gpus[local_rank % len(gpus)] if gpus else None


def name_visible(gpus: Sequence[int]) -> dict[str, str]:
    """The variable with which a process sees only these of the GPUs that it sees now."""
    vendor, entries = assume_vendor(), _list_entries()
    shown = ",".join(str(gpu) if entries is None else entries[gpu] for gpu in gpus)
    own, common = vendor.masks[-1][0], vendor.masks[-1][-1]
    # torch counts all that ROCR_VISIBLE_DEVICES shows, unless HIP's own variable is set.
    return {common if {name for name, _ in list_masks(vendor)} <= {common} else own: shown}


def _list_entries() -> list[str] | None:
    """The GPUs that the last variable which counts names; None if it is not set."""
    vendor = assume_vendor()
    named = dict(list_masks(vendor))
    entries = next((named[name] for name in vendor.masks[-1] if name in named), None)
    if entries is None or vendor is not INTEL:
        return entries
    # Several tiles of one card (0.0,0.1) are one device.
    cards: dict[str, list[str]] = {}
    for entry in entries:
        cards.setdefault(entry.partition(".")[0], []).append(entry)
    return [",".join(tiles) for tiles in cards.values()]


def find_identity(index: int) -> str | None:
    """Identity of visible GPU ``index`` as far as NVML or the kernel tells, or None.

    NVIDIA's GPUs alone have NVML. It needs neither a context nor CUDA's initialisation, after which
    CUDA_VISIBLE_DEVICES would be fixed and a forked child could not use CUDA: a script may still
    rely on both. It counts GPUs by their PCI addresses, while CUDA begins with the fastest unless
    it is told otherwise: the number of a GPU then stands for it beside the list of all.
    """
    vendor = assume_vendor()
    if vendor is not NVIDIA:
        shown = list_visible(vendor)
        return shown[index] if index < len(shown) else None
    entries = _list_entries()
    if entries is not None and index >= len(entries):
        return None
    entry = entries[index] if entries is not None else str(index)
    if entry.startswith(SLICE):
        return entry
    uuids = nvml.list_uuids()
    if not entry.isdecimal():
        # A UUID, or its beginning.
        matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else entry
    number = int(entry)
    if number >= len(uuids):
        return None
    if len(uuids) > 1 and os.environ.get(environment.CUDA_DEVICE_ORDER) != "PCI_BUS_ID":
        return f"{number} of {', '.join(uuids)}"
    return uuids[number]


def find_bus_of(identity: str | None) -> str | None:
    """The PCI address of the GPU that `find_identity` has named, or None if nothing tells.

    Of several GPUs in an order that only CUDA knows, the one that NVML gives the same number.
    """
    if identity and is_address(address := identity.partition(" ")[0]):
        return address
    number, _, uuids = (identity or "").rpartition(" of ")
    uuid = uuids.split(", ")[int(number or 0)]
    return nvml.find_bus(uuid) if uuid else None


def select(placement: Placement) -> Placement:
    """Make this rank's GPU torch's current device, and ask torch which it is."""
    if placement.index is None:
        return placement
    module, vendor = find_module(), find_vendor()
    module.set_device(placement.index)
    properties: Any = module.get_device_properties(placement.index)
    # torch tells no addresses of Intel's.
    bus = find_bus(properties) or find_bus_of(placement.identity)
    card = bus
    parts = [str(getattr(properties, "uuid", None) or ""), find_bus(properties) or ""]
    if vendor is AMD or vendor is INTEL:
        # Partitions of an AMD GPU may share both, and RCCL takes them as separate GPUs. A tile of
        # one of Intel's has a UUID of its own.
        card = None
        known, _, part = (placement.identity or "").partition(" ")
        several = str(placement.index) if placement.visible > 1 and vendor is AMD else ""
        parts.append(part if is_address(known) and part else several)
    entries = _list_entries() or []
    if placement.index < len(entries) and entries[placement.index].startswith(SLICE):
        # CUDA may give the UUID of the whole GPU.
        parts.append(entries[placement.index])
    identity = " ".join(filter(None, parts)) or placement.identity
    return replace(placement, identity=identity, card=card, near=find_near_cpus(bus))


def find_bus(properties: Any) -> str | None:
    """The PCI address of a GPU as the system writes it, or None if this torch does not say."""
    found = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    numbers = [number for number in found if isinstance(number, int)]
    return format_bus(*numbers) if len(numbers) == 3 else None


def compare(
    world: World, node: SleepingCommunicator | None, placement: Placement, *, allow_sharing: bool
) -> list[Placement]:
    """The placements of this node's ranks, by local rank. Collective over ``node``.

    Raises LaunchError on every rank of the node when ranks would share a GPU unasked.
    """
    placements = [placement] if node is None else node.allgather(placement)
    shared = find_shared(placements)
    if shared and not allow_sharing:
        raise LaunchError(describe_sharing(world.hostname, placements, shared))
    return placements


def assign(world: World, placements: Sequence[Placement]) -> Assignment:
    """Settle what is this rank's, by the placements of its node."""
    index = placements[world.local_rank].index
    return Assignment(
        index=index,
        crowded=world.rank in find_crowded(placements),
        threads=share_cores(
            [p.cores for p in placements], world.local_rank, [p.quota for p in placements]
        ),
        remarks=find_remarks(world.hostname, placements),
    )


def choose_cores(placements: Sequence[Placement], kind: str) -> list[Cpus] | None:
    """The cores of each rank of a node, or None if they are left as they are.

    A rank that has been bound stays bound, and the others of its node then stay as they are, too.
    Nobody is bound if it is not known which cores are near a GPU: the choice could be a bad one.
    """
    if any(placement.cores != placements[0].allotted for placement in placements):
        return None
    if any(placement.index is not None and not placement.near for placement in placements):
        return None
    near = [placement.near for placement in placements]
    return choose_masks(read_topology(), placements[0].allotted, near, kind)


def find_shared(placements: Sequence[Placement]) -> frozenset[int]:
    """Ranks of one node that have a GPU, or a slice of one, which another rank has too.

    Identities decide. If they are unknown, ranks that see several GPUs see the same ones, so
    equal indices mean one GPU; ranks that see a single one are believed to have their own.
    """
    owners: dict[object, list[int]] = {}
    for placement in placements:
        if placement.index is None:
            continue
        key: object = placement.identity
        if key is None:
            key = placement.index if placement.visible > 1 else ("own", placement.rank)
        owners.setdefault(key, []).append(placement.rank)
    return _several(owners)


def find_crowded(placements: Sequence[Placement]) -> frozenset[int]:
    """Ranks of one node that share a GPU with another rank, though perhaps in separate slices."""
    owners: dict[object, list[int]] = {}
    for placement in placements:
        if placement.card is not None:
            owners.setdefault(placement.card, []).append(placement.rank)
    return find_shared(placements) | _several(owners)


def _several(owners: dict[object, list[int]]) -> frozenset[int]:
    return frozenset(rank for ranks in owners.values() if len(ranks) > 1 for rank in ranks)


def describe_sharing(hostname: str, placements: Sequence[Placement], shared: frozenset[int]) -> str:
    """Who shares what on this node, and how to start it instead."""
    visible = max(placement.visible for placement in placements)
    ranks = ", ".join(str(rank) for rank in sorted(shared))
    found = (
        f"{len(placements)} ranks for {visible} visible GPU{'s' if visible > 1 else ''}"
        if len(placements) > visible
        else f"{len(placements)} ranks that were given overlapping GPUs"
    )
    return (
        f"on {hostname}, ranks {ranks} would use a GPU that another rank uses: {found}. "
        f"Start one rank per GPU (--ntasks-per-node={visible} --gpus-per-node={visible}), or "
        "share on purpose: --allow-shared-gpu"
    )


def find_remarks(hostname: str, placements: Sequence[Placement]) -> tuple[str, ...]:
    """Idle GPUs, ranks that see one GPU each, and GPUs with several ranks."""
    remarks = []
    visible = max(placement.visible for placement in placements)
    count = len(placements)
    if visible > count:
        remarks.append(
            f"{hostname}: {visible} GPUs visible, {count} rank{'s' if count > 1 else ''} on this "
            f"node; to use them all: --ntasks-per-node={visible}"
        )
    identities = {placement.identity for placement in placements}
    if visible == 1 and count > 1 and (None in identities or len(identities) == count):
        remarks.append(
            f"{hostname}: each rank sees one GPU, which is its device 0 whatever its local rank; "
            "a script that calls set_device(LOCAL_RANK) needs all of them visible: "
            f"--gpus-per-node={count} --gpu-bind=none"
        )
    remarks += dict.fromkeys(f"{hostname}: {p.unseen}" for p in placements if p.unseen)
    crowded = find_crowded(placements)
    if crowded and refuses_sharing():
        ranks = ", ".join(str(rank) for rank in sorted(crowded))
        remarks.append(
            f"{hostname}: ranks {ranks} use one GPU or slices of one, which NCCL refuses. Gloo "
            "works there, and so does NCCL from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    return tuple(remarks)


def refuses_sharing() -> bool:
    """Whether ranks that share a GPU, or have slices of one, cannot use its maker's backend.

    What oneCCL does is not known; Gloo has no calls for Intel's GPUs in any case.
    """
    return assume_vendor().backend == NVIDIA.backend and not nccl.takes_shared_gpus()


def check_mixture(lacking: str, having: str) -> None:
    """Raise ConfigurationError if ranks with GPUs and others cannot be in one job.

    Args: how to name a rank without a GPU, and one that has one.
    """
    if assume_vendor().backend != NVIDIA.backend:
        raise ConfigurationError(
            f"{lacking} has no GPU, {having} has one, and Gloo, which would connect them, has no "
            f"calls for {assume_vendor().type} tensors: give each rank a GPU, or add --devices cpu"
        )


def share_cores(
    masks: Sequence[frozenset[int]], local_rank: int, quotas: Sequence[float] = ()
) -> int:
    """Threads for one rank: its cores, each divided among the ranks that may run on it.

    Ranks bound to separate cores get those; unbound ranks split the node evenly, and all split the
    ``quotas`` of their container. At least 1.
    """
    share = sum(1.0 / sum(core in mask for mask in masks) for core in masks[local_rank])
    return max(1, int(min(share, max(quotas, default=math.inf) / len(masks)) + 1e-9))


def choose_backend(requested: str, is_refused: bool, lacking: int | None) -> str:
    """The GPUs' own backend if it works on every rank's, else Gloo; or what was asked for.

    Args:
        is_refused: whether ranks use one GPU, or slices of one, and NCCL does not take that.
        lacking: the lowest rank without a GPU, or None.

    Raises:
        ConfigurationError: a backend of GPUs was asked for and a rank has none; torch lacks it.
        LaunchError: NCCL was asked for and is refused.
    """
    import torch.distributed as distributed

    if requested not in ("auto", *BACKENDS, "gloo", "mpi"):
        names = ", ".join(("auto", *BACKENDS, "gloo"))
        raise ConfigurationError(f"backend {requested!r}: expected {names} or mpi")
    if requested == "mpi" and not distributed.is_mpi_available():
        raise ConfigurationError(
            "backend mpi: this torch was built without MPI (torch.distributed.is_mpi_available() "
            "is False), as all wheels are: it takes a build from source where an MPI is installed. "
            "Without one, choose --backend gloo: mpiddp.all_reduce, and the trainer's --sync auto, "
            "use MPI and shared memory all the same"
        )
    if requested in BACKENDS:
        if lacking is not None:
            raise ConfigurationError(
                f"backend {requested} needs a GPU for every rank, but rank {lacking} has none: "
                "choose --backend gloo (or auto), or ask for GPUs (--gpus-per-node), and leave out "
                "--devices cpu"
            )
        if is_refused:
            raise LaunchError(
                "backend nccl cannot work with ranks that share a GPU or have slices of one: "
                "choose --backend gloo, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
            )
        if not distributed.is_backend_available(requested):
            raise ConfigurationError(
                f"backend {requested}: this torch was built without {requested.upper()}: choose "
                "--backend gloo, or auto"
            )
    if requested == "auto":
        own = assume_vendor().backend
        usable = lacking is None and not is_refused and distributed.is_backend_available(own)
        return own if usable else "gloo"
    return requested


def name_device(assignment: Assignment) -> torch.device:
    """This rank's torch.device."""
    import torch

    if assignment.index is None:
        return torch.device("cpu")
    return torch.device(assume_vendor().type, assignment.index)
