"""Loads algorithms from a file: Python that registers them, or a plan of another project.

    load(Path("star.py"))

A Python file has a function under ``@register("name")``. A plan is proved, made into a schedule,
and registered under the file's name without its ending.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.files import read_whole
from mpiddp.schedules import registry
from mpiddp.schedules.plans.conversion import make_schedule
from mpiddp.schedules.plans.plan import Plan, Promise
from mpiddp.schedules.plans.plan_proof import prove_plan
from mpiddp.schedules.schedule import Schedule

PYTHON, XML, JSON = ".py", ".xml", ".json"
PLANS = (XML, JSON)


def load(path: Path) -> tuple[str, ...]:
    """Register what a file has, once in a process; returns its names.

    Raises ConfigurationError, with the file and the line, for one that cannot be read, fails,
    registers nothing or a name that is taken; ScheduleError for a plan that is wrong.
    """
    source = str(path.resolve())
    if not registry.names(source):
        _check_file(path)
        run = _run if path.suffix == PYTHON else _register_plan
        registry.adopt(source, partial(run, path))
    return registry.names(source)


def read_plans(path: Path) -> list[Plan]:
    """The plan of a file, once for each way in which its buffers may lie.

    Raises ConfigurationError for a file that is no plan, or has what is not known; ScheduleError
    for one that could never end.
    """
    if path.suffix not in PLANS:
        raise ConfigurationError(f"{path}: expected a name that ends in {' or '.join(PLANS)}")
    # Most runs have none, and do not wait for what these import.
    from mpiddp.schedules.plans import msccl_xml, mscclpp_json

    try:
        data = read_whole(path)
        return [*(msccl_xml.read_xml(data) if path.suffix == XML else mscclpp_json.read_json(data))]
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None


def find_digest(path: Path) -> str:
    """What all ranks must agree on. Raises ConfigurationError if it cannot be read."""
    _check_file(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_file(path: Path) -> None:
    if path.suffix not in (PYTHON, *PLANS):
        raise ConfigurationError(
            f"{path}: expected a name that ends in {', '.join((PYTHON, *PLANS))}"
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None


def _run(path: Path) -> None:
    before = registry.names()
    name = f"loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    # Whatever a stranger's file raises is that file's mistake.
    except (Exception, SystemExit) as error:
        raise ConfigurationError(_locate(path, error)) from None
    if registry.names() == before:
        raise ConfigurationError(
            f'{path} registers no algorithm: expected a function under @register("name")'
        )


def _locate(path: Path, error: BaseException) -> str:
    """The file with the line at which it failed, and what happened, in one line."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, text = error.lineno, error.msg
    else:
        line = registry.find_line(error, str(path.resolve()))
        text = " ".join(str(error).split())
    where = str(path) if line is None else f"{path}:{line}"
    return f"{where}: {type(error).__name__}: {text}"


def _register_plan(path: Path) -> None:
    name, plan = path.stem, read_plans(path)[0]
    if not re.fullmatch(r"[^\s:,=]+", name) or name in registry.names():
        why = "is taken" if name in registry.names() else "has a space or one of :,="
        raise ConfigurationError(f"{path}: its algorithm would be called {name!r}, which {why}")
    if plan.promise is not Promise.ALL_REDUCE:
        raise ConfigurationError(
            f"{path} is no all-reduce: it is an {plan.promise.value}, which only prove takes"
        )
    try:
        prove_plan(plan)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    registry.register(name)(_PlanMaker(make_schedule(plan)))


@dataclass(frozen=True)
class _PlanMaker:
    """A plan of another project, on its number of ranks."""

    schedule: Schedule

    def __call__(self, ranks: int) -> Schedule:
        if ranks != self.schedule.ranks:
            raise ConfigurationError(f"it is a plan for {self.schedule.ranks} ranks")
        return self.schedule
