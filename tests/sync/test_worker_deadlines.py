"""Which worker has been silent for too long."""

from __future__ import annotations

from mpiddp.sync.parameter_server.worker_deadlines import WorkerDeadlines


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[WorkerDeadlines, Time]:
    clock = Time()
    return WorkerDeadlines(3, 10, clock), clock


def test_nobody_is_late_before_the_first_message():
    watch, clock = make()
    clock.now = 1000
    assert watch.find_lost() == []


def test_the_first_message_makes_the_others_due():
    watch, clock = make()
    clock.now = 5
    watch.hear(1)
    clock.now = 15
    assert watch.find_lost() == []
    clock.now = 15.1
    assert watch.find_lost() == [0, 2]


def test_who_waits_for_weights_owes_nothing_until_it_has_them():
    watch, clock = make()
    for worker in range(3):
        watch.hear(worker)
    clock.now = 100
    assert watch.find_lost() == []
    watch.expect(2)
    clock.now = 110.5
    assert watch.find_lost() == [2]
    # One that goes on does not hide the others.
    watch.expect(0)
    assert watch.find_lost() == [2]


def test_between_epochs_nobody_is_late():
    watch, clock = make()
    watch.hear(0)
    watch.rest()
    clock.now = 1000
    assert watch.find_lost() == []
    watch.hear(2)
    clock.now = 1011
    assert watch.find_lost() == [0, 1]


def test_who_has_finished_its_epoch_owes_nothing_and_begins_none():
    watch, clock = make()
    watch.excuse(0)
    clock.now = 100
    assert watch.find_lost() == []
    watch.hear(1)
    watch.excuse(0)
    clock.now = 111
    assert watch.find_lost() == [2]
