"""The trainer, with something that happens to it in a certain place.

python saboteur.py PLAN OPTION…   PLAN is a JSON file: a folder, rules of `Rule`, the seconds of
a pause after each step, a file and the step after which no rank goes on before it has gone

Places are events of Python and of torch, and no functions of the trainer's. A rule acts once, also
over several starts: then ``fired.json`` is in the folder, with the time and the step.
"""

import ctypes
import errno
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@dataclass(frozen=True, kw_only=True)
class Rule:
    rank: int
    """That sees the event, and acts."""
    event: str
    """``step``: a step was made. ``evaluation``: after a step a module is called without gradients.
    ``open`` for writing, ``os.mkdir``, ``os.rename``: the audit event, of a path that ``path``
    matches."""
    path: str = ""
    count: int = 1
    """At which of these events of a process, counted from 1."""
    action: str
    """A function of this module."""
    targets: tuple[int, ...] = ()
    signal: int = 0
    target: str = ""


@dataclass
class Place:
    folder: Path
    rank: int
    steps: int = 0
    events: dict[Rule, int] = field(default_factory=dict)


def send_signals(rule: Rule, place: Place) -> None:
    for target in rule.targets:
        path = place.folder / f"process-{target}"
        while not (path.exists() and (process := path.read_text())):
            time.sleep(0.01)
        os.kill(int(process), rule.signal)


def note_only(rule: Rule, place: Place) -> None:
    """What happens comes from outside."""


def spin(rule: Rule, place: Place) -> None:
    while True:
        pass


def hold_lock(rule: Rule, place: Place) -> None:
    # A signal ends a sleep.
    while True:
        ctypes.PyDLL(None).sleep(1000)


def fill_disk(rule: Rule, place: Place) -> None:
    with open(rule.target, "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC


def fail_for_quota(rule: Rule, place: Place) -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def note(rule: Rule, place: Place) -> None:
    """One event that the rule is about; the file is made once."""
    place.events[rule] = place.events.get(rule, 0) + 1
    if place.events[rule] != rule.count:
        return
    try:
        descriptor = os.open(place.folder / "fired.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    content = {"time": time.time(), "step": place.steps, "rank": place.rank}
    os.write(descriptor, json.dumps(content).encode())
    os.close(descriptor)
    globals()[rule.action](rule, place)


def watch_files(rules: list[Rule], place: Place) -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename"):
            return
        is_write = event != "open" or "w" in str(arguments[1])
        for rule in rules:
            if rule.event == event and is_write and re.search(rule.path, str(arguments[0])):
                note(rule, place)

    if rules:
        sys.addaudithook(audit)


def watch_steps(rules: list[Rule], place: Place, plan: dict[str, Any]) -> None:
    hold, last = plan.get("hold", ("", 0))

    def after_step(*_: object) -> None:
        place.steps += 1
        time.sleep(plan["pause"])
        while place.steps == last and os.path.exists(hold):
            time.sleep(0.01)
        for rule in rules:
            if rule.event == "step":
                note(rule, place)

    register_optimizer_step_post_hook(after_step)


def watch_calls(rules: list[Rule], place: Place) -> None:
    def before_call(module: torch.nn.Module, inputs: Any) -> None:
        # Before the run begins the task is tried on a sample.
        if place.steps and not torch.is_grad_enabled():
            for rule in rules:
                if rule.event == "evaluation":
                    note(rule, place)

    register_module_forward_pre_hook(before_call)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0"))
    place = Place(Path(plan["folder"]), rank)
    mine = [Rule(**{**each, "targets": tuple(each.get("targets", ()))}) for each in plan["rules"]]
    mine = [rule for rule in mine if rule.rank == rank]
    (place.folder / f"process-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    watch_files(mine, place)
    watch_steps(mine, place, plan)
    watch_calls(mine, place)
    sys.argv[1:] = sys.argv[2:]
    from mpiddp.train import main as train

    train()


if __name__ == "__main__":
    main()
