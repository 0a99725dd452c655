"""Calls of torch.distributed, and scripts of torch's users, leave what they leave under Gloo."""

import json
import re
from pathlib import Path

import comparison
import messages
import pytest
import refusals

import launchers

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent
TABLE = launchers.table()
SECONDS = 150.0
SIZES = (3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5)))


def compare(pool, size, function, *arguments, fewest=None):
    """No rank finds a difference, in more than ``fewest`` cases of each call if it counts them."""
    found = pool("openmpi", size).call(function, *arguments, timeout=SECONDS).values
    if fewest is not None:
        assert all(count > fewest for count, _ in found)
        found = [differences for _, differences in found]
    assert found == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_call_leaves_what_it_leaves_under_gloo(size, pool):
    # Of 2 and 5 ranks with every type and operator of every call.
    compare(pool, size, comparison.compare_calls, size != 3, fewest=7 if size == 3 else 15)


@pytest.mark.parametrize("size", SIZES)
def test_messages_objects_and_works(size, pool):
    compare(pool, size, messages.compare_messages)


def test_messages_objects_and_works_through_gloo(pool):
    compare(pool, 3, messages.compare_messages_through_gloo)


@pytest.mark.parametrize("size", SIZES[::2])
def test_groups_that_overlap(size, pool):
    compare(pool, size, messages.compare_groups)


@pytest.mark.parametrize("size", SIZES[::2])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_groups_of_several_threads(size, dtype, pool):
    compare(pool, size, messages.compare_threads, 30, dtype)


@pytest.mark.long
def test_a_group_that_has_another_backend_as_well(pool):
    backend = "cpu:mpiddp,cuda:gloo"
    compare(pool, 3, comparison.compare_calls, False, backend, fewest=0)
    compare(pool, 3, messages.compare_messages, backend)


def run_forked(*arguments):
    """One process that forks the other rank."""
    return launchers.run(TABLE["alone"], 1, [HERE / arguments[0], *arguments[1:]], timeout=SECONDS)


def torchrun(*arguments, options=(), env=None):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    words += [HERE / arguments[0], *arguments[1:]]
    return launchers.run(TABLE["alone"], 1, words, timeout=SECONDS, env=env)


@pytest.mark.parametrize(
    "ways", ["ddp,hook,no_sync,fsdp2", pytest.param("zero", marks=pytest.mark.long)]
)
def test_trainings_leave_the_same_bits_as_under_gloo(ways, tmp_path):
    result = run_forked("trained.py", ways, tmp_path, tmp_path / "store")
    rows = [json.loads(line) for line in result.expect(0).stdout.splitlines() if line[0] == "["]
    found = {(way, backend): digests for way, backend, digests in rows}
    assert len(found) == 2 * len(ways.split(","))
    for way in ways.split(","):
        assert found[way, "gloo"] == found[way, "mpiddp"], way
        assert len(set(found[way, "gloo"])) == 2, "each rank has losses of its own"


def test_scripts_go_on_beside_forks_and_notice_a_killed_rank_long_before_the_timeout(tmp_path):
    result = run_forked("failing.py", "forks,lost", tmp_path / "store").expect(0)
    assert result.stdout.count("loaded") == 2, str(result)
    # After the timeout it would not know that.
    said = r"^mpiddp: .*waited for rank 1 on \S+, whose process is gone"
    assert re.search(said, result.output, re.MULTILINE), str(result)


@pytest.mark.long
def test_scripts_go_on_beside_restarts():
    result = torchrun("failing.py", "restart", options=["--max-restarts=1"]).expect(0)
    assert result.stdout.count("restarted") == 2, str(result)


@pytest.mark.long
def test_torch_checks_each_call(tmp_path):
    result = torchrun("comparison.py", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).expect(0)
    assert result.stdout.split() == ['["shared-memory"]'] * 2, str(result)


def test_mistakes_are_refused_in_one_line_and_leave_the_group_usable(pool):
    for found, total in pool("openmpi", 2).call(refusals.make_mistakes).values:
        assert len(found) == 13
        for name, (message, pattern) in found.items():
            assert message.startswith(("DistBackendError: ", "ValueError: ")), (name, message)
            assert re.search(pattern, message), (name, message)
            assert len(message.splitlines()) == 1, message
        assert total == 6


def test_calls_of_different_types_are_told_apart_where_calls_are_compared(pool):
    called = pool("openmpi", 2).call(refusals.make_different_calls, env={"MPIDDP_DEBUG": "1"})
    for said in called.values:
        for message, name in zip(said, ["all-gather"] * 2 + ["broadcast from 0"] * 2, strict=True):
            call = f"'call 1: {name} of 4 "
            assert f"rank 0 has {call}float32', rank 1 has {call}int32'" in message, message


DESTROYED = "DistBackendError: mpiddp: this process group has been destroyed"
LEFT = {
    refusals.close_twice: ["ValueError: Invalid process group specified", DESTROYED, DESTROYED],
    refusals.make_again: [1.0, 1.0, 3.0, 3.0, 5.0, 5.0],
    refusals.talk_in_two_threads: [3.0, 2.0, 1],
    refusals.list_ranges: [
        ("mpiddp:all_reduce", False), ("mpiddp:broadcast", False), ("all_reduce", [[9]]),
        ("broadcast", [[9]]), ("all_reduce", [[9]]),
    ],
    refusals.compile_a_model: [1.0, 1.0, 0.0, 0.0, 0.0],
}  # fmt: skip
LONG = {refusals.compile_a_model: pytest.mark.long}


@pytest.mark.parametrize(
    "call", [pytest.param(each, id=each.__name__, marks=LONG.get(each, ())) for each in LEFT]
)
def test_what_groups_leave(call, pool):
    found = pool("openmpi", 2).call(call, timeout=SECONDS).values
    assert found == [LEFT[call]] * 2


def test_a_barrier_ends_after_the_time_that_it_is_given(pool):
    called = pool("openmpi", 2).call(refusals.come_late)
    assert [total for _, total in called.values] == [6.0, 6.0]
    for message, _ in called.values:
        said = "DistNetworkError: mpiddp: Timed out waiting 100ms for a barrier: "
        assert message.startswith(said), message


def test_a_timeout_that_is_changed_holds_for_the_next_call(pool):
    said, nothing = pool("openmpi", 2).call(refusals.change_timeouts).values
    assert nothing == [] and len(said) == 4
    for own, gloo in (said[:2], said[2:]):
        assert re.match(r"DistNetworkError: mpiddp: .*waited for rank 1.* for 0\.5 s", own), own
        assert "imed out" in gloo and "500" in gloo, gloo
