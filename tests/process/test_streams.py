"""Logs of all ranks, who prints to the console, in which characters, and standard input."""

import hashlib
import io
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launchers
from facts import messages
from mpiddp.errors import ConfigurationError
from mpiddp.process.background import BackgroundCall
from mpiddp.process.streams import output_writer
from mpiddp.process.streams.console import write_console
from mpiddp.process.streams.output import RankOutput, Redirection, open_log
from mpiddp.process.streams.output_writer import ANSWER, ASK, Console, Forwarder, Lines, Stream
from mpiddp.wording import encode, fit, print_text

HOST = socket.gethostname()
SECONDS = 120


def test_the_console_is_for_some_ranks():
    rows = {"all": {*range(8)}, "none": set(), "0,3-5": {0, 3, 4, 5}, "7, 1": {1, 7}, "2-2": {2}}
    for text, ranks in rows.items():
        output = RankOutput(console=text)
        assert {rank for rank in range(8) if output.shows(rank)} == ranks, text
    for text in ("", "some", "1,", "3-1", "-1", "1-", "0 1", "²"):
        with pytest.raises(ConfigurationError, match="--console: expected all, none, or ranks"):
            RankOutput(console=text)


def test_a_restart_may_have_fewer_ranks_than_the_console_names(monkeypatch):
    console = RankOutput(console="3-5")
    console.check_world(4)
    with pytest.raises(ConfigurationError, match="out of 0-2"):
        console.check_world(3)
    RankOutput(console="none").check_world(1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    console.check_world(3)


def test_a_directory_that_cannot_be_written(tmp_path):
    os.close(open_log(tmp_path / "a" / "b" / "rank-0.err"))
    (tmp_path / "file").touch()
    for path in ("file/log", "file/below/log", "a/b"):
        with pytest.raises(ConfigurationError, match=r"cannot write to .*; --log-dir names"):
            open_log(tmp_path / path)


PARTS = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"\r"]), max_size=12)


@given(st.lists(PARTS, max_size=6))
def test_whole_lines_come_with_a_label_however_they_are_cut(chunks):
    # A return at the end of a chunk could be the half of an end of line, and bars begin with one.
    chunks = [b"".join(chunk) for chunk in chunks]
    text = b"".join(chunks)
    lines = Lines(b"[1] ")
    shown = b"".join(lines.add(chunk, 0.0) for chunk in chunks) + lines.flush()
    # Nothing is lost, and nothing but labels and a last end is added.
    assert shown.replace(b"[1] ", b"").removesuffix(b"\n") == text.removesuffix(b"\n")
    for line in re.split(rb"[\r\n]+", shown):
        assert line == b"" or (line.count(b"[1] ") == 1 and line.startswith(b"[1] "))
    if b"\r" not in text:
        assert shown.count(b"[1] ") == len(text.splitlines())


def test_a_line_waits_for_its_end_for_a_while():
    lines = Lines(b"> ")
    assert lines.add(b"one\ntw", 10.0) == b"> one\n"
    assert not lines.is_late(10.0 + output_writer.PATIENCE_SECONDS / 2)
    # What is added does not make it younger.
    assert lines.add(b"o", 10.0 + output_writer.PATIENCE_SECONDS / 2) == b""
    assert lines.is_late(10.0 + output_writer.PATIENCE_SECONDS)
    assert lines.flush() == b"> two\n"
    assert not lines.is_late(1e9) and lines.flush() == b""
    longest = b"x" * (output_writer.LONGEST_LINE + 1)
    assert lines.add(longest, 0.0) == b"> " + longest + b"\n"
    # A bar is written over.
    assert lines.add(b"\r 10%", 0.0) + lines.flush() == b"\r>  10%"
    assert lines.add(b"\r 20%\r100%\n", 1.0) == b"\r>  20%\r> 100%\n"


PROGRAM = """
import ctypes, os, signal, sys, time
from pathlib import Path
from mpiddp.process.streams.console import write_console
from mpiddp.process.streams.output import RankOutput, redirect
log_dir = Path(sys.argv[1]) if sys.argv[1] else None
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
redirection = redirect(
    RankOutput(log_dir=log_dir, console=sys.argv[2], label="label" in sys.argv), 3
)
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
print("from python", flush=True)
print(len(os.listdir("/proc/self/fd")), "files", flush=True)
print("warning", file=sys.stderr, flush=True)
ctypes.CDLL(None).printf(b"from C\\n")
os.system("echo from a child")
if "report" in sys.argv:
    redirection.write_console("mpiddp: report\\n")
if "bar" in sys.argv:
    for share in range(4):
        print(f"\\r{share}/3", end="", file=sys.stderr, flush=True)
        time.sleep(0.01)
    print(file=sys.stderr)
if "terminal" in sys.argv:
    print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
if "wait" in sys.argv:
    # A script may wait until it has no children any more.
    try:
        print(os.waitpid(-1, 0))
    except ChildProcessError:
        print("no child")
if "much" in sys.argv:
    print("\\n".join(f"line {number} " + "x" * (number % 90) for number in range(20000)))
sys.stdout.write("no end, ")
if "cut" in sys.argv:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if "killed" in sys.argv:
    print("the last line")
    os.kill(os.getpid(), signal.SIGKILL)
"""
FILES = "5 files"
"""The three streams, what leads to the writer or to the console, and the list itself."""
SAID = f"from python\n{FILES}\nfrom C\nfrom a child\nno end, "


def run(*words: str, **options) -> launchers.Result:
    # Nothing stays unclosed.
    return launchers.run_python("-Wd::ResourceWarning", "-c", PROGRAM, *words, **options)


def test_a_log_has_all_that_was_printed_up_to_a_sigkill(tmp_path):
    result = run(str(tmp_path / "new" / "logs"), "all", "killed")
    assert result.returncode == -signal.SIGKILL
    shown = (f"{SAID}the last line\n", "warning\n")
    logs = [(tmp_path / f"new/logs/rank-3.{end}").read_text() for end in ("out", "err")]
    assert (result.stdout, result.stderr) == shown == (*logs,)


def test_a_report_reaches_the_console_once():
    assert run("", "none", "report").stderr == "mpiddp: report\n"
    # It is there already.
    assert run("", "3", "report").stderr == "warning\n"


def test_labels_and_logs_of_much_output(tmp_path):
    result = run(str(tmp_path), "all", "label", "wait", "much")
    lines = [f"line {number} " + "x" * (number % 90) for number in range(20000)]
    # What writes is no child of the rank.
    said = ["from python", FILES, "from C", "from a child", "no child", *lines, "no end, "]
    assert (tmp_path / "rank-3.out").read_text() == "\n".join(said)
    assert result.stdout == "".join(f"[3@{HOST}] {line}\n" for line in said)
    assert result.stderr == f"[3@{HOST}] warning\n"


def test_a_line_that_a_sigkill_has_cut_is_shown():
    result = run("", "all", "label", "cut")
    said = ["from python", FILES, "from C", "from a child", "no end, "]
    assert result.stdout == "".join(f"[3@{HOST}] {line}\n" for line in said)


def test_attempts_follow_each_other_in_a_log(tmp_path):
    again = {**os.environ, "TORCHELASTIC_RESTART_COUNT": "1"}
    run(str(tmp_path), "none")
    run(str(tmp_path), "none", "killed", env=again)
    run(str(tmp_path), "all", env=again)
    between = rf"mpiddp: attempt 2 on {re.escape(HOST)}, \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\n"
    logs = [(tmp_path / f"rank-3.{end}").read_text() for end in ("out", "err")]
    expected = [f"{SAID}\n{between}{SAID}the last line\n{between}{SAID}"]
    expected += [f"warning\n{between}warning\n{between}warning\n"]
    for log, pattern in zip(logs, expected, strict=True):
        assert re.fullmatch(pattern, log), log


def test_a_launcher_gets_whole_lines_in_portions_that_it_reads_at_once(monkeypatch):
    portions: list[bytes] = []
    pauses: list[float] = []
    lines = [b"x" * length + b"\n" for length in (0, 900, 900, 1600, 5000, 10, 10)]
    with monkeypatch.context() as patch:
        patch.setattr(output_writer, "write_all", lambda _, data: portions.append(data))
        patch.setattr(output_writer.time, "sleep", pauses.append)
        Console(1, is_terminal=True).write_lines(b"".join(lines))
    # A terminal does not tell whether the portion before has been read.
    assert pauses[0] == 0 < max(pauses) <= output_writer.TERMINAL_SECONDS
    # One buffer of Linux's terminals has 1,792 bytes.
    assert [portion.count(b"\n") for portion in portions] == [2, 1, 1, 1, 2]
    assert b"".join(portions) == b"".join(lines)
    # The reader of a pipe sleeps sometimes, and finds one portion whenever it looks.
    portions.clear()
    source, own = os.pipe()
    looks = iter([False] * 9 + [True] * 3)

    def read(pause: float) -> None:
        pauses.append(pause)
        if next(looks):
            portions.append(os.read(source, 1 << 16))

    pauses.clear()
    monkeypatch.setattr(output_writer.time, "sleep", read)
    Console.find(own).write_lines(b"".join(lines))
    portions.append(os.read(source, 1 << 16))
    assert [portion.count(b"\n") for portion in portions] == [4, 1, 2]
    assert pauses[:2] == [0.0005, 0.001] and pauses == [*sorted(pauses[:10]), 0.0005]
    assert max(pauses) == output_writer.LONGEST_UNREAD_SECONDS
    # One that has gone is not waited for.
    os.write(own, b"unread")
    os.close(source)
    console = Console.find(own)
    console.write_lines(b"line\n")
    assert console.is_gone
    os.close(own)


def test_the_writer_is_asked_but_nobody_whom_the_script_has_in_its_place():
    redirection = Redirection()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        redirection._control, redirection._inode = ours.fileno(), os.fstat(ours.fileno()).st_ino
        theirs.send(ANSWER)
        redirection.drain()
        assert theirs.recv(10) == ASK
        redirection._inode += 1
        redirection.drain()
        # The answer was read, and nobody else is asked.
        assert select.select([ours, theirs], [], [], 0)[0] == []


def test_the_writer_wakes_for_a_line_that_waits_and_answers_when_all_is_written():
    (asked, asks), (source, own), (shown, console) = socket.socketpair(), os.pipe(), os.pipe()
    lines = Lines(b"> ")
    forwarder = Forwarder([Stream(source, None, Console(console), lines)], asked.fileno())
    assert forwarder._find_pause() is None
    lines.since = time.monotonic() - output_writer.PATIENCE_SECONDS / 2
    # Half of it is left, in milliseconds, and one more so that it is over.
    assert 1 < forwarder._find_pause() <= 1e3 * output_writer.PATIENCE_SECONDS / 2 + 1
    lines.since -= output_writer.PATIENCE_SECONDS
    assert forwarder._find_pause() == 1
    os.write(own, b"no end")
    with asked, asks:
        call = BackgroundCall(forwarder.run)
        assert select.select([shown], [], [], SECONDS)[0] and os.read(shown, 100) == b"> no end\n"
        os.write(own, b"again")
        asks.send(ASK)
        assert select.select([asks], [], [], SECONDS)[0] and asks.recv(10) == ANSWER
        assert os.read(shown, 100) == b"> again\n"
        os.close(own)
        call.finish(SECONDS)
    for descriptor in (source, shown, console):
        os.close(descriptor)


ASKED = """
import os, select, sys
from mpiddp.process.streams import output
shown, console = os.pipe()
os.dup2(console, sys.stdout.fileno())
redirection = output.redirect(output.RankOutput(label=True), 3)
output.DRAIN_SECONDS = 60.0
print("no end", end="", flush=True)
redirection.drain()
assert select.select([shown], [], [], 0)[0]
"""


def test_who_asks_the_writer_has_his_last_line_shown_at_once():
    assert launchers.run_python("-c", ASKED).returncode == 0


def test_what_is_left_at_the_end_is_given_out_before_the_writer_is_waited_for(monkeypatch):
    redirection, given = Redirection(), []
    monkeypatch.setattr(sys, "stdout", make_stream("utf-8"))
    monkeypatch.setattr(redirection, "drain", lambda: given.append(sys.stdout.buffer.getvalue()))
    print("no end", end="")
    redirection._finish()
    assert given == [b"no end"]


def test_a_log_that_is_full_is_said_and_the_console_goes_on():
    (source, own), (shown, console) = os.pipe(), os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    os.write(own, b"text\n")
    assert Stream(source, full, Console(console), None).forward()
    said = b"mpiddp: the log of this rank ends here: No space left on device\ntext\n"
    assert os.read(shown, 1000) == said
    for descriptor in (source, own, shown, console, full):
        os.close(descriptor)


def run_on_terminal(*words: str, **options) -> bytes:
    """What a terminal of 123 columns is sent."""
    own, its = pty.openpty()
    with subprocess.Popen(["stty", "cols", "123"], stdin=its, stdout=subprocess.DEVNULL) as setting:
        assert setting.wait(SECONDS) == 0
    program = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(program, stdout=its, stderr=its, **options) as job:
        os.close(its)
        shown, end = b"", time.monotonic() + SECONDS
        while time.monotonic() < end and select.select([own], [], [], SECONDS)[0]:
            try:
                shown += os.read(own, 4096)
            except OSError:  # All of the job has gone.
                break
        assert job.wait(SECONDS) == 0
    os.close(own)
    return shown


def test_a_launcher_that_joins_lines_is_not_waited_for():
    """PRRTE, which is Open MPI 5's, does. For Open MPI 4 this output would take eight seconds."""
    seconds = []
    for words in ((), ("much",)):
        begin = time.monotonic()
        shown = run_on_terminal(
            "", "all", "label", *words, env={**os.environ, "PRTE_LAUNCHED": "1"}
        )
        seconds.append(time.monotonic() - begin)
    assert shown.count(f"[3@{HOST}] line".encode()) == 20000
    assert seconds[1] - seconds[0] < 5


def test_a_terminal_stays_one_and_keeps_its_bar(tmp_path):
    shown = run_on_terminal(str(tmp_path), "all", "label", "bar", "terminal")
    label = f"[3@{HOST}] ".encode()
    line = label + b"True True 123\r\n"
    assert line in shown
    # Standard output may come between two states of the bar.
    bar = shown.replace(line, b"")
    assert b"\r" + label + b"0/3\r" in bar and b"\r" + label + b"3/3\r\n" in bar
    assert (tmp_path / "rank-3.err").read_bytes() == b"warning\n\r0/3\r1/3\r2/3\r3/3\n"


BYTES = os.urandom(3_000_000)
"""More than a pipe holds, and no text."""
SCRIPT = """
import ctypes, hashlib, os, sys, time
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())
for number in range(200):
    print(f"line {number} of rank {rank}", "x" * (number * 7 % 300))
ctypes.CDLL(None).puts(b"from C")
dist.barrier()
if rank == 1:
    raise KeyError("mine")
time.sleep(60)
"""


@pytest.mark.by_default("openmpi")
def test_ranks_print_whole_lines_with_labels(either_launcher, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "bytes").write_bytes(BYTES)
    words = ["-m", "mpiddp", "-n", "3", "--launcher", either_launcher.mpirun, "--log-dir", "logs"]
    words += ["--label", "--console", "0,2", "script.py"]
    with (
        subprocess.Popen(["cat", tmp_path / "bytes"], stdout=subprocess.PIPE) as writer,
        launchers.start("alone", 1, words, stdin=writer.stdout, cwd=tmp_path) as job,
    ):
        result = job.wait().expect(1)
    # What is piped to the front comes to rank 0, and has an end on the others.
    read = [hashlib.sha256(data).hexdigest() for data in (BYTES, b"", b"")]
    lines = {
        rank: [
            read[rank], *(f"line {n} of rank {rank} {'x' * (n * 7 % 300)}" for n in range(200)),
            "from C",
        ]
        for rank in range(3)
    }  # fmt: skip
    shown = [line for line in result.stdout.splitlines() if line.startswith("[")]
    for rank in (0, 2):
        label = f"[{rank}@{HOST}] "
        assert [line for line in shown if line.startswith(label)] == [
            label + line for line in lines[rank]
        ]
    assert len(shown) == 2 * 202
    for rank in range(3):
        assert (tmp_path / f"logs/rank-{rank}.out").read_text().splitlines() == lines[rank]
    # The rank that failed is not shown, but its report is, and stands in its log once.
    assert f"mpiddp: rank 1 of 3 on {HOST}: failed" in messages(result)
    error = (tmp_path / "logs/rank-1.err").read_text()
    assert error.count("rank 1 of 3") == error.count("KeyError: 'mine'") == 1
    # Nothing of mpiddp or runpy stands between the head and the script's own frame.
    head = f"mpiddp: rank 1 of 3 on {HOST}: failed\nTraceback (most recent call last):\n"
    assert f'{head}  File "{tmp_path / "script.py"}", line ' in error
    assert "mpiddp: started" in (tmp_path / "logs/rank-0.err").read_text()


@pytest.mark.mpi
def test_nothing_starts_where_one_rank_cannot_write_its_log(tmp_path):
    (tmp_path / "logs" / "rank-1.out").mkdir(parents=True)
    (tmp_path / "script.py").write_text("print('started')")
    options = ["-m", "mpiddp", "--log-dir", "logs", "script.py"]
    result = launchers.run("mpich", 2, options, cwd=tmp_path).expect(2)
    (line,) = messages(result)
    assert line.startswith(f"mpiddp: rank 1 of 2 on {HOST}: cannot write to ")
    assert "started" not in result.stdout
    # The front knows it before it starts any rank.
    words = ("-m", "mpiddp", "-n", 2, "--log-dir=script.py", "script.py")
    result = launchers.run_python(*words, cwd=tmp_path).expect(2)
    said = "mpiddp: cannot write to /.*; --log-dir names another place\n"
    assert result.stdout == "" and re.fullmatch(said, result.stderr), result


# Standard input reaches rank 0 as a whole, and has an end there and on the other ranks

LAUNCH = """
import os, sys
from mpiddp.front.attempt import Launch
from mpiddp.launch.launcher.programs import OPEN_MPI

code = '''
import os, sys
from mpiddp.process.streams.standard_input import take
assert sys.stdin.read() == ""  # The launcher's.
sys.stderr.write(str(take(os.environ.pop("MPIDDP_STANDARD_INPUT", ""), RANK)))
assert os.get_blocking(0)
sys.stdout.write(os.read(0, 100).decode() + os.read(0, 100).decode())
'''.replace("RANK", sys.argv[1])
launch = Launch(OPEN_MPI, starts_ranks=True)
for attempt in range(2):
    launch.run([sys.executable, "-c", code], os.environ, None, offers_input=True)
"""


def launch(stdin, rank: int = 0) -> tuple[str, str]:
    """What a rank gets in two attempts, and what it reports."""
    done = launchers.run_python("-c", LAUNCH, rank, stdin=stdin, check=True)
    return done.stdout, done.stderr


def test_what_each_kind_of_input_becomes(tmp_path):
    (tmp_path / "file").write_text("read text")
    with open(tmp_path / "file", "rb", buffering=0) as source:
        source.seek(5)  # Each attempt begins where the front was given it.
        assert launch(source) == ("texttext", "NoneNone")
        assert launch(source, rank=1) == ("", "NoneNone")
    assert launch(subprocess.DEVNULL) == ("", "NoneNone")
    # What is left in a pipe goes to the next attempt.
    source, end = os.pipe()
    os.write(end, b"x" * 300)
    os.close(end)
    assert launch(source) == ("x" * 300, "NoneNone")
    os.close(source)
    # The writer of a named pipe has gone.
    os.mkfifo(tmp_path / "pipe")
    source = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert launch(source) == ("", "NoneNone")
    os.close(source)
    # A socket is copied, and may stay open.
    own, its = socket.socketpair()
    with own, its:
        assert launch(its, rank=1) == ("", "NoneNone")
        own.sendall(b"text")
        own.shutdown(socket.SHUT_WR)
        assert launch(its) == ("text", "NoneNone")


def test_a_closed_standard_input_is_empty():
    command = f"exec {sys.executable} -c '{LAUNCH.replace(chr(39), chr(34))}' 0 <&-"
    done = subprocess.run(
        ["sh", "-c", command], cwd=launchers.ROOT, capture_output=True, timeout=SECONDS, check=True
    )
    assert (done.stdout, done.stderr) == (b"", b"NoneNone")


@pytest.mark.parametrize(
    ("offered", "problem"),
    [
        ("/proc/{process}/fd/0 1 1 0", "it belongs to a different process here"),
        ("/proc/0/fd/0 1 1 0", "No such file or directory"),
    ],
)
def test_an_input_that_is_not_here_is_empty(offered, problem):
    code = "import sys; from mpiddp.process.streams.standard_input import take; "
    code += "print(take(sys.argv[1], 0), [sys.stdin.read()])"
    offered = offered.format(process=os.getpid())
    done = launchers.run_python("-c", code, offered, input="text", check=True)
    assert done.stdout == f"{offered.split()[0]} cannot be opened: {problem} ['']\n"


# What is printed where the console's encoding lacks a character


def make_stream(encoding: str, errors: str = "strict") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding, errors)


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("utf-8", "strict", "2–64 × 3 µs… 語 \\udcff"),
        ("utf-8", "surrogateescape", "2–64 × 3 µs… 語 \udcff"),
        ("latin-1", "strict", "2-64 × 3 µs... \\u8a9e \\udcff"),
        ("ascii", "strict", "2-64 x 3 us... \\u8a9e \\udcff"),
        ("ascii", "surrogateescape", "2-64 x 3 us... \\u8a9e \udcff"),
        # Python's own standard error.
        ("ascii", "backslashreplace", "2-64 x 3 us... 語 \udcff"),
    ],
)
def test_other_characters_stand_for_those_that_an_encoding_lacks(encoding, errors, shown):
    text = "2–64 × 3 µs… 語 \udcff"
    stream = make_stream(encoding, errors)
    assert fit(text, stream) == shown
    print_text(text, "-", stream=stream)
    stream.seek(0)
    assert stream.read() == shown.encode(encoding, errors).decode(encoding, errors) + "\n-\n"


def test_bytes_that_are_no_text_stay_past_a_stream_and_reports_fit_into_it(monkeypatch):
    assert encode("a…\udcff語", make_stream("ascii")) == b"a...\xff\\u8a9e"
    assert encode("a…\udcffé", make_stream("latin-1")) == b"a...\xff\xe9"
    assert encode("a…\udcff", None) == "a…".encode() + b"\xff"
    stream = make_stream("ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    write_console("rank 0 → rank 1\n")
    stream.seek(0)
    assert stream.read() == "rank 0 -> rank 1\n"


COMMANDS = {
    "--help": "[ARGS...]", "train --help": "HOST=NAME,...", "stacks --help": "[OPTION ...]",
    "bench prove ring --ranks 4": "1-4 ", "doctor": "0 failures",
}  # fmt: skip
"""With what they print; the last one ends its process."""
IN_TURN = """
import contextlib, sys
from mpiddp.__main__ import main
for words in sys.argv[1:]:
    sys.argv = ["mpiddp", *words.split()]
    with contextlib.suppress(SystemExit):
        main()
"""


def test_each_command_prints_on_a_console_that_knows_ascii_alone(tmp_path):
    env = {"PYTHONIOENCODING": "ascii"}
    done = launchers.run_python("-c", IN_TURN, *COMMANDS, env=env, cwd=tmp_path).expect(0)
    assert all(shown in done.stdout for shown in COMMANDS.values()), done
    assert done.stdout.isascii() and not done.stderr


def test_a_quiet_start_leaves_the_programs_output_and_its_streams_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.stdout.errors, sys.stderr.errors)\nprint('…')\n")
    variables = {"PYTHONIOENCODING": "latin-1"}
    plain = launchers.run_python(script, env=variables)
    done = launchers.run_python("-m", "mpiddp", "--quiet", script, env=variables)
    assert (done.returncode, done.stdout) == (1, plain.stdout)
    assert "started" not in done.stderr
    assert "can't encode character '\\u2026'" in done.stderr
