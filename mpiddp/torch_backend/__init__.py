"""mpiddp's collectives as a backend of torch.distributed, for tensors on CPUs.

    import mpiddp.torch_backend

    torch.distributed.init_process_group("mpiddp")

Importing this registers the backend. torch from 2.14 on finds it without the import.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch import distributed

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.device.visibility import find_module
from mpiddp.torch_backend.group import BACKEND_BASE, CPU_BACKEND, NAME, CpuBackend, Group
from mpiddp.torch_backend.members import Place
from mpiddp.torch_internals import (
    add_prefix,
    fill,
    find_backend_config,
    find_implementation,
    find_plugin,
)
from mpiddp.wording import print_message


def make_group(
    options: Any, backend_options: Any = None, kind: type[Group | CpuBackend] = Group
) -> Group | CpuBackend:
    """The backend of a new group; torch calls it."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    # torchrun may use one store for all attempts: another one's values are still there.
    attempt = environment.read_count(environment.TORCHELASTIC_RESTART_COUNT)
    store = add_prefix(f"mpiddp/attempt {attempt}", options.store)
    # A group that is made after another one was destroyed may have that one's name, and its keys.
    number = store.add(str(options.group_rank), 1)
    store = add_prefix(str(number), store)
    return kind(Place(store, options.group_rank, ranks, options.timeout, options.group_id))


def register() -> None:
    """Register the backend, once. Raises ConfigurationError if its name is taken."""
    maker = find_plugin(NAME)
    if maker is None:
        distributed.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
        fill(distributed, monitored_barrier=monitored_barrier)
        if BACKEND_BASE is not None:
            make_backend = partial(make_group, kind=CpuBackend)
            distributed.Backend.register_backend(CPU_BACKEND, make_backend, True, ["cpu"])
            choose_cpu_backend()
    elif maker is not make_group:
        raise ConfigurationError(f"torch.distributed has another backend called {NAME!r} already")


def choose_cpu_backend() -> None:
    """From now on a group that has other backends has a CpuBackend for mpiddp."""
    config = find_backend_config()
    original = config.get_device_backend_map

    def choose(self: Any) -> dict[str, str]:
        devices: dict[str, str] = original(self)
        is_one = devices.get("cpu") == NAME and len({*devices.values()}) > 1
        return {**devices, "cpu": CPU_BACKEND} if is_one else devices

    # Not __init__(), in which torch finds this backend by its entry point.
    fill(config, get_device_backend_map=choose)


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """As torch.distributed's, which accepts no group but Gloo's; this one takes mpiddp's too."""
    found = group or distributed.group.WORLD
    own = None if found is None else find_implementation(found, "list_gloo_calls")
    if own is not None:
        own.monitored_barrier(timeout, wait_all_ranks)
    else:
        _monitored_barrier(group, timeout, wait_all_ranks)


def replace_gloo() -> Callable[[], None]:
    """From now on groups whose backend is Gloo use mpiddp's for CPU tensors; returns what ends it.

    ``get_backend()`` still says gloo. NCCL is left alone: before torch 2.14 a backend in Python
    cannot stand beside another one in a group, and then a group with both keeps Gloo.
    """
    config = find_backend_config()
    original = config.__init__

    def choose(self: Any, backend: Any) -> None:
        original(self, backend)
        devices = self.device_backend_map
        if devices.get("cpu") != "gloo":
            return
        others = {name for name in devices.values() if name != "gloo"}
        if others and find_module().is_available() and BACKEND_BASE is None:
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


_monitored_barrier = distributed.monitored_barrier
register()
