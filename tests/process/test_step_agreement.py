"""Signals that preempt a job: all ranks stop after the same step, and lose nothing."""

import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import launchers
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.process import step_agreement as agreement
from mpiddp.process.preemption_signals import parse_signals
from mpiddp.process.step_agreement import AgreeingRanks, Due, StepAgreement
from preempted import MadeUpSignals

# The agreement, with ranks as threads


def make_ranks(size: int) -> tuple[list[MadeUpSignals], list[StepAgreement]]:
    store, signals = dist.HashStore(), [MadeUpSignals() for _ in range(size)]
    return signals, [
        StepAgreement(AgreeingRanks(rank, size, store), signals=each)
        for rank, each in enumerate(signals)
    ]


def pass_places(place, barrier, places, dice) -> int | None:
    """Pass places, in step with the others if there is a barrier; the place in which to stop."""
    for number in range(1, places + 1):
        if barrier is not None:
            barrier.wait()
        time.sleep(dice.choice([0, 0, 0, 0.0005]))
        if place.is_preempted():
            return number
    return None


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_stop_in_the_same_place(seed, monkeypatch):
    dice = random.Random(seed)
    monkeypatch.setattr(agreement, "PERIOD", 0.002)
    size = dice.randint(2, 5)
    # Ranks that wait for each other, as in a training, until they stop; and ranks that do not.
    barrier = threading.Barrier(size) if seed % 2 else None
    places = 100_000 if barrier is not None else 400
    signals, ranks = make_ranks(size)

    def run(rank: int) -> int | None:
        found = pass_places(ranks[rank], barrier, places, random.Random(f"{seed} {rank}"))
        ranks[rank].close()
        return found

    with ThreadPoolExecutor(size) as pool:
        running = pool.map(run, range(size), timeout=60)
        for rank in dice.sample(range(size), dice.randint(1, size)):
            time.sleep(dice.choice([0, 0.01]))
            signals[rank].received = signal.SIGUSR2
        found = [*running]
    # All in the same place; or nobody, where some had passed their last one.
    assert len(set(found)) == 1
    assert barrier is None or found[0] is not None


def test_nobody_stops_without_a_signal_and_nobody_waits_for_one_that_has_left():
    signals, ranks = make_ranks(2)
    assert [rank.is_preempted() for rank in ranks] == [False, False]
    ranks[0].close()
    signals[1].received = signal.SIGUSR2
    time.sleep(2 * agreement.PERIOD)
    assert not ranks[1].is_preempted()
    ranks[1].close()


def test_a_rank_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(agreement, "PERIOD", 0.01)
    signals = MadeUpSignals(signal.SIGTERM)
    rank = StepAgreement(AgreeingRanks(0, 2, dist.HashStore(), timeout=0.2), signals=signals)
    assert wait_until(lambda: rank._round.is_called, 60)
    with pytest.raises(PeerLostError, match=r"SIGTERM reached rank 0, and within 0.2 s not all"):
        rank.is_preempted()
    rank.close()


@pytest.mark.parametrize("is_called", [True, False])
def test_a_rank_that_stops_heeds_signals_to_its_end(is_called):
    signals = MadeUpSignals()
    rank = StepAgreement(AgreeingRanks(), signals=signals)
    assert not rank.is_preempted()
    signals.received = signal.SIGUSR1 if is_called else None
    assert rank.is_preempted() is is_called
    assert signals._is_heeded
    # Its checkpoint is written now, and TERM must not end it.
    rank.close()
    assert signals._is_heeded is is_called


def test_what_another_handler_was_given_is_taken_if_it_preempts():
    signals = MadeUpSignals()
    signals._numbers = parse_signals("USR2,USR1,TERM")
    assert not signals.take(signal.SIGTERM)
    signals.heed(True)
    assert not signals.take(signal.SIGINT) and signals.received is None
    assert signals.take(signal.SIGTERM) and signals.received is signal.SIGTERM


def test_signals_that_come_at_the_very_end_have_no_effect():
    # The interpreter clears modules after it has given its handlers back.
    text = (
        "import os, signal, sys\n"
        "from mpiddp.process.preemption_signals import PreemptionSignals, parse_signals\n"
        "signals = PreemptionSignals()\n"
        "signals.listen(parse_signals('USR2,TERM'))\n"
        "if sys.argv[1] == 'ignored': signals.ignore()\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, process=os.getpid()): kill(process, 15)\n"
        "sys.late = Late()\n"
        "sys.exit(75)\n"
    )
    for word, code in (("ignored", 75), ("not ignored", -signal.SIGTERM)):
        assert launchers.run_python("-c", text, word).returncode == code


def pass_all(rank, barrier, left, grant) -> list[tuple[int, Due]]:
    """Pass places in step with the others, 500 after the last wish; what was due, and where."""
    found: list[tuple[int, Due]] = []
    number = last = 0
    while number < last + 500:
        number += 1
        barrier.wait()
        # Nobody grants wishes before all have looked.
        if any(any(each.values()) for each in left):
            last = number
        barrier.wait()
        due = rank.find_due()
        if due:
            found.append((number, due))
            grant(due)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_do_the_same_in_the_same_places_as_often_as_they_wish(size, monkeypatch):
    monkeypatch.setattr(agreement, "PERIOD", 0.002)
    monkeypatch.setattr(agreement, "SHORT_PERIOD", 0.001)
    store, barrier = dist.HashStore(), threading.Barrier(size)
    left = [{"save": 3, "tell": 2} if rank in (0, size - 1) else {} for rank in range(size)]

    def run(rank: int) -> list[tuple[int, Due]]:
        wished = left[rank]

        def make(name: str) -> Any:
            return lambda: f"{name} of {rank}" if wished.get(name) else ""

        def grant(due: Due) -> None:
            # Whoever wished it has it now; a wish of two ranks is granted to both.
            for name in due:
                wished[name] = max(0, wished.get(name, 0) - 1)
            time.sleep(0.01)

        members = AgreeingRanks(rank, size, store, timeout=30.0)
        one = StepAgreement(members, {name: make(name) for name in ("save", "tell")})
        found = pass_all(one, barrier, left, grant)
        one.close()
        return found

    with ThreadPoolExecutor(size) as pool:
        found = [*pool.map(run, range(size), timeout=60)]
    assert all(each == found[0] for each in found)
    names = Counter(name for _, due in found[0] for name in due)
    assert names == {"save": 3, "tell": 2}
    assert all(not any(each.values()) for each in left)


# The end of a program

FORGOTTEN = """
import torch.distributed as dist
from mpiddp.process import step_agreement as agreement
from mpiddp.process.step_agreement import AgreeingRanks, StepAgreement
agreement.PERIOD, agreement.QUESTIONS = 1e-6, 1e9
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
agreements = [StepAgreement(AgreeingRanks(0, 2, store)) for _ in range(4)]
print("done", flush=True)
"""


def test_an_agreement_that_is_not_closed_does_not_abort_the_program():
    # Its threads are inside torch nearly all the time, and Python ends without them.
    answer = launchers.run_python("-W", "ignore", "-c", FORGOTTEN)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "done\n", "")


def test_who_leaves_after_the_rank_that_has_the_store_does_not_fail():
    def fail(*_: object) -> None:
        raise dist.DistNetworkError("Broken pipe")

    store = SimpleNamespace(add=lambda *_: 1, check=lambda _: False, set=fail)
    StepAgreement(AgreeingRanks(1, 2, store)).close()


# Signals of one process

PROGRAM = """
import os, signal, subprocess, sys, threading, time
from mpiddp.process.preemption_signals import PreemptionSignals, parse_signals
numbers, when = sys.argv[1:]
if when == "late":
    # A thread that was there before does not block them.
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
signals = PreemptionSignals()
if when == "early":
    os.kill(os.getpid(), signal.SIGUSR2)
signals.listen(parse_signals(numbers))
os.kill(os.getpid(), signal.SIGUSR2)
def wait():
    for _ in range(5000):
        if signals.received is not None:
            return signals.received.name
        time.sleep(0.01)
print(wait(), flush=True)
os.kill(os.getpid(), signal.SIGUSR2)
receiver, sender = os.pipe()
child = os.fork()
if child == 0:
    os.write(sender, b"x")
    time.sleep(100)
code = f"import os, time; os.write({sender}, b'x'); time.sleep(100)"
program = subprocess.Popen([sys.executable, "-S", "-c", code], pass_fds=[sender])
for process in (child, program.pid):
    os.read(receiver, 1)
    # The kernel delivers the lower number first.
    os.kill(process, signal.SIGUSR2)
    os.kill(process, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.3)
print(signals.received.name, flush=True)
"""


def run_program(numbers: str, when: str = "early") -> tuple[list[str], int]:
    answer = launchers.run_python("-W", "ignore", "-c", PROGRAM, numbers, when)
    return answer.stdout.splitlines(), answer.returncode


@pytest.mark.parametrize("when", ["early", "late"])
def test_signals_are_noted_and_children_are_spared(when: str) -> None:
    # Signals that come early, twice, and to children.
    assert run_program("USR2,USR1", when) == (["SIGUSR2", "-15", "-15", "SIGUSR2"], 0)


def test_other_signals_have_their_usual_effect():
    assert run_program("USR2") == (["SIGUSR2", "-15", "-15"], -signal.SIGUSR1)
    assert run_program("TERM") == ([], -signal.SIGUSR2)


@pytest.mark.parametrize("text", ["", "HUP", "USR2,", "SIGUSR2", "USR2, TERM"])
def test_only_these_signals_can_be_chosen(text: str) -> None:
    with pytest.raises(ConfigurationError, match="preempt_signal: expected names out of USR2,"):
        parse_signals(text)
