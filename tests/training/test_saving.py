"""When a training makes checkpoints, and which of them is the best."""

from __future__ import annotations

from dataclasses import replace

from test_metrics import ROW

from mpiddp.training.saving import find_score


def test_the_best_has_the_highest_accuracy_or_else_the_lowest_loss() -> None:
    evaluated = replace(ROW, test_loss=0.5)
    assert find_score(ROW) is None
    assert find_score(replace(evaluated, test_metrics={"gap": 7.0, "accuracy": 0.75})) == 0.75
    for metrics in ({}, {"gap": 7.0}):
        better = replace(evaluated, test_loss=0.25, test_metrics=metrics)
        score, higher = find_score(replace(evaluated, test_metrics=metrics)), find_score(better)
        assert score is not None and higher is not None and higher > score
