"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mpiddp.errors import ConfigurationError
from mpiddp.training.options.groups.optimisation import OptimisationOptions
from mpiddp.training.step.learning_rate import LearningRate, describe_scaling, make_learning_rate


def make(steps_per_epoch: int, batch: int = 16, **options: Any) -> LearningRate:
    given = {"learning_rate": 1.0, **options}
    return make_learning_rate(OptimisationOptions(**given), steps_per_epoch, batch)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 675])
def test_the_learning_rate_rises_once_and_then_falls(total: int) -> None:
    rate = make(total, epochs=1)
    rates = [rate(step) for step in range(total)]
    peak = rates.index(1.0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(0 < each <= 1 for each in rates)


def test_a_twentieth_of_all_steps_is_the_warm_up_and_a_cosine_follows() -> None:
    rate = make(20, epochs=10)
    assert [rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1, 1])
    assert rate(105) == pytest.approx(0.5)
    # A step after the last one has the last one's.
    assert rate(200) == rate(199) == pytest.approx(0.5 * (1 - math.cos(math.pi / 190)))


def test_steps_multiply_the_rate_at_each_period() -> None:
    rate = make(4, epochs=8, warmup_epochs=1, schedule="step", step_epochs=2.5, step_factor=0.5)
    assert [rate(step) for step in (3, 9, 10, 19, 20, 31)] == [1, 1, 0.5, 0.5, 0.25, 0.125]


def test_the_rate_is_scaled_with_the_batch_of_all_ranks_and_that_is_told() -> None:
    options = OptimisationOptions(learning_rate=0.05, base_batch=32)
    assert make_learning_rate(options, 100, 128).peak == pytest.approx(0.2)
    assert describe_scaling(options, 128) == (
        "Learning rate: 0.05 x 128 samples per step / base batch 32 = 0.2 at its peak"
    )


def test_a_schedule_of_ones_own_multiplies_the_peak_and_the_warm_up() -> None:
    options = OptimisationOptions(learning_rate=1.0, epochs=2, base_batch=8, warmup_epochs=0.4)
    rate = make_learning_rate(options, 5, 16, lambda step, steps: 1 - step / steps)
    assert [rate(step) for step in range(10)] == pytest.approx(
        [2 * 0.5, 2 * 0.9, *(2 * (1 - step / 10) for step in range(2, 10))]
    )
    for bad in (lambda step, steps: -1, lambda step, steps: math.nan, lambda step, steps: None):
        with pytest.raises(ConfigurationError, match=r"^schedule: .* in step 0 of 10"):
            make_learning_rate(options, 5, 16, bad)
