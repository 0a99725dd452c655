"""Calls that nobody waits for too long."""

from __future__ import annotations

import threading
import time

import pytest

from mpiddp.doctor.errand import Errand


def test_what_is_done_in_time_is_handed_over():
    errand = Errand(lambda: 7)
    assert errand.finish(5) == 7 and errand.seconds is not None and errand.seconds < 5


def test_what_hangs_is_left_to_itself():
    release = threading.Event()
    errand = Errand(lambda: release.wait(60))
    begin = time.monotonic()
    assert errand.finish(0.1) is None and errand.seconds is None
    assert time.monotonic() - begin < 5
    release.set()
    assert errand.finish(60) is True


def test_what_fails_fails_for_who_asked():
    def fail():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Errand(fail).finish(5)
