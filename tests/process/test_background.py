"""Calls that nobody waits for too long."""

import gc
import threading

import pytest

from mpiddp.process import background
from mpiddp.process.background import BackgroundCall, LastingCall, LateError, finish_lasting_calls


def test_what_is_done_in_time_is_handed_over_and_what_hangs_is_left_to_itself():
    # Nothing is a result as well, and not lateness.
    assert [BackgroundCall(lambda each=each: each).finish(60) for each in (7, None)] == [7, None]
    release = threading.Event()
    call = BackgroundCall(lambda: release.wait(60))
    background.BackgroundCalls({"one of several": lambda: release.wait(60)})
    with pytest.raises(LateError):
        call.finish(0.1)
    named = [each for each in threading.enumerate() if each.name.startswith("mpiddp-call")]
    release.set()
    assert call.finish(60) is True and {each.daemon for each in named} == {True}


def test_what_fails_fails_for_who_asked(monkeypatch, capsys):
    release, waits = threading.Event(), BackgroundCall.finish

    def fail():
        assert release.wait(60)
        raise OSError("gone")

    def be_late(call, seconds):
        try:
            return waits(call, seconds)
        finally:
            release.set()
            call._done.wait()

    monkeypatch.setattr(BackgroundCall, "finish", be_late)
    # It fails behind the last look: nobody has heard of that when it is forgotten.
    with pytest.raises(LateError):
        LastingCall(fail, "the work").finish(0)
    gc.collect()
    assert "the work failed: gone" in capsys.readouterr().err
    with pytest.raises(OSError, match="gone"):
        LastingCall(fail, "the work").finish(5)
    gc.collect()
    assert capsys.readouterr().err == ""


def test_a_call_that_is_just_beginning_is_waited_for(monkeypatch):
    # A signal's thread may look at any time, also before the system has started the call's thread.
    may_begin, found, begin = threading.Event(), [], threading.Thread._bootstrap

    def begin_late(thread):
        if thread.name == "mpiddp-lasting":
            assert may_begin.wait(60)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", begin_late)
    caller = threading.Thread(target=LastingCall, args=(lambda: found.append(7), "the work"))
    caller.start()
    while not (made := [each for each in threading.enumerate() if each.name == "mpiddp-lasting"]):
        pass
    threading.Timer(0.1, may_begin.set).start()
    finish_lasting_calls()
    assert found == [7] and made[0].daemon, "one that hangs keeps its process"
    caller.join()
