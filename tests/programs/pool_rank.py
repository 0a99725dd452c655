"""What the ranks of a pool do in each call (``tests/support/pool.py``)."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import mpiddp
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.session import Session, find_failure_handler


def set_timeout(seconds: float) -> None:
    """Change the default group's time-out, by the name that this torch has for that."""
    from torch import distributed

    change = getattr(distributed, "set_timeout", None)
    change = change or distributed.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=seconds))


@contextlib.contextmanager
def _restored(session: Session) -> Iterator[None]:
    """Undo what a call may change in this process."""
    import torch

    before = dict(os.environ), os.sched_getaffinity(0), session._timeout
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    random = torch.get_rng_state()
    try:
        yield
    finally:
        variables, cores, session._timeout = before
        os.environ.clear()
        os.environ.update(variables)
        os.chdir("/")  # The directory of the test that has started the ranks may be gone.
        os.sched_setaffinity(0, cores)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
        # What training tells the report of a failure.
        handler = find_failure_handler(session)
        handler.run_directory, handler.run = None, FixedProgress()
        handler.note_step(None)
        set_timeout(session._timeout)


def renew(session: Session) -> None:
    """Let the next collective call prepare everything again. Collective."""
    for work in reversed(session._resources.on_close):
        work()
    session._resources.on_close.clear()
    session.collectives = None


def answer(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path,
    variables: Mapping[str, str],
    test: str,
) -> Any:
    """What ``function(session, *arguments)`` returns.

    ``folder`` is the working directory meanwhile, and ``variables`` are added to the environment.
    """
    session = mpiddp.init()
    # Under coverage, lines belong to the test that calls (``tests/support/mutants.py``).
    coverage = sys.modules.get("coverage")
    if coverage is not None and (current := coverage.Coverage.current()) is not None:
        current.switch_context(test)
    with _restored(session), warnings.catch_warnings():
        warnings.simplefilter("error")
        os.chdir(folder)
        os.environ.update(variables)
        # Some variables are read when the first collective call is prepared.
        if variables:
            renew(session)
        value = function(session, *arguments)
        if variables:
            renew(session)
    # Notice here, and not in a later test, that ranks made different calls.
    session.agree(True, "the end of a call")
    return value
