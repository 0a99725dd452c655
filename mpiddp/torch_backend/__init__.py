"""mpiddp's collectives as a backend of torch.distributed, for tensors on CPUs.

    import mpiddp.torch_backend

    torch.distributed.init_process_group("mpiddp")

Importing this registers the backend. torch from 2.14 on finds it without the import.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.torch_backend.group import NAME, Group
from mpiddp.torch_backend.members import Place
from mpiddp.torch_internals import add_prefix, fill, find_plugin


def make_group(options: Any, backend_options: Any = None) -> Group:
    """What torch calls for a new group: its backend."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    # torchrun may use one store for all attempts: another one's values are still there.
    attempt = environment.read_count(environment.TORCHELASTIC_RESTART_COUNT)
    store = add_prefix(f"mpiddp/attempt {attempt}", options.store)
    # A group that is made after another one was destroyed may have that one's name, and its keys.
    number = store.add(str(options.group_rank), 1)
    store = add_prefix(str(number), store)
    return Group(Place(store, options.group_rank, ranks, options.timeout, options.group_id))


def register() -> None:
    """Register the backend, once. Raises ConfigurationError if its name is taken."""
    maker = find_plugin(NAME)
    if maker is None:
        distributed.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
        fill(distributed, monitored_barrier=monitored_barrier)
    elif maker is not make_group:
        raise ConfigurationError(f"torch.distributed has another backend called {NAME!r} already")


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """torch.distributed's, which asks for the name "gloo", for groups of mpiddp as well."""
    found = group or distributed.group.WORLD
    if isinstance(found, Group):
        found.monitored_barrier(timeout, wait_all_ranks)
    else:
        _monitored_barrier(group, timeout, wait_all_ranks)


_monitored_barrier = distributed.monitored_barrier
register()
