"""GPUs that this process was given, found without torch, and why torch does not see them."""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp import environment
from mpiddp.launch.device.vendors import AMD, NVIDIA, ROOT, VENDORS, Vendor, find_built, list_masks
from mpiddp.torch_internals import read_torch_build
from mpiddp.wording import count_noun


def count_gpus(root: Path = ROOT) -> int:
    """GPUs that this process may use: of the maker that torch is built for, if that is known.

    Of others those alone that were made for computing.
    """
    built = find_built(read_torch_build())
    makers = VENDORS if built is None else (built,)
    found = next(filter(None, (_count(maker, root, built) for maker in makers)), 0)
    if not found and NVIDIA in makers and environment.CUDA_VISIBLE_DEVICES not in os.environ:
        return _ask_driver()
    return found


def list_visible(vendor: Vendor, root: Path = ROOT, *, certain: bool = False) -> list[str]:
    """What tells the GPUs of a maker from each other: those that its variables show.

    It is their entry in a variable if the kernel lists none. ``certain``: those alone that were
    made for computing.
    """
    gpus = vendor.list_gpus(root)
    if certain and gpus and not any(gpu.is_certain for gpu in gpus):
        return []
    shown = [gpu.identity for gpu in gpus]
    is_known = bool(gpus)
    for _, entries in list_masks(vendor):
        shown, is_known = _pick(vendor, entries, shown if is_known else None), True
    return shown


def _pick(vendor: Vendor, entries: Sequence[str], shown: Sequence[str] | None) -> list[str]:
    """The GPUs that these entries name: ``shown`` are numbered, if they are known."""
    found: dict[str, str] = {}
    for entry in entries:
        # What follows one that does not exist is not used either.
        if not re.fullmatch(vendor.entry, entry):
            break
        if shown is None or not entry.isdecimal():
            # Several tiles of one of Intel's cards (0.0,0.1) are one device.
            found.setdefault(entry.partition(".")[0], entry)
        elif int(entry) < len(shown):
            found[shown[int(entry)]] = shown[int(entry)]
        else:
            break
    return list(found.values())


def _count(vendor: Vendor, root: Path, built: Vendor | None) -> int:
    return len(list_visible(vendor, root, certain=vendor is not built))


def find_vendor() -> Vendor | None:
    """The maker whose GPUs this process's torch is built for; None if it is for CPUs alone."""
    import torch

    return next((vendor for vendor in VENDORS if _has_build(torch, vendor)), None)


def assume_vendor() -> Vendor:
    """The same; NVIDIA for a torch that is for CPUs alone."""
    return find_vendor() or NVIDIA


def find_module() -> Any:
    """torch's module for the GPUs that it is built for: ``torch.cuda``, ``torch.xpu``."""
    import torch

    return torch.get_device_module(assume_vendor().type)


def _has_build(torch: ModuleType, vendor: Vendor) -> bool:
    if getattr(torch.version, vendor.build, None) is not None:
        return True
    # A site's own build for Intel need not know a version of it.
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type == vendor.type != NVIDIA.type


def find_contradiction(vendor: Vendor) -> str:
    """Why variables hide GPUs from each other; empty if they do not.

    AMD's ROCm takes ROCR_VISIBLE_DEVICES first, and HIP counts those that it shows from 0. A number
    that is right for both hides them all (Parsl issue 3858, May 2025; Slurm sets more than one of
    them if gres.conf does not name the maker).
    """
    before: tuple[str, list[str]] | None = None
    for name, entries in list_masks(vendor):
        if before is not None:
            outer, shown = before
            count = len(_pick(vendor, shown, None))
            wrong = [entry for entry in entries if entry.isdecimal() and int(entry) >= count]
            if wrong:
                return (
                    f"{outer}={','.join(shown)} shows {count_noun(count, f'{vendor.name} GPU')}, "
                    f"which {name}={','.join(entries)} counts from 0: there is no {wrong[0]}; "
                    f"unset {name}"
                )
        before = (name, entries)
    return ""


def explain_unseen(root: Path = ROOT) -> str:
    """Which GPUs this process was given although torch sees none, and why; empty if none were.

    Only for a process in which torch has counted no GPU: a driver that does not work is asked.
    """
    import torch

    built = find_vendor()
    if built is not None:
        if said := find_contradiction(built):
            return said
        if count := _count(built, root, built):
            return f"{_describe(count, built, root)}: {_ask_torch(built)}"
        if masks := [name for name, _ in list_masks(built)]:
            return _explain_hidden(built, masks, root)
    found = [(maker, count) for maker in VENDORS if (count := _count(maker, root, built))]
    # Slurm may set the variables of all makers.
    found.sort(key=lambda each: not each[0].list_gpus(root))
    if not found and not any(list_masks(NVIDIA)):
        found = [(NVIDIA, environment.read_count(environment.SLURM_GPUS_ON_NODE))]
    if not found or not found[0][1]:
        return ""
    maker, count = found[0]
    target = "CPUs alone" if built is None else f"{built.name} GPUs"
    which = f"its {maker.platform} build" if maker.list_gpus(root) else "its build for these GPUs"
    return (
        f"{_describe(count, maker, root)}: torch {torch.__version__} is built for {target}; "
        f"install {which}"
    )


def _describe(count: int, vendor: Vendor, root: Path) -> str:
    noun = f"{vendor.name} GPU" if vendor.list_gpus(root) else "GPU"
    return f"torch sees none of the {count_noun(count, noun)} that this process was given"


def _explain_hidden(vendor: Vendor, masks: Sequence[str], root: Path) -> str:
    """Whether the variable that hides all of a maker's GPUs is another maker's."""
    if vendor is not AMD or masks[-1] != environment.CUDA_VISIBLE_DEVICES:
        return ""
    if not (count := len(vendor.list_gpus(root))):
        return ""
    return (
        f"{environment.CUDA_VISIBLE_DEVICES}={os.environ[masks[-1]]} hides "
        f"{count_noun(count, f'{vendor.name} GPU')}, since HIP reads it, too: unset it, or say "
        f"which in {environment.ROCR_VISIBLE_DEVICES}"
    )


def _ask_torch(vendor: Vendor) -> str:
    """Why torch cannot use GPUs that are there, as far as it says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        find_module().is_available()
    said = [str(each.message).split(" (Triggered internally")[0] for each in caught]
    return said[0] if said else f"the driver does not say why; {vendor.tool} may"


def _ask_driver() -> int:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
