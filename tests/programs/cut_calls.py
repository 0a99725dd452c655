"""Trainings in which one system call after the other is cut off, by SIGKILL or by an error.

    python cut_calls.py FOLDER STRIDE

Of each so many calls one is cut off. torch is imported once: each attempt is forked, which takes
milliseconds. A line for each scenario tells how many calls there were.
"""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mpiddp
from mpiddp.checkpoints.storage import manifest as manifests
from saves import SHARD, flip

READS = frozenset(
    ("read", "readinto", "readall", "lstat", "stat", "fstat", "listdir", "scandir", "open")
)
"""Functions of Python that read a file or a directory."""
WRITES = frozenset(
    ("write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove", "pwrite",
     "ftruncate")
)  # fmt: skip
"""Functions that change them, or see to it that a change lasts."""
AGAIN, LAST = 5, 9
"""Steps that are saved after an error, and by the next job."""
CUT, WHOLE, BROKEN = range(3)
"""How an attempt ended: its call was cut off, there were fewer calls, or something is wrong."""


class Training:
    """Its weights have one number, that of the save."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.model = folder, nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.checkpointer = mpiddp.Checkpointer(folder, self.model, self.optimizer, keep=2)

    def save(self, step: int, number: int) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(number)
            self.optimizer.state[parameter] = {"momentum_buffer": parameter.detach().clone()}
        self.checkpointer.save(step, number=number)
        self.checkpointer.wait()

    def restore(self, name: str = "") -> int:
        """The number of the save; 0 if there is none."""
        state = self.checkpointer.restore(self.folder / name if name else None)
        number = state["number"] if state is not None else 0
        states = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        for each in (*self.model.parameters(), *states) if number else ():
            assert torch.equal(each, torch.full_like(each, number)), (each, number)
        return number


def go_on(training: Training) -> None:
    training.restore()
    training.save(3, 3)


def save_again(training: Training) -> None:
    """The newest one's place is taken."""
    training.restore()
    training.restore("step-1")
    training.save(2, 4)


@dataclass(frozen=True)
class Scenario:
    work: Callable[[Training], object]
    allowed: set[int]
    """Numbers of the newest save, wherever the work was cut off."""
    names: frozenset[str] = WRITES
    error: int | None = None
    """None for SIGKILL."""
    damage: bool = False
    ranks: int = 1


SCENARIOS = {
    "killed": Scenario(go_on, {2, 3}),
    "killed in an exchange": Scenario(save_again, {2, 4}),
    "killed beside damage": Scenario(Training.restore, {1}, damage=True),
    "full": Scenario(go_on, {2, 3}, error=errno.ENOSPC),
    "full in an exchange": Scenario(save_again, {2, 4}, error=errno.EIO),
    "full for one rank": Scenario(go_on, {2, 3}, error=errno.EDQUOT, ranks=2),
    "unreadable": Scenario(Training.restore, {2}, names=READS, error=errno.ESTALE),
    "unreadable beside damage": Scenario(
        Training.restore, {1}, names=READS, error=errno.EIO, damage=True
    ),
}


class Trap:
    """Counts calls in this thread, and in threads that start meanwhile, down to one."""

    def __init__(self, scenario: Scenario, count: int) -> None:
        self._scenario, self.left = scenario, count

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _look(self, frame: Any, kind: str, function: Any) -> None:
        if kind != "c_call" or not _is_of_files(frame, function, self._scenario.names):
            return
        self.left -= 1
        if self.left == -1:
            if self._scenario.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            sys.setprofile(None)
            raise OSError(self._scenario.error, os.strerror(self._scenario.error or 0))


def _is_of_files(frame: Any, function: Any, names: frozenset[str]) -> bool:
    if getattr(function, "__name__", "") not in names:
        return False
    module = getattr(function, "__module__", None) or type(function.__self__).__module__
    if module not in ("_io", "io", "posix", "fcntl") or "importlib" in frame.f_code.co_filename:
        return False
    if function.__name__ != "open" or names is not READS:
        return True
    # Path.open, and os.open of a directory.
    return str(frame.f_locals.get("mode", "")).startswith("r")


def run_rank(folder: Path, scenario: Scenario, count: int, rank: int) -> int:
    if scenario.ranks > 1:
        store = dist.FileStore(f"{folder}.store", scenario.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario.ranks)
    training, said = Training(folder), ""
    # The last rank's call.
    trap = Trap(scenario, count if rank == scenario.ranks - 1 else 1 << 40)
    with trap.set():
        try:
            scenario.work(training)
        except (OSError, mpiddp.MpiddpError) as error:
            said = f"{type(error).__name__}: {error}"
            assert "\n" not in said and scenario.names is WRITES, said
    Path(f"{folder}.said-{rank}").write_text(said)
    # Training goes on.
    assert training.restore() in scenario.allowed
    training.save(AGAIN, AGAIN)
    training.checkpointer.close()
    return CUT if trap.left < 0 else WHOLE


def fork(folder: Path, scenario: Scenario, count: int, rank: int) -> int:
    process = os.fork()
    if process == 0:
        code = BROKEN
        try:
            code = run_rank(folder, scenario, count, rank)
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return process


def check(folder: Path, allowed: set[int]) -> None:
    """The next job finds a whole checkpoint, and leaves nothing else."""
    training = Training(folder)
    found = training.restore()
    assert found in allowed, (found, allowed, list(folder.iterdir()))
    training.save(LAST, LAST)
    newest, before = manifests.list_checkpoints(folder)
    assert newest.name == f"step-{LAST}" and training.restore(before.name) == found
    training.checkpointer.close()
    left = {each.name for each in folder.glob("*step-*")} - {newest.name, before.name}
    assert all(each.endswith(".damaged") for each in left), left


def attempt(base: Path, folder: Path, scenario: Scenario, count: int) -> bool:
    """Whether there were so many calls."""
    shutil.copytree(base, folder)
    if scenario.damage:
        flip(folder / "step-2" / SHARD, 0.5)
    ranks = range(scenario.ranks)
    processes = [fork(folder, scenario, count, rank) for rank in ranks]
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes]
    is_killed = codes == [-signal.SIGKILL]
    assert is_killed or BROKEN not in codes, codes
    if not is_killed:
        said = {Path(f"{folder}.said-{rank}").read_text() for rank in ranks}
        assert len(said) == 1, said
    check(folder, scenario.allowed if is_killed else {AGAIN})
    shutil.rmtree(folder)
    return is_killed or CUT in codes


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # An error of reading is to cost milliseconds.
    manifests.FIRST_PAUSE, manifests.PATIENCE_SECONDS = 0.001, 20.0
    torch.set_num_threads(1)
    base, stride = Path(sys.argv[1], "base"), int(sys.argv[2])
    training = Training(base)
    for step in (1, 2):
        training.save(step, step)
    training.checkpointer.close()
    for place, (name, scenario) in enumerate(SCENARIOS.items()):
        # The last rank writes little; and there are many reads.
        every = 1 if scenario.ranks > 1 else stride if scenario.names is WRITES else 24 * stride
        for count in itertools.count(place % every, every):
            folder = base.with_name(f"{name}-{count}".replace(" ", "-"))
            if not attempt(base, folder, scenario, count):
                break
        print(f"{name}: {count}", flush=True)


if __name__ == "__main__":
    main()
