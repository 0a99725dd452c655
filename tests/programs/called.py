"""Functions that tests of `mpiddp.ranks` call on ranks."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from mpiddp.launch.mpi.control import count_exchanges
from mpiddp.lifeline.stacks.flight_recorder import read_record
from mpiddp.remote.call import Call
from mpiddp.remote.channel import Channel

NAPS = 0.01
heard: list[int] = []


def expire_when(patch: Any, is_due: Callable[[Any], object]) -> None:
    """In the caller: the time of a call is up once ``is_due(call)``, however long that takes."""
    step = Call._step

    def expire(call: Call, until: float) -> bool:
        # PRINT_SECONDS, or less.
        assert until <= time.monotonic() + 1, "a line without an end would be seen late"
        found = step(call, until)
        if not call._is_stopping and is_due(call):
            call._shorten(0.0)
        return found

    patch.setattr(Call, "_step", expire)


def find_rank() -> int:
    return mpiddp.init().world.rank


def nothing() -> None:
    pass


def describe(first: Any, *, second: Any) -> tuple[Any, ...]:
    """Its arguments, and a sum over all ranks."""
    rank = find_rank()
    tensor = torch.full((3,), float(rank))
    distributed.all_reduce(tensor)
    return rank, first, second, tensor.tolist()


def print_much(lines: int) -> None:
    """By each way in which a process prints."""
    for number in range(lines):
        print(f"line {number}")
    ctypes.CDLL(None).printf(b"from C\n")
    subprocess.run(["echo", "from a program"], check=True)
    os.write(2, b"an error\n")
    print("half a line", end="")
    print("é" * 10, file=sys.stderr)


def print_block(size: int) -> None:
    """More than is read at once, just before the end of the call."""
    os.write(1, b"x" * size + b"\nend")


def show_progress() -> None:
    if find_rank() == 0:
        for _ in tqdm.tqdm(range(3), mininterval=0, ascii=True):
            pass


class AwkwardError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class MuteError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class UntrueError(Exception):
    def __bool__(self) -> bool:
        raise TypeError("no truth")


class OddNotesError(Exception):
    __notes__ = ()

    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


def make_error(kind: str) -> BaseException:
    """An exception of a kind that is hard to hand over."""
    if kind == "tensor":
        return ValueError(torch.arange(5000))
    if kind == "foreign":
        module = sys.modules["only_on_ranks"] = types.ModuleType("only_on_ranks")
        exec("class ForeignError(Exception): pass", module.__dict__)
        return module.ForeignError("far away")
    return {
        "awkward": lambda: AwkwardError(1, 2),
        "locked": LockedError,
        "mute": MuteError,
        "frozen": lambda: FrozenError(7),
        "untrue": UntrueError,
        "notes": OddNotesError,
        "group": lambda: ExceptionGroup("two", [ValueError(1), KeyError("k")]),
        "exit": lambda: SystemExit(3),
        "interrupt": lambda: KeyboardInterrupt("own"),
        "same": lambda: RuntimeError("the same"),
    }[kind]()


def fail(kinds: Sequence[str]) -> int:
    """Raise the exception of this rank's kind; of none if there is none."""
    rank = find_rank()
    if rank < len(kinds) and kinds[rank]:
        raise make_error(kinds[rank])
    return rank


class Unloadable:
    def __reduce__(self) -> Any:
        return _refuse_to_load, ()


def _refuse_to_load() -> None:
    raise ZeroDivisionError("not here")


class Unsendable:
    def __reduce__(self) -> Any:
        raise LookupError("not away")


def return_badly() -> Any:
    """On each rank another thing that does not reach the caller."""
    rank = find_rank()
    return [Unloadable, lambda: (each for each in ()), Unsendable][rank]()


def note(number: int) -> list[int]:
    heard.append(number)
    return list(heard)


def sleep_on(rank: int, folder: Path | None = None) -> int:
    """Sleep until interrupted, on one rank, or on all if it is -1."""
    if folder is not None:
        (folder / f"asleep-{find_rank()}").touch()
    while rank in (-1, find_rank()):
        time.sleep(NAPS)
    return find_rank()


def sleep_here(folder: Path) -> None:
    sleep_on(-1, folder)


def ignore_interrupts(folder: Path) -> None:
    (folder / f"asleep-{find_rank()}").touch()
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(NAPS)


def refuse_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def list_limits() -> list[float | None]:
    """How long each connection to the caller waits for it, in seconds."""
    channels = [each for each in gc.get_objects() if type(each) is Channel]
    return [each.connection.gettimeout() for each in channels if each.fileno() >= 0]


def hold_interpreter(folder: Path) -> None:
    """A call into C that lets go of the interpreter's lock for no signal: it locks itself out."""
    (folder / f"asleep-{find_rank()}").touch()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def start_sessions() -> list[bool]:
    """Sessions that are opened and closed again and again are one and the same."""
    first = mpiddp.init()
    found = []
    for _ in range(2):
        with mpiddp.init() as session:
            found.append(session is first)
    first.close()
    found.append(mpiddp.init() is first)
    return found


def start_another_session() -> None:
    mpiddp.init(backend="mpi" if mpiddp.init().backend != "mpi" else "gloo")


def train(folder: Path) -> tuple[float, float, list[str]]:
    """DDP, mpiddp's own collectives and a checkpoint."""
    with mpiddp.init() as session:
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.full((1, 2), float(session.world.rank))).sum().backward()
        optimizer.step()
        total = torch.ones(2)
        mpiddp.all_reduce(total)
        with mpiddp.Checkpointer(folder, model, optimizer) as checkpointer:
            checkpointer.save(3)
    weight = next(model.parameters())
    return float(weight.sum()), float(total[0]), sorted(os.listdir(folder))


def fit(options: dict[str, Any]) -> tuple[str, Any, list[float]]:
    """Train with `mpiddp.training.Trainer`. Returns the backend, and what came of it."""
    trainer = mpiddp.training.Trainer(**options)
    row = trainer.fit()
    total = torch.ones(3) * find_rank()
    distributed.all_reduce(total)
    assert trainer.session is mpiddp.init()
    return type(distributed.group.WORLD).__name__, row.parameters, total.tolist()


def gather_on(rank: int) -> None:
    """A collective that one rank alone calls, and does not wait for."""
    if find_rank() == rank:
        distributed.all_reduce(torch.ones(1), async_op=True)


def reduce_again() -> None:
    """Collectives without an end, with all ranks."""
    while True:
        distributed.all_reduce(torch.ones(1000))


def leave_calls() -> None:
    """Collectives that no rank waits for, and some ranks begin late."""
    mpiddp.all_reduce(torch.ones(1))
    time.sleep(0.1 * find_rank())
    for _ in range(20):
        mpiddp.all_reduce(torch.ones(1 << 18), async_op=True)


def ask_alone(folder: Path) -> None:
    """Rank 0 calls a collective of torch's group, and rank 1 one of the session: each waits."""
    session = mpiddp.init()
    # The group's first call prepares it.
    distributed.all_reduce(torch.ones(1000))

    def tell() -> None:
        while len({*count_exchanges(session)}) == 1 and all(
            call.is_complete for call in read_record()
        ):
            time.sleep(NAPS)
        (folder / f"asked-{session.world.rank}").touch()

    threading.Thread(target=tell, daemon=True).start()
    if session.world.rank:
        session.any(True)
    else:
        distributed.all_reduce(torch.ones(1000))


def destroy_group() -> None:
    distributed.destroy_process_group()


def leave_children(folder: Path) -> int:
    """Fork a process that outlives this one, and keeps what it has inherited."""
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    (folder / f"child-{find_rank()}").write_text(str(child))
    (folder / f"asleep-{find_rank()}").touch()
    return os.getpid()


def look_around() -> tuple[str, str | None, str, list[str]]:
    """Directory, a variable, Python's path, and variables that nobody else needs to know."""
    secret = [name for name in os.environ if "CALLER" in name]
    return os.getcwd(), os.environ.get("OF_THE_TEST"), sys.path[0], secret


def make_zeros(count: int) -> Any:
    return torch.zeros(count)
