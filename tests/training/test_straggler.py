"""A worker made slow on purpose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.training.options.groups import straggler
from mpiddp.training.options.groups.straggler import (
    Slowdown,
    Straggler,
    check_straggler,
    parse_straggler,
)

WORKERS = (0, 2, 5)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_a_rank_or_a_random_one_is_read():
    assert parse_straggler("3=4") == Straggler(3, 4.0)
    assert parse_straggler("random=1.5") == Straggler(None, 1.5)


@pytest.mark.parametrize(
    "text",
    ["", "3", "3=", "=4", "-1=4", "1=0.5", "1=nan", "1=inf", "one=4", "random=fast", "1=2=3"],
)
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(ConfigurationError) as caught:
        parse_straggler(text)
    assert str(caught.value).endswith(f"for example 0=4 or random=4, found {text!r}")


def test_a_rank_that_computes_nothing_is_no_straggler():
    check_straggler(Straggler(None, 2), WORKERS)
    check_straggler(Straggler(5, 2), WORKERS)
    with pytest.raises(ConfigurationError, match=r"rank 1 computes nothing; .* 0, 2, 5"):
        check_straggler(Straggler(1, 2), WORKERS)


@given(st.integers(0, 2**63), st.integers(0, 10**6))
def test_one_worker_is_slow_in_each_step(seed, step):
    for chosen in (None, 5):
        slow = [
            Slowdown(Straggler(chosen, 4), place, WORKERS, seed, 1, CPU).is_slow(step)
            for place in range(len(WORKERS))
        ]
        assert sum(slow) == 1
        assert chosen is None or slow == [False, False, True]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_step_takes_so_many_times_as_long_and_a_gpu_does_nothing_meanwhile(device, monkeypatch):
    done = []
    monkeypatch.setattr(straggler.time, "sleep", done.append)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    for place in range(len(WORKERS)):
        Slowdown(Straggler(2, 4), place, WORKERS, 0, 0.5, device).wait(9)
    assert done == ([1.5] if device is CPU else [GPU, 1.5])
