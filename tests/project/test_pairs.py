"""Rows that hold every pair."""

from __future__ import annotations

import pytest

import pairs


def test_rows_hold_every_pair_that_is_possible():
    dimensions = {"a": (1, 2, 3), "b": "xyz", "c": (False, True), "d": range(4)}

    def possible(row):
        return not (row.get("a") == 1 and row.get("b") == "x")

    rows = pairs.cover(dimensions, possible)
    made = {pair for row in rows for pair in pairs.find_pairs(row)}
    wanted = {
        (p, x, q, y)
        for p in "abcd"
        for q in "abcd"
        for x in dimensions[p]
        for y in dimensions[q]
        if p < q and (p, x, q, y) != ("a", 1, "b", "x")
    }
    assert made == wanted and all(map(possible, rows))
    assert len(rows) < 20  # 3 · 3 · 2 · 4 = 72 in all.


def test_a_pair_that_fits_no_row_is_said():
    dimensions = {"a": (1, 2), "b": (1, 2), "c": (1, 2)}
    with pytest.raises(ValueError, match="no row was found with"):
        pairs.cover(dimensions, lambda row: len(row) < 3 or row["a"] != row["b"])
