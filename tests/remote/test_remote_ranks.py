"""Functions on ranks that stay: what comes back, what is printed, what is raised."""

import functools
import importlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

import called
import mpiddp
from launchers import until
from mpiddp.errors import ConfigurationError, LaunchError, RankFailedError, RemoteError
from mpiddp.remote import call, job

pytestmark = pytest.mark.mpi
RANKS = 3
JOB = "mpiddp.remote.ranks.RankJob"
WAITING = {"MPIDDP_WAIT": "sleep"}
SECONDS = 60.0
"""A call's limit where none is tested: a busy machine may need it."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[mpiddp.Ranks]:
    with mpiddp.ranks(RANKS, call_timeout=SECONDS, variables=WAITING) as started:
        yield started


@pytest.fixture(autouse=True)
def _same_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that ends the ranks ends the others' as well: it has its own."""
    yield
    if "ranks" in request.fixturenames:
        assert request.getfixturevalue("ranks").state == "waiting"


def test_values_come_by_rank(ranks, capsys, monkeypatch):
    # Ranks whose counts agree are asked nothing more.
    monkeypatch.setattr(call.Call, "_examine", None)
    assert ranks.run(called.describe, [1], second={"a": None}) == [
        (rank, [1], {"a": None}, [3.0] * 3) for rank in range(RANKS)
    ]
    factor = 3
    assert ranks.run(lambda x: factor * x * called.find_rank(), x=2) == [0, 6, 12]
    assert ranks.run(functools.partial(called.describe, 1), second=2)[2][:3] == (2, 1, 2)
    assert [member.rank for member in ranks.members] == [*range(len(ranks))] == [0, 1, 2]
    assert [member.process for member in ranks.members] == ranks.run(os.getpid)
    assert re.fullmatch(r"<3 ranks: ranks 0-2 on \S+, waiting>", repr(ranks))
    with pytest.raises(ConfigurationError, match="expected a function, found int"):
        ranks.run(3)
    with pytest.raises(ConfigurationError, match=r"nothing and its arguments cannot be sent.*lock"):
        ranks.run(called.nothing, threading.Lock())
    with pytest.raises(ConfigurationError, match="ranks stay in the process that started them"):
        ranks.run(lambda: ranks.state)
    with mock.patch(JOB, None), pytest.raises(ConfigurationError, match="d a function, f"):
        mpiddp.run(2, called.nothing)
    assert capsys.readouterr() == ("", "")


def test_what_is_printed_is_labelled_and_complete_before_run_returns(ranks, capsys):
    lines = 1000
    ranks.run(called.print_much, lines)
    out, err = capsys.readouterr()
    for rank in range(RANKS):
        label = f"[{rank}] "
        own = [each.removeprefix(label) for each in out.splitlines() if each.startswith(label)]
        assert own[:lines] == [f"line {number}" for number in range(lines)]
        assert own[lines:] == ["from C", "from a program", "half a line"]
    assert len(out.splitlines()) == RANKS * (lines + 3)
    assert sorted(err.splitlines()) == sorted(
        f"[{rank}] {text}" for rank in range(RANKS) for text in ("an error", "é" * 10)
    )
    for _ in range(5):
        ranks.run(called.print_block, 190_000)
        out, _ = capsys.readouterr()
        assert all(f"[{rank}] end\n" in out for rank in range(RANKS))
    ranks.run(called.show_progress)
    bar = capsys.readouterr().err
    assert bar.startswith("\r[0] ") and "3/3" in bar and "[1]" not in bar


def test_exceptions_are_the_ranks_own(ranks):
    def fail(*kinds: str) -> tuple[BaseException, ...]:
        """Each rank's exception, by rank."""
        with pytest.raises(RankFailedError, match="fail failed on 3 of 3 ranks") as caught:
            ranks.run(called.fail, kinds)
        return tuple(caught.value.by_rank[rank] for rank in range(RANKS))

    first, second, third = fail("awkward", "locked", "mute")
    assert (type(first), str(first), first.second) == (called.AwkwardError, "1 and 2", 2)
    assert type(second) is RemoteError and str(second) == "called.LockedError: locked"
    assert type(third) is called.MuteError
    note = second.__notes__[0]
    assert re.match(r"on rank 1 on \S+\nTraceback .*called.py.* in fail\n", note, re.DOTALL)

    frozen, *others = fail("frozen", "untrue", "notes")
    assert type(frozen) is called.FrozenError and frozen.code == 7
    assert [type(each) for each in others] == [called.UntrueError, called.OddNotesError]
    for rank, each in enumerate((frozen, *others)):
        assert re.match(rf"on rank {rank} on .*called.py.* in fail\n", each.__notes__[0], re.DOTALL)

    first, second, third = fail("exit", "interrupt", "tensor")
    assert type(first) is RemoteError and str(first) == "SystemExit: 3"
    assert type(second) is RemoteError and str(second) == "KeyboardInterrupt: own"
    assert type(third) is ValueError and third.args[0].tolist() == list(range(5000))

    first, second, third = fail("foreign", "group", "same")
    assert str(first) == "only_on_ranks.ForeignError: far away"
    assert isinstance(second, ExceptionGroup) and second.subgroup(KeyError) is not None
    assert type(third) is RuntimeError


def test_equal_exceptions_stand_once(ranks):
    with pytest.raises(RankFailedError, match="on 2 of 3 ranks: RuntimeError: the") as caught:
        ranks.run(called.fail, ["", "same", "same"])
    (error,) = caught.value.exceptions
    assert type(error) is RuntimeError and error.args == ("the same",)
    assert error.__notes__[0].startswith("on ranks 1-2 on ")
    assert sorted(caught.value.by_rank) == [1, 2]
    future = ranks.submit(called.fail, ["same"])
    assert type(future.exception(SECONDS)) is RankFailedError


def test_results_that_do_not_arrive(ranks):
    with pytest.raises(RankFailedError, match="return_badly failed on 2 of 3 ranks") as caught:
        ranks.run(called.return_badly)
    texts = {rank: str(error) for rank, error in caught.value.by_rank.items()}
    assert texts == {
        1: "it returned generator, which cannot be sent: cannot pickle 'generator' object",
        2: "it returned Unsendable, which cannot be sent: not away",
    }
    for words in ((called.Unloadable,), (called.nothing, called.Unloadable())):
        with pytest.raises(RankFailedError) as caught:
            ranks.run(*words)
        text = str(caught.value.by_rank[0])
        assert text.endswith("cannot be loaded: ZeroDivisionError: not here")


def test_calls_of_threads_and_those_submitted_keep_their_order(ranks):
    called_before = len(ranks.run(called.note, -1)[0])
    futures = [ranks.submit(called.note, number) for number in range(5)]
    assert futures[-1].result(SECONDS)[0][called_before:] == [0, 1, 2, 3, 4]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: ranks.run(called.describe, n, second=0), range(8)))
    assert [[row[1] for row in rows] for rows in found] == [[n] * RANKS for n in range(8)]
    tensor = called.make_zeros(100_000)
    future = ranks.submit(float, tensor.sum())
    later = ranks.submit(lambda t: float(t.sum()), tensor)
    tensor.fill_(1)
    assert (future.result(SECONDS), later.result(SECONDS)) == ([0.0] * RANKS, [0.0] * RANKS)


def test_sessions_checkpoints_and_collectives(ranks, tmp_path):
    assert ranks.run(called.start_sessions) == [[True] * 3] * RANKS
    with pytest.raises(RankFailedError) as caught:
        ranks.run(called.start_another_session)
    (error,) = caught.value.exceptions
    assert re.match(r"mpiddp\.init\(backend=.*these ranks were started", str(error))
    found = ranks.run(called.train, tmp_path / "checkpoints")
    assert len({weight for weight, _, _ in found}) == 1
    assert {total for _, total, _ in found} == {3.0}
    # The save is complete by now.
    assert (tmp_path / "checkpoints" / "step-3").is_dir()
    assert job.END_SECONDS > job.LASTING_SECONDS, "else the ranks may finish it at their end"
    # What a session does at its end is done at the end of a call.
    ranks.run(lambda: mpiddp.init().postpone(functools.partial(called.note, "postponed")))
    assert ranks.run(called.note, "next")[0][-2:] == ["postponed", "next"]


def test_a_deadline_says_where_the_late_ranks_were(ranks, monkeypatch, tmp_path):
    asleep = tmp_path / "asleep-2"
    called.expire_when(monkeypatch, lambda own: len(own._waiting) == 1 and asleep.exists())
    with pytest.raises(RankFailedError, match="sleep_on failed on 1 of 3 ranks") as caught:
        ranks.run(called.sleep_on, 2, tmp_path)
    (error,) = caught.value.exceptions
    assert str(error) == "sleep_on did not return within 60 s"
    assert type(error) is mpiddp.errors.UnreachableError and list(caught.value.by_rank) == [2]
    where = r"Where the ranks were:\n(.*\n)*.*rank.* sleep_on, called\.py:"
    assert re.search(where, error.__notes__[0])


def test_a_caller_that_is_stopped_for_a_moment_misses_nothing(ranks, capsys, monkeypatch):
    step = call.Call._step

    def look_late(self, end):
        """What was to come by ``end`` has come, and nobody has looked."""
        monkeypatch.setattr(call.Call, "_step", step)
        calls = [member.calls for member in ranks.members]
        until(lambda: len(select.select(calls, [], [], 0)[0]) == RANKS, "the answers")
        time.sleep(max(0.0, end - time.monotonic()))

    monkeypatch.setattr(call.Call, "_step", look_late)
    monkeypatch.setattr(call, "PRINT_SECONDS", 0.0)
    # More than is read at once, and less than a socket holds.
    ranks.within(0.1).run(called.print_block, 100_000)
    out = capsys.readouterr().out
    assert all(f"[{rank}] end\n" in out for rank in range(RANKS))
    # However long it is stopped, its ranks wait.
    assert {limit for limits in ranks.run(called.list_limits) for limit in limits} == {None}


def test_a_call_that_gets_no_thread_holds_up_no_other(ranks):
    refused = mock.patch("threading.Thread", side_effect=RuntimeError("can't start new thread"))
    with refused, pytest.raises(RuntimeError, match="can't start new thread"):
        ranks.submit(called.nothing)
    left = list(ranks._queue)
    ranks._queue.clear()  # What is left would hold up the end of the ranks as well.
    assert left == []


def test_what_a_function_leaves_behind_harms_no_later_call(ranks):
    assert ranks.run(called.leave_calls) == [None] * RANKS
    ranks.run(called.refuse_interrupts)
    with pytest.raises(RankFailedError, match="sleep_on failed on 3 of 3 ranks"):
        ranks.within(0.3).run(called.sleep_on, -1)
    # Asked often, it costs no time.
    began = time.monotonic()
    assert {ranks.state for _ in range(20)} == {"waiting"} and time.monotonic() < began + 10
    os.eventfd_write(ranks._wake, 1)  # An interrupt() for it that came too late.
    assert ranks.submit(called.nothing).exception(SECONDS) is None


def test_ctrl_c_interrupts_the_function_alone(ranks, tmp_path):
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as pool:

            def press() -> None:
                until(lambda: len(list(tmp_path.glob("asleep-*"))) == RANKS, "the function")
                assert ranks.state == "running sleep_on"
                seconds = re.search(r"running sleep_on for (\d+) s>$", repr(ranks))
                assert seconds and int(seconds[1]) < time.monotonic(), "not at what time"
                assert "sleep_on" in ranks.stacks()
                os.kill(os.getpid(), signal.SIGINT)

            pressing = pool.submit(press)
            with pytest.raises(KeyboardInterrupt):
                ranks.run(called.sleep_on, -1, tmp_path)
            pressing.result()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
    future = ranks.submit(called.sleep_on, -1, tmp_path / "none")
    assert type(future.exception(SECONDS)) is RankFailedError
    (again := tmp_path / "again").mkdir()
    future = ranks.submit(called.sleep_on, -1, again)
    until(lambda: len(list(again.iterdir())) == RANKS, "the function")
    later = ranks.submit(called.note, -2)
    assert later.cancel() and not future.cancel()
    ranks.interrupt()
    assert type(future.exception(SECONDS)) is KeyboardInterrupt
    for _ in range(5):
        future = ranks.submit(called.sleep_on, -1)
        while ranks.state == "waiting":
            pass
        ranks.interrupt()  # Perhaps before the ranks have begun.
        assert type(future.exception(SECONDS)) is KeyboardInterrupt
    assert -2 not in ranks.run(called.note, -3)[0]


def test_a_module_that_was_edited_here_alone(ranks, tmp_path, monkeypatch):
    # A folder that is found after the ranks have started.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_here.py"
    file.write_text("def find():\n    return 1\n")
    module = importlib.import_module("edited_here")
    assert ranks.run(module.find) == [1] * RANKS
    file.write_text("def find():\n    return 'another'\n")
    importlib.reload(module)
    with pytest.raises(RankFailedError, match=r"is another function here.*restart\(\)") as caught:
        ranks.run(module.find)
    assert [type(each) for each in caught.value.exceptions] == [ConfigurationError]


def test_ranks_that_end_after_a_call_are_named_and_start_again(capsys, monkeypatch, tmp_path):
    variables = WAITING | {"OF_THE_TEST": "1"}
    refused = mock.patch(JOB, side_effect=LaunchError("no"))
    with mpiddp.ranks(2, call_timeout=SECONDS, variables=variables, collectives="mpiddp") as own:
        with monkeypatch.context() as patch:
            called.expire_when(patch, lambda _: len(list(tmp_path.iterdir())) == 2)
            # The next calls would be refused, or meet a call that the other has not finished.
            with pytest.raises(RankFailedError, match="ask_alone left ranks 0-1 in the middle of"):
                own.run(called.ask_alone, tmp_path)
            assert own.state == "ended"
            with refused, pytest.raises(LaunchError, match="no"):
                own.restart()
        with pytest.raises(ConfigurationError, match=r"these ranks have ended; restart\(\) starts"):
            own.run(called.nothing)
        own.restart()
        folder, variable, first, secret = own.run(called.look_around)[1]
        assert (folder, variable, secret) == (os.getcwd(), "1", [])
        assert first == os.path.abspath(sys.path[0])
        left = r"gather_on left the ranks at different collective calls of group \S+: 1 on rank 0, "
        with pytest.raises(RankFailedError, match="1; the ranks have ended, and rest") as caught:
            own.run(called.gather_on, 1)
        assert re.fullmatch(f"{left}2 on rank 1", str(caught.value.by_rank[0]))
        own.restart()
        # Between two calls, and somebody has looked. The notebook loses one in a call.
        os.kill(own.members[1].process, signal.SIGKILL)
        until(lambda: own.state == "ended", "the end")
        with pytest.raises(RankFailedError, match=r"1 of 2 on .* killed by SIGKILL") as caught:
            own.run(called.nothing)
        assert list(caught.value.by_rank) == [1]
        own.restart()
        assert capsys.readouterr() == ("", "")

        def lose(running):
            os.kill(running._job.members[1].process, signal.SIGKILL)
            running._job.starter.wait(SECONDS)
            running._step(0.0)

        # All have answered: the call hears of the loss, and does not tell.
        with mock.patch("mpiddp.remote.call.Call._await_output", lose):
            assert own.run(called.nothing) == [None] * 2
        # What is said of the old ranks does not need new ones.
        with refused, pytest.raises(LaunchError, match="no"):
            own.restart()
        said = capsys.readouterr().err
        assert re.match(r"mpiddp: the ranks did not end well: rank 1 of 2 on \S+ was lost", said)
    assert repr(own).endswith(", closed>"), "why they ended before is over"
    assert own.state == "closed"
    own.close()
    for act in (own.restart, own.stacks, lambda: own.run(called.nothing)):
        with pytest.raises(ConfigurationError, match="these ranks were closed"):
            act()
    assert capsys.readouterr() == ("", "")
