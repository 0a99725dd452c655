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


def make() -> tuple[WorkerDeadlines, Time]:
    clock = Time()
    return clock.watch, clock


def test_nobody_is_late_before_the_first_message():
    watch, clock = make()
    assert clock.pass_until(1000) == []


def test_the_first_message_makes_the_others_due():
    watch, clock = make()
    clock.pass_until(5)
    watch.hear(1)
    assert clock.pass_until(15) == []
    assert clock.pass_until(15.1) == [0, 2]


def test_who_waits_for_weights_owes_nothing_until_it_has_them():
    watch, clock = make()
    for worker in range(3):
        watch.hear(worker)
    assert clock.pass_until(100) == []
    watch.expect(2)
    assert clock.pass_until(110.5) == [2]
    # One that goes on does not hide the others.
    watch.expect(0)
    assert watch.find_lost() == [2]


def test_between_epochs_nobody_is_late():
    watch, clock = make()
    watch.hear(0)
    watch.rest()
    assert clock.pass_until(1000) == []
    watch.hear(2)
    assert clock.pass_until(1011) == [0, 1]


def test_who_has_finished_its_epoch_owes_nothing_and_begins_none():
    watch, clock = make()
    watch.excuse(0)
    assert clock.pass_until(100) == []
    watch.hear(1)
    watch.excuse(0)
    assert clock.pass_until(111) == [2]


def test_time_in_which_nobody_could_look_does_not_count():
    watch, clock = make()
    watch.hear(0)
    clock.now = 1000
    assert watch.find_lost() == []
    assert clock.pass_until(1008.5) == []
    assert clock.pass_until(1009.5) == [1, 2]
