"""Which worker has been silent for too long."""

from __future__ import annotations

from mpiddp.sync.parameter_server.worker_deadlines import WorkerDeadlines


class Time:
    """Passes while the watch looks, twice a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = WorkerDeadlines(3, 10, lambda: self.now)

    def pass_until(self, end: float) -> list[int]:
        """Whom the last look finds."""
        found = []
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            found = self.watch.find_lost()
        return found


def test_the_first_message_makes_the_others_due():
    clock = Time()
    # Nobody is late before it.
    assert clock.pass_until(1000) == []
    clock.watch.hear(1)
    assert clock.pass_until(1010) == []
    assert clock.pass_until(1010.1) == [0, 2]


def test_who_waits_for_weights_owes_nothing_until_it_has_them():
    clock = Time()
    for worker in range(3):
        clock.watch.hear(worker)
    assert clock.pass_until(100) == []
    clock.watch.expect(2)
    assert clock.pass_until(110.5) == [2]
    # One that goes on does not hide the others.
    clock.watch.expect(0)
    assert clock.watch.find_lost() == [2]


def test_between_epochs_nobody_is_late():
    clock = Time()
    clock.watch.hear(0)
    clock.watch.rest()
    assert clock.pass_until(1000) == []
    clock.watch.hear(2)
    assert clock.pass_until(1011) == [0, 1]


def test_who_has_finished_its_epoch_owes_nothing_and_begins_none():
    clock = Time()
    clock.watch.excuse(0)
    assert clock.pass_until(100) == []
    clock.watch.hear(1)
    clock.watch.excuse(0)
    assert clock.pass_until(111) == [2]


def test_time_in_which_nobody_could_look_does_not_count():
    clock = Time()
    clock.watch.hear(0)
    clock.now = 1000
    assert clock.watch.find_lost() == []
    assert clock.pass_until(1008.5) == []
    assert clock.pass_until(1009.5) == [1, 2]
