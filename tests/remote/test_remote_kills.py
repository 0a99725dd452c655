"""Ranks that are killed at random moments: which one it was is said, soon, and they start again.

Says how long it took to say so: `pytest tests/remote/test_remote_kills.py --all -s`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch  # noqa: F401 - the first tensor that comes would import it, which counts as seconds

import called
import launchers
import mpiddp
from mpiddp.errors import MpiddpError, PeerLostError, RankFailedError

RANKS = 3
KILLS = int(os.environ.get("MPIDDP_TEST_KILLS", "100"))
LONGEST_SECONDS = 30.0
"""From a kill to its exception; it is below 1 s where nobody else uses the cores."""
WORK = {
    "sleep": (called.sleep_on, -1),
    "reduce": (called.reduce_again,),
    "call": (called.nothing,),
    "send": (len, [b"x" * 10] * 20_000),
    "return": (called.make_zeros, 1 << 20),
    "print": (called.print_much, 50),
}


@contextlib.contextmanager
def kill_later(find: Callable[[], int], seconds: float) -> Iterator[list[float]]:
    """Kill the process that ``find()`` names, after ``seconds``; holds when that was."""
    when: list[float] = []

    def kill() -> None:
        time.sleep(seconds)
        while not when:
            with contextlib.suppress(LookupError, ProcessLookupError):
                os.kill(find(), signal.SIGKILL)
                when.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    yield when
    thread.join(LONGEST_SECONDS)


def call_again(ranks, function, *arguments) -> None:
    end = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < end:
        ranks.run(function, *arguments)


def kill_in_calls(ranks, dice) -> tuple[str, float]:
    """One kill while calls are made. Returns the kind of call, and the seconds until it raised."""
    victim = dice.randrange(RANKS)
    kind = dice.choice([*WORK, "idle"])
    function, *arguments = WORK.get(kind, (called.nothing,))
    process = ranks.members[victim].process
    with kill_later(lambda: process, dice.uniform(0, 1)) as when:
        if kind == "idle":
            time.sleep(1.5)
        began = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            call_again(ranks, function, *arguments)
        raised = time.monotonic()
    errors = caught.value.by_rank
    lost = {n: str(error) for n, error in errors.items() if isinstance(error, PeerLostError)}
    assert list(lost) == [victim], (kind, victim, errors)
    assert f"rank {victim} of {RANKS}" in lost[victim] and "SIGKILL" in lost[victim], (kind, lost)
    assert ranks.state == "ended"
    # Between two calls nobody looks.
    return f"{kind}: {lost[victim]}", raised - max(began, when[0])


def start_again(ranks) -> None:
    ranks.restart()
    call_again(ranks, called.nothing)


def kill_in_start(ranks, dice, marked, longest: float) -> tuple[str, float]:
    """One kill while the ranks start, for ``longest`` s: this raises, or the first call."""
    before = set(marked.ranks().values())

    def find() -> int:
        return dice.choice([*({*marked.ranks().values()} - before)])

    with kill_later(find, dice.uniform(0, longest)) as when:
        with pytest.raises(MpiddpError) as caught:
            start_again(ranks)
        raised = time.monotonic()
    assert "\n" not in str(caught.value)
    return f"start: {type(caught.value).__name__}: {caught.value}"[:200], raised - when[0]


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(60 + 60 * KILLS)
def test_kills_at_random_moments():
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    marked = launchers.Processes()
    rows = []
    variables = {"MPIDDP_WAIT": "sleep", launchers.MARK: marked.mark}
    began = time.monotonic()
    with mpiddp.ranks(RANKS, call_timeout=LONGEST_SECONDS, variables=variables) as ranks:
        longest = time.monotonic() - began
        for number in range(KILLS):
            if number % 5 == 4:
                rows.append(kill_in_start(ranks, dice, marked, longest))
            else:
                rows.append(kill_in_calls(ranks, dice))
            print(number, rows[-1], flush=True)
            assert rows[-1][1] < LONGEST_SECONDS, (seed, rows[-1])
            ranks.restart()
            assert ranks.run(called.find_rank) == list(range(RANKS))
    seconds = sorted(each for kind, each in rows if not kind.startswith("start"))
    print(f"seed {seed}: {len(rows)} kills; from kill to exception, without those while ranks ")
    print(f"start: {seconds[len(seconds) // 2]:.2f} s, at the most {seconds[-1]:.2f} s")
    marked.expect_gone()
