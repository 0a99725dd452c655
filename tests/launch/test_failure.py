"""Whatever fails on whichever rank ends the job, once, with its exit code; whose fault it is."""

import atexit
import builtins
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch.distributed

import launchers
from facts import messages
from mpiddp import environment
from mpiddp.errors import OWN, PEER, REPEATED, ConfigurationError, PeerFailedError, PeerLostError
from mpiddp.launch.failure import error_meaning, error_origin, termination
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.mpi.world import World
from mpiddp.process import job_directory
from mpiddp.process.outcome import Outcome, read_outcome, write_outcome

# argv: stage, rank that fails, how it fails
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

stage, who, how = sys.argv[1], sys.argv[2], sys.argv[3]
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK", "0")

def fail(*_, **__):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(1000)
    raise ValueError("on purpose")

if "LIMIT" in os.environ:
    # On a busy machine the import alone may take longer than the limit, and so may other phases.
    import torch
    from mpiddp.launch.failure.deadline import PhaseDeadlines
    set_end = PhaseDeadlines._set
    if stage != "outside":
        PhaseDeadlines._set = lambda own, name, end: set_end(
            own, name, end + 60 * (name not in stage.split())
        )
from mpiddp.launch.device import device
from mpiddp.launch.rendezvous import store
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.options import Options
from mpiddp.launch.startup import start

fails = who in (rank, "all")
if fails and stage == "before the group":
    store.make_group = fail
if fails and stage == "in the address phase":
    device.find_placement = fail
if fails and stage == "outside":
    fail()

with FailureHandler() as failure_handler:
    # A job that waits for its time-out hangs: the fault suite measures README's two seconds.
    with start(Options(timeout=float(os.environ.get("LIMIT", "900"))), failure_handler) as session:
        import torch, torch.distributed as distributed
        failure_handler.run_directory = Path.cwd()
        for step in range(100 if stage == "in a step" else 3):
            failure_handler.run = FixedProgress(step=step)
            failure_handler.note_step(step)
            if step == 2 and fails:
                fail()
            distributed.all_reduce(torch.ones(10))
            time.sleep(0.02)
"""


def run(launcher, ranks, stage, who, how, folder, **env):
    script = folder / "program.py"
    script.write_text(PROGRAM)
    return launchers.run(launcher, ranks, [script, stage, str(who), how], cwd=folder, env=env)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "ranks", "stage", "who"),
    [
        ("mpich", 2, "in a step", 1),
        pytest.param("openmpi", 2, "before the group", 1, marks=pytest.mark.long),
    ],
)
def test_one_rank_raises(name, ranks, stage, who, tmp_path):
    result = run(name, ranks, stage, who, "raise", tmp_path).expect(1)
    assert result.stderr.count("Traceback (most recent call last)") == 1, str(result)
    assert result.stderr.count("ValueError: on purpose") == 1, str(result)
    step = " at step 2" if stage == "in a step" else ""
    (heading,) = [line for line in messages(result) if line.startswith("mpiddp: rank ")]
    assert re.fullmatch(rf"mpiddp: rank {who} of {ranks} on \S+{step}: failed", heading)
    if stage == "in a step":
        outcome = read_outcome(tmp_path)
        assert outcome is not None
        assert (outcome["code"], outcome["rank"], outcome["step"]) == (1, who, 2)
        assert outcome["reason"] == "ValueError: on purpose" and outcome["attempt"] == 1


# The lifeline's tests have those of a rank that is killed in a step.
@pytest.mark.mpi
def test_one_rank_is_killed(tmp_path):
    result = run("mpich", 2, "in the address phase", 0, "kill", tmp_path)
    # The victim's status (Hydra gives the signal alone), or what the survivors left with.
    assert result.returncode in (128 + signal.SIGKILL, signal.SIGKILL, 6), str(result)
    assert "Traceback" not in result.stderr, str(result)
    outcome = read_outcome(tmp_path)
    assert outcome is None or outcome["code"] == 6


@pytest.mark.by_default("openmpi")
def test_ranks_that_all_fail_alike_say_so_once(either_launcher, tmp_path):
    result = run(either_launcher, 2, "in a step", "all", "raise", tmp_path).expect(1)
    assert result.stderr.count("Traceback (most recent call last)") == 1, str(result)
    assert sum(line.startswith("mpiddp: rank ") for line in messages(result)) == 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "ranks", "stage", "who", "how", "said"),
    [
        ("openmpi", 2, "in the address phase", 0, "stop",
         r"did not get past 'address'.*waited for rank 0 on \S+ \(no answer\)"),
        pytest.param("openmpi", 2, "outside", 1, "sleep",
         r"started 2 ranks.*MPI_Init did not return within 4 s.*--timeout", marks=pytest.mark.long),
        pytest.param("mpich", 3, "before the group", 0, "sleep",
         r"did not get past 'group'.*waited for (?!.*rank [12] ).*rank 0 on \S+ "
         r"\(.*fail \(program\.py:\d+\)", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_rank_that_is_stopped_or_stuck(name, ranks, stage, who, how, said, tmp_path):
    """The others say whom they wait for, and end at a deadline of 4 s."""
    result = run(name, ranks, stage, who, how, tmp_path, LIMIT="4")
    # On a busy machine Hydra may report the rank that it kills: by its signal alone.
    assert result.returncode in ((4, signal.SIGKILL) if name == "mpich" else (4,)), str(result)
    assert "Traceback" not in result.stderr
    lines = [line for line in messages(result) if "within 4 s" in line]
    # On a busy machine a second one may speak before the first one has ended the job.
    assert 0 < len(lines) < ranks, str(result)
    assert re.search(said, lines[0]), lines[0]


# Reports


def shared_failure_handler(*, ends_with_run: bool = False) -> FailureHandler:
    failure_handler = FailureHandler(ends_with_run=ends_with_run)
    failure_handler.meet(world=World(3, 8, 1, 2, 1, 4, "node2", "node1"))
    failure_handler.run = FixedProgress(step=17)
    return failure_handler


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_reports_say_who_where_and_when():
    failure_handler = shared_failure_handler()
    place = "mpiddp: rank 3 of 8 on node2 at step 17: "
    assert failure_handler.describe(ConfigurationError("no such data")) == f"{place}no such data\n"
    assert failure_handler.describe(SystemExit(7)) == f"{place}ended with exit code 7\n"
    assert failure_handler.describe(SystemExit("bye")) == f"{place}bye\n"
    assert failure_handler.describe(KeyboardInterrupt()) == f"{place}interrupted\n"
    closed = "[/gloo/transport/tcp/pair.cc:537] Read error: Connection closed by peer"
    lost = failure_handler.describe(RuntimeError(closed))
    assert lost == f"{place}a peer is gone or has stopped: {closed}\n"
    lines = failure_handler.describe(raised(KeyError("k"))).splitlines()
    assert lines[:2] == [f"{place}failed", "Traceback (most recent call last):"]
    assert lines[-1] == "KeyError: 'k'"
    # Somebody's script keeps its own errors.
    failure_handler.runs_script = True
    lines = failure_handler.describe(raised(RuntimeError("Connection closed by peer"))).splitlines()
    assert lines[-1] == "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_python_inspects_on_a_terminal_only(monkeypatch, is_terminal):
    monkeypatch.setattr(os, "isatty", lambda descriptor: is_terminal)
    assert not termination.is_interactive()
    monkeypatch.setenv(environment.PYTHONINSPECT, "1")
    assert termination.is_interactive() == is_terminal


def test_a_process_that_is_alone_waits_for_nobody():
    failure_handler = FailureHandler()
    failure_handler.begin_start(9.0)
    said = "start-up did not get past 'import torch' within 9 s; to wait longer, increase --timeout"
    assert failure_handler._explain_expiry("import torch") == f"{said} SECONDS"


# Corners: what only one rank knows, children, second signals


@pytest.mark.mpi
def test_a_rank_that_finds_no_mpi_says_so_itself():
    hello = "import mpiddp\nwith mpiddp.init(timeout=90) as session:\n    session.any(True)\n"
    shell = '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && export MPI4PY_LIBMPI=/none; exec "$0" "$@"'
    arguments = ["-c", shell, sys.executable, "-c", hello]
    result = launchers.run("openmpi", 2, arguments, python="sh").expect(3)
    (message,) = messages(result)
    assert message.startswith("mpiddp: rank 1 of 2 on ") and "no MPI library" in message


@pytest.mark.mpi
def test_a_bad_option_does_not_wait_for_a_rank_that_never_comes():
    program = """
import os, time
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.failure.failure import FailureHandler
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(100)
with FailureHandler() as failure_handler:
    failure_handler.seconds = 2
    raise ConfigurationError("a bad option")
"""
    result = launchers.run("openmpi", 2, ["-c", program]).expect(2)
    (message,) = messages(result)
    assert message.endswith("a bad option")


def test_a_second_interrupt_does_not_stop_the_first_ones_report(tmp_path):
    program = """
import os, signal, sys, time
from mpiddp.launch.failure.failure import FailureHandler
class Slow:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        sys.__stderr__.write(text)
    def flush(self):
        sys.__stderr__.flush()
class Interrupted:
    def acquire(self, blocking):
        os.kill(os.getpid(), signal.SIGINT)
        return True
with FailureHandler() as failure_handler:
    failure_handler._ends = Interrupted()
    sys.stderr = Slow()
    raise KeyboardInterrupt
"""
    result = launchers.run("alone", 1, ["-c", program]).expect(130)
    assert result.stderr == "mpiddp: interrupted\n"


# What may keep a process that has failed

HEADING = "mpiddp: rank 3 of 8 on node2 at step 17: "
TRACE = f"{HEADING}failed\nTraceback (most recent call last):\n"
UNREADABLE = "its message cannot be read ({} in __str__)"
SLOW = "UnreadableError: its message could not be read within 2 s"
HOOK = "mpiddp: the script's sys.excepthook"
FILES = "mpiddp: /.* did not take this report within 2 s"
KEEPERS = {
    # Exit code; what the console got; the reason in outcome.json.
    "text raises": (3, HEADING + UNREADABLE.format("TypeError"), UNREADABLE.format("TypeError")),
    "text exits": (3, HEADING + UNREADABLE.format("SystemExit"), UNREADABLE.format("SystemExit")),
    "text blocks": (3, HEADING + SLOW, SLOW),
    "text is no text": (3, HEADING + r"a\udcff", "UnreadableError: a\udcff"),
    "stderr closed": (1, None, "ValueError: on purpose"),
    "stderr full": (1, None, "ValueError: on purpose"),
    "stderr clogged": (1, None, "ValueError: on purpose"),
    "stderr replaced": (1, TRACE, "ValueError: on purpose"),
    "log blocks": (1, TRACE, "ValueError: on purpose"),
    "outcome blocks": (1, TRACE, None),
    "hook raises": (1, f"{HOOK} raised TypeError: loudly", "ValueError: on purpose"),
    "hook blocks": (1, f"{HOOK} did not return within 2 s", "ValueError: on purpose"),
    "deadline breaks": (4, "did not get past 'MPI'", "could not be asked: loudly"),
    "claim breaks": (1, TRACE, "ValueError: on purpose"),
    "speaker silent": (1, TRACE, "ValueError: on purpose"),
    "peer lost": (6, f"noted\n{HEADING}rank 2 was lost", "PeerLostError: rank 2 was lost"),
    "alone": (1, "Traceback (most recent call last):\n", "ValueError: on purpose"),
    "done": (1, TRACE, "done"),
}


@cache
def keep():
    """The folder in which ranks failed, and their exit codes by what might have kept them."""
    folder = Path(tempfile.mkdtemp(prefix="mpiddp-kept-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = launchers.PROGRAMS / "keepers.py"
    result = launchers.run("alone", 1, [program, folder]).expect(0)
    return folder, json.loads(result.stdout)


@pytest.mark.parametrize("case", KEEPERS)
def test_nothing_keeps_a_rank_that_has_failed(case):
    folder, codes = keep()
    code, said, reason = KEEPERS[case]
    assert codes[case] == code
    console = (folder / case / "stderr").read_text()
    assert (said or "") in console and bool(said) == bool(console), console
    # With one process there is no rank to name.
    assert ("mpiddp: " in console) == (bool(said) and case != "alone"), console
    assert bool(re.search(FILES, console)) == (case in ("log blocks", "outcome blocks")), console
    outcome = read_outcome(folder / case)
    if reason is None:
        assert outcome is None
    else:
        assert outcome is not None and outcome["reason"].strip(")").endswith(reason.strip(")"))
        assert outcome["code"] == (0 if case == "done" else code)
    log = folder / case / "logs" / "rank-3.log"
    if not case.startswith(("deadline", "alone", "log", "outcome")):
        assert log.read_text(), "the log has what the console may lack"


# At the end

CLOSES = """
import os, signal, sys
import mpiddp
from mpiddp.launch.mpi import mpi

who, how = int(sys.argv[1]), sys.argv[2]

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

with mpiddp.init(timeout=60) as session:
    is_odd = session.world.rank == who
    session._resources._deadlines.seconds = 3
    if is_odd and how == "finalize":
        mpi.finalize = lambda _: stop()
    if is_odd and how == "free":
        session._resources._lifeline.close = stop
"""


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "who", "how", "said"),
    [
        ("openmpi", 1, "finalize", "MPI_Finalize did not return within"),
        ("mpich", 1, "free", r"within.*waited for rank 1 on \S+ \(no answer\)"),
    ],
)
def test_a_rank_that_is_lost_while_the_others_close_is_named(name, who, how, said):
    result = launchers.run(name, 3, ["-c", CLOSES, str(who), how])
    assert result.returncode in (6, 128 + signal.SIGKILL, signal.SIGKILL), str(result)
    (line,) = (line for line in messages(result) if "lost" in line or "within" in line)
    assert re.search(said, line), line


@pytest.mark.mpi
def test_a_collective_of_the_session_has_a_deadline():
    program = """
import time, mpiddp
with mpiddp.init(timeout=60) as session:
    session._timeout = 1.0
    if session.world.rank == 1:
        time.sleep(100)
    session.any(True)
"""
    result = launchers.run("openmpi", 2, ["-c", program]).expect(6)
    (message,) = [line for line in messages(result) if "started" not in line]
    assert "rank 0 of 2" in message and "session.any() waited 1 s" in message


# What a run leaves behind to say how it ended


def test_the_outcome_of_a_run(tmp_path):
    assert read_outcome(tmp_path) is None
    failure_handler = shared_failure_handler()
    failure_handler.run_directory = tmp_path
    failure_handler.run = FixedProgress(attempt=2, step=17)
    failure_handler.finish()
    done = Outcome(code=0, reason="done", rank=3, host="node2", step=17, attempt=2)
    assert read_outcome(tmp_path) == {**asdict(done), "path": None}
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    for text in ("", "[1]", '"x"', '{"code": 256}', '{"code": -1}', '{"rank": 1}'):
        (tmp_path / "outcome.json").write_text(text)
        assert read_outcome(tmp_path) is None
    # What is of another type is as if it was not there.
    (tmp_path / "outcome.json").write_text('{"code": 255, "rank": "1", "host": 2}')
    assert read_outcome(tmp_path) == {**dict.fromkeys([*asdict(done), "path"]), "code": 255}


def test_a_run_that_cannot_say_it_is_done_is_not_done(tmp_path, capsys):
    failure_handler = shared_failure_handler()
    failure_handler.run_directory = tmp_path
    # Not even root can put a file in the place of a folder.
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(OSError, match=r"outcome\.json"):
        failure_handler.finish()
    # A failure is told all the same, and why nothing was written.
    failure_handler.report(failure_handler.compose_report(KeyError("first")))
    told = capsys.readouterr().err
    assert f"{tmp_path}/outcome.json could not be written" in told and "KeyError: 'first'" in told


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The directory of a running job, to whose first attempt this process belongs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = job_directory.make("7")
    job_directory.begin_attempt(path, "first")
    monkeypatch.setenv("MPIDDP_JOB_DIRECTORY", str(path))
    monkeypatch.setenv("MPIDDP_ATTEMPT_TOKEN", "first")
    yield path
    job_directory.remove(path)


@pytest.mark.parametrize("has_run", [True, False])
def test_the_front_finds_the_outcome_in_the_jobs_directory(job, tmp_path, has_run):
    failure_handler = shared_failure_handler()
    run = tmp_path / "run"
    run.mkdir()
    failure_handler.run_directory = run if has_run else None
    failure_handler.report(failure_handler.compose_report(KeyError("first")))
    outcome = read_outcome(job)
    assert outcome is not None
    assert outcome["path"] == (str(run / "outcome.json") if has_run else None)
    assert outcome["code"] == 1 and "KeyError" in outcome["reason"]
    assert read_outcome(run) == ({**outcome, "path": None} if has_run else None)


@pytest.mark.parametrize(("ends_with_run", "code"), [(False, 1), (True, 0)])
def test_a_script_that_fails_after_its_run_has_failed(job, tmp_path, ends_with_run, code):
    failure_handler = shared_failure_handler(ends_with_run=ends_with_run)
    failure_handler.run_directory = tmp_path / "run"
    failure_handler.run_directory.mkdir()
    failure_handler.finish()
    failure_handler.report(failure_handler.compose_report(KeyError("later")))
    assert (read_outcome(job) or {})["code"] == code
    assert (read_outcome(failure_handler.run_directory) or {})["code"] == 0


def test_rank_0_knows_better_than_one_that_is_cut_off(job):
    def write(rank: int, reason: str) -> None:
        write_outcome(None, Outcome(6, reason, rank, f"node{rank}", None, 1))

    write(2, "rank 0 was lost")
    write(1, "rank 2 was lost")
    assert (read_outcome(job) or {})["rank"] == 2
    write(0, "rank 2 was lost")
    write(2, "rank 1 was lost")
    assert (read_outcome(job) or {})["rank"] == 0


def test_a_rank_of_an_attempt_that_was_replaced_writes_nothing(job, tmp_path):
    failure_handler = shared_failure_handler()
    failure_handler.run_directory = tmp_path
    job_directory.check_attempt()
    job_directory.begin_attempt(job, "second")
    failure_handler.report(failure_handler.compose_report(KeyError("first")))
    assert read_outcome(job) is None and read_outcome(tmp_path) is None
    assert not (tmp_path / "logs").exists()
    with pytest.raises(PeerLostError, match="restarted without this rank"):
        failure_handler.finish()
    with pytest.raises(PeerLostError, match="restarted without this rank"):
        job_directory.check_attempt()


def test_nobody_else_can_read_a_jobs_directory(job, monkeypatch):
    assert job.stat().st_mode & 0o777 == 0o700
    assert job_directory.find() == job
    job.chmod(0o770)
    assert job_directory.find() is None


# What an error is called, and which exit code it has


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerLostError("x"), 6), (KeyboardInterrupt(), 130), (SystemExit(), 0),
        (SystemExit(5), 5), (SystemExit(-1), 255), (SystemExit(256), 0), (SystemExit("text"), 1),
        (SystemExit(True), 1),
    ],
    ids=repr,
)  # fmt: skip
def test_exit_codes(error, code):
    # Those of SystemExit are what Python itself leaves with.
    assert error_meaning.exit_code(error) == code


@pytest.mark.parametrize(
    ("module", "is_own"),
    [("torch.distributed", False), ("mpiddp.launch.startup", False), ("__main__", True)],
)
def test_whose_a_hook_is(module, is_own, monkeypatch):
    def hook(*_):
        pass

    hook.__module__ = module
    monkeypatch.setattr(sys, "excepthook", hook)
    assert error_meaning.has_own_hook() is is_own


RECORDED = tomllib.loads((launchers.ROOT / "tests/recorded/peer_loss.toml").read_text())


@pytest.mark.parametrize("row", RECORDED["message"], ids=lambda row: row["source"])
def test_peer_loss_in_recorded_messages(row):
    kind = getattr(builtins, row["kind"], None) or getattr(torch.distributed, row["kind"])
    assert error_origin.is_peer_loss(kind(row["text"])) is row["lost"]


def test_whose_an_error_is_even_if_it_hides_its_cause():
    hidden = ValueError("no number")
    hidden.__context__, hidden.__suppress_context__ = PeerLostError("gone"), True
    errors = (hidden, PeerFailedError("told"), KeyError("k"))
    assert [*map(error_origin.find_origin, errors)] == [PEER, REPEATED, OWN]


def test_faults_of_a_machine(tmp_path):
    disk = OSError(28, "No space left on device", str(tmp_path / "it's full"))
    worker = RuntimeError(f"Caught OSError in DataLoader worker process 0.\n{disk}")
    cause = RuntimeError("training failed")
    cause.__cause__ = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel")
    for error in (disk, worker, cause, RuntimeError("Xid (PCI:0000:3b:00): 79, GPU has fallen")):
        assert error_origin.find_node_fault(error)
    elsewhere = OSError(28, "No space left on device", "/proc/full")
    hidden = RuntimeError("a cache is full")
    hidden.__context__, hidden.__suppress_context__ = disk, True
    # Xid 31 is an illegal address: the script's. So are a script's own words.
    of_script = [
        RuntimeError("NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault"),
        RuntimeError("HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in …"),
        RuntimeError("system not yet initialized"), KeyError("Xid: 3"),
        ValueError("not a label: 'the GPU has fallen off the bus'"),
    ]  # fmt: skip
    full = OSError(28, "No space left on device")
    for error in (elsewhere, full, hidden, RuntimeError("ECC"), *of_script):
        assert not error_origin.find_node_fault(error)
