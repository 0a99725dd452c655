"""What torch has no public name for, in one place: a new release may need changes here.

torch is imported in the functions: processes without it import this module as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from mpiddp import environment

Kind = TypeVar("Kind", bound=type)


def read_version_file() -> str:
    """The text of ``torch.version``, since an import takes seconds; empty if there is none."""
    try:
        spec = importlib.util.find_spec("torch")
        folder = os.path.dirname((spec.origin if spec is not None else None) or "")
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            return file.read()
    except (ImportError, OSError, ValueError):
        return ""


def read_torch_build() -> str:
    """What torch's own file says it is built for: ``cuda``, ``hip`` or ``xpu``; else empty."""
    text = read_version_file()
    found = re.findall(r"^(cuda|hip|xpu)\b[^=]*= ['\"]", text, re.MULTILINE)
    # Some builds for Intel say so in their version alone.
    return (
        str(found[0]) if found else "xpu" if re.search(r"^__version__ .*\+xpu", text, re.M) else ""
    )


def make_tcp_store(*values: Any, **options: Any) -> Any:
    """A ``TCPStore``, without importing all of torch.distributed."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(*values, **options)


def add_prefix(prefix: str, store: Any) -> Any:
    """The store, for keys that begin with a prefix."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)


def wrap_rendezvous(wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Have ``wrap(handler)`` answer instead of each handler of ``init_method`` that torch has.

    It gets torch's own, if that is wrapped already. Returns what puts back what was there before.
    """
    # By its name: torch.distributed has a function of the same one.
    module = importlib.import_module("torch.distributed.rendezvous")
    # A torch without this table starts all the same: its own handlers then do what they do.
    handlers = getattr(module, "_rendezvous_handlers", {})
    before = dict(handlers)
    handlers.update({scheme: wrap(inspect.unwrap(each)) for scheme, each in before.items()})
    return lambda: handlers.update(before)


def find_default_store() -> Any:
    """The store of torch.distributed's default group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def leave_uncompiled(function: Callable[..., Any]) -> Any:
    """``torch.compiler.disable``, but torch._dynamo is imported by the first call: 0.7 s."""
    import torch

    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


def lower_debug_level() -> bool:
    """Lower torch.distributed's debug level from DETAIL to INFO; whether it was DETAIL."""
    from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

    if get_debug_level() != DebugLevel.DETAIL:
        return False
    set_debug_level(DebugLevel.INFO)
    return True


def list_groups() -> list[Any]:
    """The open process groups; none in a process that has not imported torch.distributed.

    A copy: the program may make a group meanwhile.
    """
    library = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if library is None else list(library._world.pg_map)


def list_members(group: Any) -> list[int]:
    """The ranks of an open process group, as the default group counts them."""
    library = sys.modules["torch.distributed.distributed_c10d"]
    return sorted(library._world.pg_group_ranks.get(group, ()))


def count_calls(group: Any) -> int:
    """How many calls this rank has made in a group, messages between two ranks included."""
    count: int = group._get_sequence_number_for_group()
    return count


def find_backend(group: Any, device: str) -> Any:
    """A group's backend for devices of this type. Raises RuntimeError if it has none."""
    import torch

    return group._get_backend(torch.device(device))


def find_implementation(group: Any, method: str) -> Any:
    """The group, or else its backend for CPUs, if it has ``method``; None if neither has."""
    import torch

    found = group
    if not hasattr(group, method):
        try:
            found = group._get_backend(torch.device("cpu"))
        except (AttributeError, RuntimeError):
            return None
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts another backend around it.
        found = getattr(found, "wrapped_pg", found)
    return found if hasattr(found, method) else None


def find_backend_base() -> Any:
    """What a backend in Python derives from to be one of several in a group.

    None before torch 2.14, in which Python can derive from whole groups only.
    """
    from torch import distributed
    from torch._C._distributed_c10d import Backend

    # Public from 2.16 on.
    base: Any = getattr(distributed, "BackendBase", Backend)
    try:
        base(0, 1)
    except TypeError:
        return None
    return base


def find_recorder(name: str) -> Callable[..., bytes] | None:
    """A function that dumps the flight recorder; None without torch, or in another release."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def find_record(content: Any, name: str) -> int:
    """Where a record begins in a file of ``torch.save``."""
    import torch

    reader: Any = torch._C.PyTorchFileReader(content)
    offset: int = reader.get_record_offset(name)
    return offset


def find_increment_version() -> Callable[[tuple[Any, ...]], None]:
    """What ``torch.autograd.graph.increment_version`` calls for several tensors.

    It first asks whether it was given one or several, which takes two thirds of its time.
    """
    import torch

    found: Callable[[tuple[Any, ...]], None] = getattr(
        torch._C, "_increment_version", torch.autograd.graph.increment_version
    )
    return found


def bind_comparison(tensor: Any) -> Callable[[Any], bool]:
    """A function that says whether a tensor is as this one was, except in address and version.

    It compares class, type, device, shape, strides and requires_grad, and whether the values are
    the memory's (not those of a negative or conjugate view). torch's own comparison takes half the
    time of the same questions one by one.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        options: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        # torch's stub knows no arguments of it.
        return TensorGuards(tensor, **options).check  # type: ignore[call-arg]
    except (ImportError, TypeError):
        return partial(_is_alike, _describe_tensor(tensor))


def _is_alike(description: tuple[Any, ...], tensor: Any) -> bool:
    return description == _describe_tensor(tensor)


def _describe_tensor(tensor: Any) -> tuple[Any, ...]:
    return (
        type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(),
        tensor.requires_grad, tensor.is_neg(), tensor.is_conj(),
    )  # fmt: skip


def find_queue_after_backward() -> Callable[[Callable[[], None]], None]:
    """A function that queues a callback for the end of the present backward pass, before those that
    are queued later."""
    import torch

    queue: Callable[[Callable[[], None]], None]
    queue = torch.autograd.Variable._execution_engine.queue_callback
    return queue


NO_BACKWARD = -1


def find_backward() -> int:
    """The number of the backward pass that this thread is in, or NO_BACKWARD."""
    import torch

    number: int = torch._C._current_graph_task_id()
    return number


def infer(mode: bool) -> AbstractContextManager[None]:
    """``torch.inference_mode(mode)``, in half of its time."""
    import torch

    guard: Any = torch._C._InferenceMode(mode)
    return guard  # type: ignore[no-any-return]


def make_gloo(store: Any, rank: int, size: int, timeout: Any, note_timeout: Any = None) -> Any:
    """A backend of Gloo over ``size`` ranks that connects two of them when they first talk.

    Through the interfaces that the environment names, as torch's own constructor of it.

    ``note_timeout``: is called instead if torch.distributed sets the backend's timeout.
    """
    from torch.distributed import distributed_c10d

    kind: Any = distributed_c10d.ProcessGroupGloo
    if note_timeout is not None:
        methods = {"_set_default_timeout": lambda _, timeout: note_timeout(timeout)}
        kind = type("ProcessGroupGloo", (kind,), methods)
    interfaces = filter(None, os.environ.get(environment.GLOO_SOCKET_IFNAME, "").split(","))
    devices = [kind.create_device(interface=name, lazy_init=True) for name in interfaces]
    devices = devices or [kind.create_default_device(lazy_init=True)]
    options = fill(getattr(kind, "_Options")(), _devices=devices, _timeout=timeout)  # noqa: B009
    options = fill(options, _threads=2 * len(devices))
    return kind(store, rank, size, options)


def set_gloo_timeout(gloo: Any, timeout: Any) -> None:
    """Of what ``make_gloo`` made: for calls that begin from now on."""
    from torch.distributed import distributed_c10d

    kind: Any = distributed_c10d.ProcessGroupGloo
    getattr(kind, "_set_default_timeout")(gloo, timeout)  # noqa: B009


def find_is_profiled() -> Callable[[], bool]:
    """A function that says whether torch's profiler follows this thread, in 0.1 µs."""
    from torch._C._autograd import _profiler_enabled

    return _profiler_enabled


def fill(options: Any, **values: Any) -> Any:
    """Set attributes of an object of torch's, which has no other way, and return it."""
    for name, value in values.items():
        setattr(options, name, value)
    return options


def find_plugin(name: str) -> Any:
    """What makes the groups of a registered backend; None if there is no such backend."""
    from torch.distributed import Backend

    plugin = vars(Backend)["_plugins"].get(name.upper())
    return None if plugin is None else plugin.creator_fn


def find_scale(operator: Any) -> Any:
    """The factor of a PREMUL_SUM, a number or a tensor."""
    return operator.__getstate__()[1]


def keep_from_compiler(kind: Kind) -> Kind:
    """Have torch.compile run the methods of a class, and what they call, as they are.

    C++ calls them in the middle of a compiled program, whose compiler would take them for its own.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(kind).values():
        if code := getattr(method, "__code__", None):
            set_code_exec_strategy(code, skip)
    return kind


def find_backend_config() -> Any:
    """The class that says which backend a group has for each type of device."""
    from torch.distributed.distributed_c10d import BackendConfig

    return BackendConfig
