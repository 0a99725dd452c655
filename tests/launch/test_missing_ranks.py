"""Who keeps the others waiting when a deadline expires."""

from __future__ import annotations

import pytest

from mpiddp.launch.failure import missing_ranks
from mpiddp.launch.failure.missing_ranks import PhasePosition
from mpiddp.launch.mpi.pauses import wait_until

IMPORT, GROUP = "import torch", "group"


def at(phase: str, position: str, *, waits: bool = False) -> PhasePosition:
    return PhasePosition(phase, waits, position)


@pytest.mark.parametrize(
    ("answers", "size", "missing"),
    [
        # Rank 1 has not answered.
        ({0: at(GROUP, "a")}, 2, {1: "no answer"}),
        # Rank 1 is phases behind; 2 is done with its own part.
        (
            {0: at(GROUP, "a"), 1: at(IMPORT, "b"), 2: at(GROUP, "a")},
            3,
            {1: "still in 'import torch', b"},
        ),
        ({0: at(GROUP, "a"), 1: at(GROUP, "c", waits=True)}, 2, {0: "still in 'group', a"}),
        # All in one phase: the odd one out, or all where nobody is.
        ({i: at(GROUP, "ab"[i == 1]) for i in range(3)}, 3, {1: "in b"}),
        ({i: at(GROUP, "ab"[i]) for i in range(2)}, 2, {0: "in a", 1: "in b"}),
        ({i: at(GROUP, "a") for i in range(2)}, 2, {0: "in a", 1: "in a"}),
    ],
)
def test_who_is_missing(answers, size, missing):
    assert missing_ranks.find_missing(answers, size) == missing


def test_a_message_names_eight_ranks_and_counts_the_others():
    missing = dict.fromkeys(range(10), "no answer")
    text = missing_ranks.describe_missing(
        "store", 2.5, missing, lambda rank: f"rank {rank} on n{rank}"
    )
    assert "did not get past 'store' within 2.5 s" in text and "--timeout SECONDS" in text
    assert "rank 7 on n7 (no answer), and 2 more." in text and "rank 8" not in text
    text = missing_ranks.describe_missing("store", 2, {3: "no answer"}, str)
    assert "waited for 3 (no answer)." in text
    assert "waited for" not in missing_ranks.describe_missing("group", 3, {}, str)


def test_where_the_main_thread_is():
    assert missing_ranks.find_line().startswith("find_line (missing_ranks.py:")
    # Not the line of the wait, which differs between two looks.
    found = []
    wait_until(lambda: found.append(missing_ranks.find_line()) or True)
    assert found[0].startswith("test_where_the_main_thread_is (test_missing_ranks.py:")
