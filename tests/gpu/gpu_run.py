"""The parts of ``bash tests/gpu.sh``: each has a time-out, and the next one runs whatever became
of it. By the standard library alone: the packages of the parts come with the first of them.
"""

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_wheels

ROOT = gpu_wheels.ROOT
HERE = Path(__file__).resolve().parent
SECONDS = 350.0
"""For all parts together (MPIDDP_GPU_SECONDS)."""
RESERVED = 15.0
"""Of that, for what is made of the results."""
FEWEST = 5.0
"""Seconds with which no part is begun."""
GRACE = 10.0
"""Seconds from an interrupt to the end by force."""
SHOWN = 12
"""Lines of a part that failed."""
MARK = "GPU_RUN_MARK"
"""The variable by which all processes of a part are found. Tests remove those of mpiddp's names."""
MACHINE, DOCTOR, BENCHMARKS, TESTS, SUMMARY = (
    f"{name}.txt" for name in ("machine", "doctor", "benchmarks", "tests", "summary")
)
RECORDS, PAGE = "records.tar.gz", "report.html"
FILES = (SUMMARY, MACHINE, DOCTOR, BENCHMARKS, TESTS, RECORDS, PAGE)


@dataclass(frozen=True)
class Part:
    name: str
    file: str
    """Where its output goes."""
    seconds: float
    command: Sequence[str | Path]
    expected: int = 0
    """Its exit code."""
    needs_gpu: bool = False
    is_extra: bool = False
    """Whether it may be left out, or be stopped, for want of time."""


class Interrupted(BaseException):
    """The run is to end, with this exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def interrupt(number: int, _: object) -> None:
    """As a signal handler. Later signals do not disturb the end."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


class Run:
    """Runs parts one after the other, and says what became of them."""

    def __init__(self, folder: Path, scratch: Path, seconds: float) -> None:
        """``folder``: for the files of this run. ``scratch``: removed at its end."""
        self.scratch = scratch
        self.failed: list[str] = []
        self._folder, self._end = folder, time.monotonic() + seconds

    def read(self, file: str) -> str:
        path = self._folder / file
        return path.read_text(errors="replace") if path.exists() else ""

    def say(self, line: str) -> None:
        print(f"mpiddp: {line}", flush=True)
        with (self._folder / SUMMARY).open("a") as summary:
            summary.write(f"{line}\n")

    def take(self, part: Part, variables: Mapping[str, str], *, reserved: float = RESERVED) -> bool:
        """Run a part to its end; True if it ended as expected. Raises Interrupted."""
        left = self._end - time.monotonic() - reserved
        limit = min(part.seconds, left)
        path = self._folder / part.file
        if left < FEWEST:
            self._judge(part, "left out: no time", is_good=part.is_extra)
            return False
        begin = time.monotonic()
        with path.open("a") as out:
            words = [str(word) for word in part.command]
            print(f"\n== {part.name} ==\n$ {' '.join(words)}", file=out, flush=True)
            code, stray = self._finish(words, out.fileno(), variables, limit)
            took = f"{time.monotonic() - begin:.0f} s"
            outcome = f"exit code {code}" if code is not None else "stopped: its time was up"
            print(f"-- {outcome} after {took}", file=out)
        is_good = code == part.expected and not stray
        wanted = f" ({part.expected} was expected)" if code != part.expected else ""
        rest = f", and left {stray} processes behind" if stray else ""
        is_cut = code is None and limit < part.seconds and part.is_extra
        self._judge(part, f"{outcome}{wanted}{rest}, {took}", is_good=is_good or is_cut)
        return is_good

    def _judge(self, part: Part, what: str, *, is_good: bool) -> None:
        if is_good:
            self.say(f"{part.name}: {what}")
            return
        self.failed.append(part.name)
        self.say(f"{part.name}: FAILED: {what}; see {part.file}")
        told = self.read(part.file).rpartition(f"== {part.name} ==")[2].splitlines()[-SHOWN:]
        print("\n".join(f"    {line}" for line in told), flush=True)

    def _finish(
        self, words: Sequence[str], out: int, variables: Mapping[str, str], limit: float
    ) -> tuple[int | None, int]:
        """The exit code, None if it was late; and how many processes it left behind."""
        mark = uuid.uuid4().hex
        folder = self.scratch / "work"
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=folder,
            env={**variables, MARK: mark}, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except BaseException as error:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                end_marked(mark, 0.0)
                process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, 0
        return code, end_marked(mark, GRACE)


def end_marked(mark: str, patience: float) -> int:
    """Kill what still runs of a part after ``patience`` seconds; how many these were."""
    end = time.monotonic() + patience
    while (left := list_marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def list_marked(mark: str) -> list[int]:
    sign, found = f"{MARK}={mark}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if sign in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


def open_folder() -> Path:
    """The directory of this run's files, without those of another run."""
    folder = Path(os.environ.get("OUT") or "gpu-report").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        (folder / SUMMARY).touch()
    except OSError as error:
        raise SystemExit(f"mpiddp: {error}; OUT names a directory that can be written") from None
    return folder


def make_variables(scratch: Path, python: Path) -> dict[str, str]:
    given = os.environ
    paths = [str(python.parent), given.get("PATH", os.defpath)]
    modules = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "programs")]
    own = {
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join([*modules, *filter(None, [given.get("PYTHONPATH")])]),
        "TMPDIR": str(scratch),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        # One cache for all parts, so that what one has compiled is there for the next.
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        # A name server that cannot be reached does not hold anybody up for long.
        "RES_OPTIONS": given.get("RES_OPTIONS", "timeout:1 attempts:1"),
        "MPIDDP_TEST_WHEELS": given.get("MPIDDP_TEST_WHEELS", str(ROOT)),
    }
    if (scratch / ".mpich").exists():
        own |= {"MPIDDP_TEST_WHEELS": str(scratch), "VIRTUAL_ENV": str(python.parents[1])}
    return {**given, **own}


def list_parts(python: Path, scratch: Path, *, has_gpu: bool) -> list[Part]:
    """All that come after the machine is known. What takes longest comes last, and then what may be
    left out."""
    run = (python, "-m")
    overflow = (python, ROOT / "tests" / "programs" / "gpu_overflow.py")
    loop = (*run, "benchmarks", "training-loop", "--ranks", "1", "--models")
    loop += ("resnet18", "--seconds", "24") if has_gpu else ("convnet", "--seconds", "6")
    calls = (*run, "benchmarks", "allreduce", "--ranks", "2", "--buffers")
    calls += ("private", "shared", "gpu") if has_gpu else ("private", "--repetitions", "2")
    sizes = ("8", "64K", "1M", "16M") if has_gpu else ("64K",)
    narrow = ("--precision", "bf16")

    def record(name: str) -> tuple[str | Path, ...]:
        return "--output", scratch / f"{name}.jsonl"

    return [
        Part("the doctor", DOCTOR, 40, (*run, "mpiddp.doctor")),
        Part("the doctor of one rank", DOCTOR, 40, (*run, "mpiddp", "-n", "1", "doctor")),
        Part(
            "two ranks on one GPU are refused", DOCTOR, 40, (*run, "mpiddp", "-n", "2", "doctor"),
            expected=3, needs_gpu=True,
        ),
        Part("fp16 overflows", TESTS, 40, overflow, needs_gpu=True),
        Part(
            "all-reduces of two ranks", BENCHMARKS, 60,
            (*calls, "--sizes", *sizes, *record("allreduce")),
        ),
        Part("trainer and bare loop, fp32", BENCHMARKS, 60, (*loop, *record("fp32"))),
        Part(
            "trainer and bare loop, bf16, channels last", BENCHMARKS, 60,
            (*loop, *narrow, "--channels-last", *record("bf16")), needs_gpu=True,
        ),
        make_tests(python, scratch),
        Part(
            "checkpoints", BENCHMARKS, 40,
            (*run, "benchmarks", "checkpoint", "--ranks", "1", "--repetitions", "3",
             *record("checkpoint")), needs_gpu=True, is_extra=True,
        ),
        Part(
            "trainer and bare loop, bf16, compiled", BENCHMARKS, 90,
            (*loop, *narrow, "--compile", *record("compiled")), needs_gpu=True, is_extra=True,
        ),
    ]  # fmt: skip


def make_tests(python: Path, scratch: Path, options: Sequence[str] = ()) -> Part:
    words = ["-m", "pytest", "-m", "gpu", "-v", "-c", ROOT / "setup.cfg", "--rootdir", ROOT]
    words += ["-o", f"cache_dir={scratch / 'pytest'}", "--durations=15", ROOT / "tests" / "gpu"]
    return Part("tests", TESTS, 170, (python, *words, *options), needs_gpu=not options)


def prepare(run: Run) -> tuple[Path, dict[str, str], bool]:
    """The Python of the other parts, their environment, and whether there is a GPU."""
    scratch, this = run.scratch, Path(sys.executable)
    wheels = Path(os.environ.get("MPIDDP_GPU_WHEELS", ROOT / "gpu-wheels")).absolute()
    variables = make_variables(scratch, this)
    facts = HERE / "gpu_machine.py"
    run.take(Part("the machine", MACHINE, 30, (this, facts, "machine")), variables)
    python = this
    if wheels.is_dir():
        command = (this, HERE / "gpu_wheels.py", "install", wheels, scratch)
        run.take(Part("the carried wheels", MACHINE, 60, command), variables)
        made = scratch / "env" / "bin" / "python"
        python = made if made.exists() else this
        variables = make_variables(scratch, python)
    elif lacking := gpu_wheels.list_lacking():
        run.say(f"FAILED: {this} lacks {', '.join(lacking)}; {wheels} has no wheels")
        run.failed.append("the packages")
    # Files are read from the disk before anything is timed.
    run.take(Part("torch", MACHINE, 90, (python, facts, "torch")), variables)
    count = re.findall(r"^GPUs: (\d+)$", run.read(MACHINE), re.MULTILINE)
    # If torch was too late to tell, the driver's files do.
    has_gpu = int(count[0]) > 0 if count else bool(glob.glob("/dev/nvidia[0-9]*"))
    return python, variables, has_gpu


def finish(run: Run, folder: Path, python: Path, variables: Mapping[str, str]) -> None:
    records = sorted(run.scratch.glob("*.jsonl"))
    if not records:
        return
    command = (python, "-m", "benchmarks", "report", *records, "--output", folder / PAGE)
    run.take(Part("the page of all records", BENCHMARKS, 30, command), variables, reserved=0)
    with tarfile.open(folder / RECORDS, "w:gz") as archive:
        for path in records:
            archive.add(path, path.name)


def take_all(run: Run, folder: Path, options: Sequence[str]) -> None:
    python, variables, has_gpu = prepare(run)
    parts = list_parts(python, run.scratch, has_gpu=has_gpu)
    if options:
        parts = [make_tests(python, run.scratch, options)]
    for part in parts:
        if part.needs_gpu and not has_gpu:
            run.say(f"{part.name}: left out: it needs a GPU")
        else:
            run.take(part, variables)
    finish(run, folder, python, variables)


def main(words: Sequence[str]) -> int:
    if words[:1] == ["wheels"]:
        folder = Path(words[1] if len(words) > 1 else ROOT / "gpu-wheels")
        return gpu_wheels.fetch(folder, *words[2:3])
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, interrupt)
    folder = open_folder()
    # Sockets are made below it, and their paths must be short.
    scratch = Path(tempfile.mkdtemp(prefix="mpiddp-", dir="/tmp"))
    seconds = float(os.environ.get("MPIDDP_GPU_SECONDS", SECONDS))
    run, began = Run(folder, scratch, seconds), time.monotonic()
    code = 0
    try:
        take_all(run, folder, words)
    except Interrupted as error:
        run.say("interrupted")
        code = error.code
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    bad = f"FAILED: {', '.join(run.failed)}" if run.failed else "all was good"
    run.say(f"{bad}; {time.monotonic() - began:.0f} s, files in {folder}")
    return code or bool(run.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
