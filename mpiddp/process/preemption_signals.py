"""Signals by which a cluster preempts a job: they are noted, and nothing is interrupted.

USR1 and USR2 are blocked in the calling thread, and thus in all threads and processes that it
starts later: they do not kill a data worker without a handler. A separate thread receives them. The
kernel may deliver one to a thread that was started earlier; then a handler receives it. TERM is not
blocked, since child processes are ended by it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable

from mpiddp.errors import ConfigurationError

SIGNALS = {number.name[3:]: number for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM)}
"""By name, those that may be used."""
BLOCKED = frozenset({signal.SIGUSR1, signal.SIGUSR2})


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Read ``USR2,USR1,TERM``. Raises ConfigurationError."""
    names = text.split(",")
    if not set(names) <= set(SIGNALS):
        raise ConfigurationError(
            f"preempt_signal: expected names out of {','.join(SIGNALS)}, found {text!r}"
        )
    return tuple(SIGNALS[name] for name in dict.fromkeys(names))


def find_signals() -> PreemptionSignals:
    """Those that this process listens to, or new ones: its handlers can only tell one object."""
    for number in SIGNALS.values():
        found = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(found, PreemptionSignals) and found._process == os.getpid():
            return found
    return PreemptionSignals()


class PreemptionSignals:
    """Whether such a signal has reached this process."""

    def __init__(self) -> None:
        """Block USR1 and USR2 in this thread, until it is known which of them are meant."""
        self.received: signal.Signals | None = None
        """The first that came."""
        self._is_heeded = False
        self._process = os.getpid()
        self._numbers: tuple[signal.Signals, ...] = ()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)

    def heed(self, is_heeded: bool) -> None:
        """Whether the job acts on a signal. If it does not, TERM ends the process as usual."""
        self._is_heeded = is_heeded

    def listen(self, numbers: Iterable[signal.Signals]) -> None:
        """Note these signals from now on, and those that came meanwhile.

        Others have their usual effect, and so have those for which there is another handler; TERM
        may be handed to `take` by it. Call it from the main thread.
        """
        if self._numbers:
            return
        self._numbers = tuple(numbers)
        usual = (signal.SIG_DFL, self._handle)
        free = {number for number in self._numbers if signal.getsignal(number) in usual}
        waited = BLOCKED & free
        if signal.SIGTERM in free:
            signal.signal(signal.SIGTERM, self._handle)
            os.register_at_fork(after_in_child=self._forget_termination)
        for number in waited:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED - waited)
        if waited:
            threading.Thread(
                target=self._wait, args=(waited,), name="mpiddp-preemption", daemon=True
            ).start()

    def hand_over(self) -> None:
        """Leave the signals to a script, which may install handlers for them.

        Until it has, USR1 and USR2 are noted, and do not end it. Call it from the main thread.
        """
        for number in BLOCKED:
            # What is ignored or handled already stays so.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    def ignore(self) -> None:
        """The process leaves because of them: from now on they have no effect, to its very end.

        Python gives handlers back before it ends, and TERM would then end it. Call it from the
        main thread.
        """
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def take(self, number: int) -> bool:
        """Note a signal that another handler was given; False if it has its usual effect."""
        if number not in self._numbers or not self._is_heeded:
            return False
        self._note(number)
        return True

    def _note(self, number: int) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    def _wait(self, numbers: frozenset[signal.Signals]) -> None:
        while True:
            self._note(signal.sigwait(numbers))

    def _handle(self, number: int, frame: object) -> None:
        self._note(number)

    def _forget_termination(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
