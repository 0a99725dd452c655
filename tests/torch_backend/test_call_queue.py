"""Who makes the calls of a group, and in which order; without ranks."""

import os
import threading
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

import launchers
from mistakes import hear
from mpiddp.torch_backend import late_thread
from mpiddp.torch_backend.call_queue import CallQueue


class Calls:
    def __init__(self, delay=3600.0):
        self.queue = CallQueue("test", lambda: delay)
        self.made = []

    def note(self, number):
        self.made.append((number, threading.get_ident()))

    def begin(self, number, *, waits=False, call=None):
        return self.queue.make("all_reduce", call or partial(self.note, number), [], waits=waits)

    @property
    def numbers(self):
        return [number for number, _ in self.made]


@pytest.fixture
def calls():
    made = Calls()
    yield made
    made.queue.close()


@given(st.lists(st.integers(-1, 20), max_size=30))
def test_calls_are_made_in_their_order_whatever_is_waited_for(steps):
    """A step begins a call (-1), makes one (0), or waits for one of those that were begun."""
    calls, works = Calls(), []
    try:
        for step in steps:
            if step <= 0 or not works:
                works.append(calls.begin(len(works), waits=step == 0))
            else:
                works[step % len(works)].wait()
                assert step % len(works) in calls.numbers
            assert calls.numbers == list(range(len(calls.numbers)))
    finally:
        calls.queue.close()
    assert calls.numbers == list(range(len(works)))
    assert all(work.is_completed() and work.is_success() for work in works)
    assert {thread for _, thread in calls.made} <= {threading.get_ident()}


def test_what_nobody_waits_for_is_made_by_another_thread():
    # A whole second: the kernel's timer takes seconds and nanoseconds apart.
    calls = Calls(delay=1.0)
    work = calls.begin(1)
    launchers.until(work.is_completed, "the call to end")
    assert {thread for _, thread in calls.made}.isdisjoint({threading.get_ident()})
    calls.queue.close()


def test_what_was_begun_is_made_when_the_interpreter_ends(monkeypatch):
    ends = []
    monkeypatch.setattr(late_thread, "call_at_exit", ends.append)
    calls = Calls()
    calls.begin(1)
    # A thread that is started too late to be ended there must not keep the program from ending.
    are_daemons = [each.daemon for each in threading.enumerate() if each.name == "mpiddp-test"]
    ends[0]()
    assert calls.numbers == [1] and are_daemons == [True]


def test_a_call_without_a_thread_to_make_it_is_refused(calls):
    start = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread"))
    with start, pytest.raises(RuntimeError, match="no thread"):
        calls.begin(1)
    assert calls.begin(2).wait() and calls.numbers == [2]


def test_a_wait_with_a_timeout_leaves_the_call_to_another_thread(calls):
    gate = threading.Event()
    work = calls.begin(1, call=gate.wait)
    with pytest.raises(dist.DistNetworkError, match=r"not ended after 0\.05 s"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed()
    gate.set()
    assert work.wait(timedelta(seconds=60))
    # Who asks for a future need not wait for the delay.
    launchers.until(calls.begin(2).get_future().done, "the call to end")


def test_an_error_is_raised_by_each_wait_and_ends_no_other_call(calls):
    work = calls.begin(1, call=lambda: 1 / 0)
    other = calls.begin(2)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    with pytest.raises(RuntimeError, match="division by zero"):
        work.get_future().wait()
    assert other.wait() and not work.is_success()


def test_a_call_is_made_at_the_end_of_the_backward_pass_whose_hook_began_it(calls):
    futures = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: futures.append(calls.begin(1).get_future()))
    leaf.sum().backward()
    assert [future.done() for future in futures] == [True]
    assert calls.made == [(1, threading.get_ident())]


@pytest.mark.parametrize("waits", [True, False])
def test_a_handler_of_a_signal_waits_for_nothing_that_it_interrupts(calls, waits):
    def interrupted():
        with pytest.raises(dist.DistBackendError, match="in a signal handler"):
            calls.begin(1, waits=True)
        late = calls.begin(2)
        with pytest.raises(dist.DistBackendError, match="in a signal handler"):
            late.wait()
        calls.note(0)
        calls.queue.close()

    work = calls.begin(0, waits=waits, call=interrupted)
    assert work.wait() and calls.numbers[0] == 0


def test_calls_of_a_callback_come_before_those_that_were_begun_later(calls):
    first = calls.begin(1)
    again = first.get_future().then(lambda _: [calls.begin(2, waits=True), calls.begin(3)])
    later, last = calls.begin(4), calls.begin(5)
    # It may wait for a later call.
    other = first.get_future().then(lambda _: last.wait())
    later.wait()
    again.wait()
    other.wait()
    assert calls.numbers == [1, 2, 3, 4, 5]


def test_closing_makes_what_was_begun(calls):
    works = [calls.begin(number) for number in range(3)]
    calls.queue.close()
    assert calls.numbers == [0, 1, 2]
    assert all(work.wait() for work in works)
    with pytest.raises(dist.DistBackendError, match="has been destroyed"):
        calls.begin(3)


def test_a_forked_child_makes_no_call_of_its_parent(calls):
    work = calls.begin(1)
    if (child := os.fork()) == 0:
        try:
            said = [hear(call) for call in (work.wait, work.get_future, partial(calls.begin, 2))]
            calls.queue.close()
            os._exit(7 if str(said).count("forked child") == 3 and not calls.made else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert work.wait() and calls.numbers == [1]
