"""Start a launch: the phases in their order, each with a deadline, and a Session at the end.

At the end of each part of a phase the ranks agree that none of them failed in it. torch is imported
in a thread from the first moment on, while MPI starts.
"""

from __future__ import annotations

import atexit
import sys
from dataclasses import fields
from types import TracebackType
from typing import Any

from mpiddp.errors import ConfigurationError
from mpiddp.launch import phases, summary
from mpiddp.launch.failure.deadline import PHASES, PhaseDeadlines
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.termination import is_interactive
from mpiddp.launch.options import LaunchOptions, Options
from mpiddp.launch.phases import StartUp
from mpiddp.launch.resources import Resources
from mpiddp.launch.session import Session, find_failure_handler, find_session, make_current
from mpiddp.lifeline.lifeline import Lifeline
from mpiddp.lifeline.movement import Movement
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.process.streams.console import write_console


def start(
    options: Options,
    failure_handler: FailureHandler,
    *,
    makes_group: bool = True,
    signals: PreemptionSignals | None = None,
) -> Session:
    """Start a launch: returns once every rank has its World, device, store and process group.

    Collective over all processes of the launch. ``makes_group=False`` leaves the group to a script
    that calls init_process_group() itself. ``signals``: of a preemption, for
    `Session.signals`. A failure ends the job; in an interactive process that is alone it raises.
    """
    previous = find_session()
    if previous is not None and previous.has_group:
        # Its handler knows the other ranks.
        failure_handler.end_start(find_failure_handler(previous))
        raise ConfigurationError(
            "mpiddp.init() was called in this process before, and that session is still open: use "
            "it, or call its close() first"
        )
    # Under `python -m mpiddp` a script may call mpiddp.init(): the launch has been described.
    outer = find_failure_handler(previous) if previous is not None else None
    session = _run(
        StartUp(options, failure_handler, makes_group=makes_group, previous=outer), signals
    )
    make_current(session)
    failure_handler.end_start()
    return session


def open_session(**options: Any) -> Session:
    """Start a launch in a script, with `Options`: an uncaught exception ends the job from now on.

    Collective; a failure ends the job, but raises in an interactive process. Where functions share
    a session, this returns it. Raises ConfigurationError if it has been started with others.
    """
    previous = find_session()
    if previous is not None:
        asked = Options(**options)  # A mistake is the script's, and ends that session's job.
        if previous.kept is not None:
            _check_kept(previous.kept, asked)
            return previous
    failure_handler = FailureHandler()
    with failure_handler:
        session = start(Options(**options), failure_handler)
    catch_uncaught(session, failure_handler)
    return session


def _check_kept(kept: LaunchOptions, asked: LaunchOptions) -> None:
    """Raise ConfigurationError if a call asks for another session than the one that there is."""
    for field in fields(LaunchOptions):
        value, found = getattr(asked, field.name), getattr(kept, field.name)
        if value not in (field.default, found):
            raise ConfigurationError(
                f"mpiddp.init({field.name}={value!r}): these ranks were started with {found!r}; "
                "give it to mpiddp.ranks"
            )


def catch_uncaught(session: Session, failure_handler: FailureHandler) -> None:
    """Let uncaught exceptions end the job, and an exit without ``close`` close."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failure_handler.fail(error)
        previous(kind, error, trace)

    if failure_handler.peers.is_shared or not is_interactive():
        sys.excepthook = hook
        session.at_close(lambda: setattr(sys, "excepthook", previous))
    atexit.register(session.close)


def _run(start_up: StartUp, signals: PreemptionSignals | None) -> Session:
    """Go through all phases. Collective."""
    settle = start_up.settle
    deadlines = PhaseDeadlines(start_up.options.timeout, start_up.failure_handler.expire)
    start_up.undo.callback(deadlines.close)
    with start_up.undo:
        with deadlines.phase("MPI"):
            torch_import = settle(phases.begin_import)
            ranks = settle(phases.start_mpi)
        with deadlines.phase("import torch"):
            import_seconds = settle(phases.join_import, torch_import)
        with deadlines.phase("address"):
            # After the import, which needs all cores.
            first = settle(phases.begin_lifeline, ranks)
            placements = settle(phases.find_device, ranks)
            placements = settle(phases.bind_cores, ranks, placements)
            compute = settle(phases.take_device, ranks, placements)
            route, descriptor = settle(phases.find_address, ranks)
        with deadlines.phase("store"):
            store = settle(phases.open_store, ranks, compute, route, descriptor)
            settle(phases.place_nccl_records, ranks, compute)
            lifeline = settle(phases.join_lifeline, ranks, route, first)
        if start_up.makes_group:
            with deadlines.phase("group"):
                settle(phases.open_group, ranks, compute, store)
            with deadlines.phase("first all-reduce"):
                settle(phases.try_group, ranks, compute)
        with deadlines.phase("summary"):
            durations = deadlines.durations | {"import torch": import_seconds}
            ordered = {phase: durations[phase] for phase in PHASES if phase in durations}
            slowest = summary.find_slowest(ordered, ranks.comm)
            block = summary.describe_start(start_up, ranks, compute, route, slowest)
            if block and start_up.previous is None and not start_up.options.quiet:
                write_console(block)
        _watch_movement(start_up, lifeline, ranks.world.rank)
        if lifeline is not None:
            lifeline.note_started()
        is_alone = ranks.world.size == 1
        if is_alone:
            deadlines.close()
        resources = Resources(
            start_up,
            ranks,
            compute,
            store=store,
            has_group=start_up.makes_group,
            lifeline=lifeline,
            deadlines=None if is_alone else deadlines,
        )
        seconds = {phase: longest for phase, (longest, _) in slowest.items()} if block else {}
        session = Session(ranks.control, resources, compute, route.meeting, seconds, signals)
        shared = start_up.failure_handler.peers.lifeline
        if shared is not None:
            shared.watch_calls(session.count_calls, session.describe_call)
        start_up.undo.pop_all()
        return session


def _watch_movement(start_up: StartUp, lifeline: Lifeline | None, rank: int) -> None:
    """Have the job end when no rank moves any more."""
    handler, seconds = start_up.failure_handler, start_up.options.stall_timeout
    if lifeline is not None and seconds > 0:
        lifeline.progress.note_move()
        movement = Movement(lifeline.progress, seconds, lambda: handler.step_under_way)
        start_up.on_close.insert(0, movement.close)
        if rank == 0:
            lifeline.watch_stall(seconds)
