"""The algorithms by name, and how a name with parameters becomes a Schedule."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import os
import re
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from mpiddp.errors import ConfigurationError, MpiddpError, ScheduleError
from mpiddp.options.checks import did_you_mean
from mpiddp.schedules.cost import ClosedForm, Phase, Simulation, check_nodes, simulate
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.proof import prove, prove_half
from mpiddp.schedules.schedule import Collective, Schedule, Transfer, relabel, segment

LARGEST_SIMULATED = 1024
"""Ranks; beyond them the closed form is the price."""

Maker = Callable[..., Schedule]
Phases = Callable[..., Sequence[Phase] | None]

_algorithms: dict[str, Algorithm] = {}
"""Filled while ``algorithms`` is imported, and by ``register``."""


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce, for any number of ranks."""

    name: str
    make: Maker
    """``make(ranks, **parameters)``; if it has a parameter ``nodes``, the ranks of each."""
    phases: Phases
    """``phases(nodes, each, **parameters)``: the closed form on nodes of ``each`` ranks; None
    if none is known."""
    source: str = ""
    """The file that it was loaded from; empty if it was not."""
    proved: set[Hashable] = field(default_factory=set, compare=False, repr=False)
    """The ranks, nodes and parameters for which its schedule was proved in this process."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Its parameters without ``nodes``, which the machine determines."""
        names = list(inspect.signature(self.make).parameters)[1:]
        return tuple(name for name in names if name != "nodes")

    @property
    def knows_nodes(self) -> bool:
        """Whether its schedule depends on which ranks share a node."""
        return "nodes" in inspect.signature(self.make).parameters

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        text = " ".join((self.make.__doc__ or "").replace("``", "").split())
        return re.split(r"(?<=[.])\s", text)[0]


def register(
    name: str, phases: Phases = lambda nodes, each, **parameters: None
) -> Callable[[Maker], Maker]:
    """Register an algorithm, which is then proved, priced, drawn, run and tested like all others.

    The function returns the same schedule whenever it is given the same arguments, since only the
    first one is proved. It raises ConfigurationError for numbers of ranks that it is not made for;
    `prove` leaves those out. Without ``phases`` the algorithm has no closed form, and a price only
    if it can be simulated.

    Raises ValueError if an algorithm of that name is registered.
    """

    def keep(make: Maker) -> Maker:
        if name in _algorithms:
            raise ValueError(f"an algorithm is called {name!r} already")

        @functools.wraps(make)
        def make_checked(ranks: int, *arguments: Any, **parameters: Any) -> Schedule:
            if ranks < 1:
                raise ConfigurationError(f"ranks must be an integer >= 1, found {ranks}")
            schedule = make(ranks, *arguments, **parameters)
            found = getattr(schedule, "ranks", type(schedule).__name__)
            if found != ranks:
                raise ScheduleError(
                    f"{name} on {ranks} ranks: expected a Schedule of {ranks} ranks, found {found}"
                )
            if schedule.collective is not Collective.ALL_REDUCE:
                raise ScheduleError(
                    f"{name} on {ranks} ranks is no all-reduce: it is made as a "
                    f"{schedule.collective.value}"
                )
            return schedule

        _algorithms[name] = Algorithm(name, make_checked, phases)
        return make_checked

    return keep


def adopt(source: str, run: Callable[[], object]) -> None:
    """Note ``source`` for all that ``run`` registers; if it fails, register nothing of it."""
    before = set(_algorithms)
    try:
        run()
    except BaseException:
        for name in _algorithms.keys() - before:
            del _algorithms[name]
        raise
    for name in _algorithms.keys() - before:
        make = _explain(name, _algorithms[name].make, source)
        _algorithms[name] = replace(_algorithms[name], make=make, source=source)


def _explain(name: str, make: Maker, source: str) -> Maker:
    """The same function, whose errors are one line: name, ranks, what was raised and where."""

    @functools.wraps(make)
    def make_explained(ranks: int, *arguments: Any, **parameters: Any) -> Schedule:
        try:
            schedule = make(ranks, *arguments, **parameters)
            _check_types(schedule)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name} on {ranks} ranks: {error}") from None
        except MpiddpError:
            raise
        except Exception as error:  # Whatever a stranger's function raises is its mistake.
            code = getattr(inspect.unwrap(make), "__code__", None)
            line = find_line(error, source) or getattr(code, "co_firstlineno", 1)
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            where = f"{os.path.basename(source)}:{line}"
            raise MpiddpError(f"{name} on {ranks} ranks: {text} ({where})") from None
        return schedule

    return make_explained


def _check_types(schedule: Schedule) -> None:
    """Raise TypeError unless all steps are messages, and all of these numbers are integers."""
    for number, step in enumerate(schedule.steps):
        if not all(isinstance(each, Transfer) for each in step):
            raise TypeError(f"step {number}: expected a list of add(…) and copy(…), found {step}")
    steps = itertools.chain.from_iterable(schedule.steps)
    numbers = itertools.chain.from_iterable(steps)
    for each in (schedule.chunks, *schedule.members, *schedule.owners, *numbers):
        operator.index(each)


def find_line(error: BaseException, source: str) -> int | None:
    """The last line of a file that the error passed; None if it passed none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (one.lineno for one in reversed(frames) if os.path.realpath(one.filename) == source), None
    )


def names(source: str | None = None) -> tuple[str, ...]:
    """All names, or those loaded from ``source``, in the order in which they were registered."""
    return tuple(
        name for name, each in _algorithms.items() if source is None or each.source == source
    )


def is_built_in(choice: Choice) -> bool:
    """Whether all that it is made of comes with this package: its schedule then depends on the
    arguments alone, and is the same in all processes.
    """
    inner = [_algorithms[each] for each in choice.parameters.values() if each in _algorithms]
    return all(
        not each.source and each.make.__module__.startswith(f"{__package__}.")
        for each in (choice.algorithm, *inner)
    )


def find(name: str) -> Algorithm:
    """The algorithm of that name. Raises ConfigurationError if there is none."""
    if name not in _algorithms:
        if name.endswith((".py", ".xml", ".json")):
            raise ConfigurationError(f"no algorithm is called {name!r}; type --load {name}")
        raise ConfigurationError(
            f"no algorithm is called {name!r}{did_you_mean(name, names())}; there are "
            f"{', '.join(names())}"
        )
    return _algorithms[name]


def find_inner(name: str) -> Algorithm:
    """An algorithm with halves, for the inner level of another.

    Raises ConfigurationError if it has none, or does not exist.
    """
    return _find_level(name, "inner", "has no halves", lambda one: bool(one.make(2).owners))


def find_outer(name: str) -> Algorithm:
    """An algorithm that leaves no rank out, for the outer level, where each node is one rank.

    Raises ConfigurationError if it does, or does not exist.
    """
    why = "knows of nodes itself" if find(name).knows_nodes else "would leave a node out"
    return _find_level(
        name, "outer", why, lambda one: not one.knows_nodes and len(one.make(2).members) == 2
    )


def _find_level(name: str, level: str, why: str, fits: Callable[[Algorithm], bool]) -> Algorithm:
    algorithm = find(name)
    if not fits(algorithm):
        fitting = ", ".join(one.name for one in _algorithms.values() if fits(one))
        raise ConfigurationError(
            f"{name} {why}, so it cannot be the {level} level; expected one of {fitting}"
        )
    return algorithm


def check_servers(ranks: int, servers: int, *, dedicated: bool) -> None:
    """Raise ConfigurationError unless this number of the ranks can be servers."""
    # Dedicated servers leave at least one worker; one rank alone serves itself.
    most = max(1, ranks - 1 if dedicated else ranks)
    if not 1 <= servers <= most:
        kind = "dedicated" if dedicated else "colocated"
        raise ConfigurationError(
            f"{ranks} rank{'s' if ranks > 1 else ''} can have 1 to {most} {kind} servers, "
            f"not {servers}"
        )


@dataclass(frozen=True, eq=False)
class Price:
    seconds: float
    source: str
    """``simulated``, or ``closed form``."""
    form: ClosedForm | None
    """The closed form, if there is one."""
    simulation: Simulation | None


@dataclass(frozen=True)
class Choice:
    """An algorithm with its parameters, for example ``ring:segments=16``."""

    algorithm: Algorithm
    parameters: Mapping[str, Any] = field(default_factory=dict)
    segments: int = 1
    collective: Collective = Collective.ALL_REDUCE
    """What it is built for: an all-reduce, or what one of its halves is."""

    def __hash__(self) -> int:
        return hash((self.algorithm.name, *self.parameters.items(), self.segments, self.collective))

    def __str__(self) -> str:
        values = {**self.parameters, **({"segments": self.segments} if self.segments > 1 else {})}
        pairs = ",".join(f"{key}={value}" for key, value in values.items())
        return f"{self.algorithm.name}:{pairs}" if pairs else self.algorithm.name

    @property
    def summary(self) -> str:
        """The algorithm's, and which half of it this is."""
        if self.collective is Collective.ALL_REDUCE:
            return self.algorithm.summary
        half = "second" if self.collective.gathers else "first"
        return f"The {half} half of this all-reduce: {self.algorithm.summary}"

    def make(
        self, ranks: int, nodes: Sequence[int] | None = None, order: Sequence[int] | None = None
    ) -> Schedule:
        """The schedule as the algorithm makes it: not proved, and not in segments.

        ``nodes`` has the ranks of each node, if that is known; ``order`` has the ranks node by
        node, if they are not numbered so. Raises ConfigurationError for what cannot be: no
        ranks, nodes that do not add up, more servers than ranks.
        """
        known = {}
        if nodes is not None:
            sizes = check_nodes(ranks, nodes)
            known = {"nodes": sizes} if self.algorithm.knows_nodes else {}
        schedule = self.algorithm.make(ranks, **self.parameters, **known)
        return schedule if order is None else relabel(schedule, order)

    def build(
        self, ranks: int, nodes: Sequence[int] | None = None, order: Sequence[int] | None = None
    ) -> Schedule:
        """The schedule, which is proved when it is built for the first time.

        What is proved is the schedule in one segment. Segments have no chunk in common, and each
        takes all steps in their order; no condition of the proof joins two chunks.

        Raises ScheduleError, with the proof's sentence, for one that is no all-reduce;
        ConfigurationError as ``make``, and if its half is not what ``collective`` is.
        """
        if self.collective is Collective.ALL_REDUCE:
            return segment(self._build_whole(ranks, nodes, order), self.segments)
        half = self.build_half(self.collective, ranks, nodes, order)
        if half.collective is not self.collective and ranks > 1:
            raise ConfigurationError(
                f"{self} makes {half.collective.value}, not {self.collective.value}"
            )
        return segment(replace(half, collective=self.collective), self.segments)

    def build_half(
        self,
        kind: Collective,
        ranks: int,
        nodes: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> Schedule:
        """The half of the schedule that makes a collective of this kind, proved, in one segment.

        For a reduce or a reduce-scatter that is the first half, which is the one or the other.
        Raises ScheduleError and ConfigurationError as ``build``, and if there are no halves.
        """
        whole = self._build_whole(ranks, nodes, order)
        if not whole.owners:
            raise ConfigurationError(f"{self} has no halves, so it makes no {kind.value}")
        try:
            return prove_half(whole, kind)
        except ScheduleError as error:
            raise ScheduleError(f"{self} on {ranks} ranks {error}") from None

    def _build_whole(
        self, ranks: int, nodes: Sequence[int] | None, order: Sequence[int] | None
    ) -> Schedule:
        schedule = self.make(ranks, nodes, order)
        parameters = tuple(sorted(self.parameters.items()))
        key = (ranks, nodes and tuple(nodes), order and tuple(order), parameters)
        if key not in self.algorithm.proved:
            try:
                prove(schedule)
            except ScheduleError as error:
                raise ScheduleError(f"{self} on {ranks} ranks is no all-reduce: {error}") from None
            self.algorithm.proved.add(key)
        return schedule

    def closed_form(self, nodes: Sequence[int]) -> ClosedForm | None:
        """The price as a formula, if one is known: not of halves, segments or uneven nodes."""
        is_whole = self.collective is Collective.ALL_REDUCE
        if not is_whole or self.segments > 1 or len(set(nodes)) > 1:
            return None
        phases = self.algorithm.phases(len(nodes), nodes[0], **self.parameters)
        return None if phases is None else ClosedForm(tuple(phases))

    def prices(
        self, sizes: Sequence[int], machine: Machine, nodes: Sequence[int], *, item: int = 4
    ) -> list[Price]:
        """A price for each size: simulated up to LARGEST_SIMULATED ranks, beyond by closed form.

        Sizes in bytes, rounded down to whole elements of ``item`` bytes. Raises
        ConfigurationError if there are too many ranks and no closed form.
        """
        ranks = sum(check_nodes(sum(nodes), nodes))
        form = self.closed_form(nodes)
        if ranks <= LARGEST_SIMULATED:
            schedule = self.build(ranks, nodes)
            runs = [simulate(schedule, size // item, machine, nodes, item=item) for size in sizes]
            return [Price(run.seconds, "simulated", form, run) for run in runs]
        if form is None:
            raise ConfigurationError(
                f"{self} has no closed form for {ranks} ranks on {len(nodes)} nodes, and more than "
                f"{LARGEST_SIMULATED} are not simulated"
            )
        return [
            Price(form.seconds(size // item * item, machine), "closed form", form, None)
            for size in sizes
        ]


def parse(text: str) -> Choice:
    """Read ``NAME`` or ``NAME:key=value,…``. Raises ConfigurationError, saying what there is."""
    name, colon, rest = text.partition(":")
    algorithm = find(name)
    possible = (*algorithm.parameters, "segments")
    values: dict[str, Any] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, value = pair.partition("=")
        if key not in possible or not equals or not value:
            raise ConfigurationError(
                f"{pair!r} in {text!r}: {name} takes {', '.join(f'{item}=…' for item in possible)}"
            )
        if key in values:
            raise ConfigurationError(f"{key} is given twice in {text!r}")
        values[key] = _read(algorithm, key, value)
    segments = values.pop("segments", 1)
    return Choice(algorithm, values, segments)


def _read(algorithm: Algorithm, key: str, value: str) -> Any:
    if key in ("inner", "outer"):
        return find(value).name
    if possible := get_args(get_type_hints(algorithm.make).get(key)):
        words = [word for word in possible if isinstance(word, str)]
        if words and value not in words:
            raise ConfigurationError(f"{key} must be one of {', '.join(words)}, found {value!r}")
        if words:
            return value
    if not re.fullmatch("[1-9][0-9]*", value):
        raise ConfigurationError(f"{key} must be an integer >= 1, found {value!r}")
    return int(value)
