"""Shows that the tests notice what they should: breaks one line at a time, in a copy.

    python tests/support/breakages.py [--list] [--jobs N] [NAME …]

`breakages.toml` holds the breakages, and for each the tests that must notice it. First these tests
run unbroken, and must pass. The exit code is 1 if a breakage goes unnoticed or cannot be tried.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import launchers

TABLE = Path(__file__).with_name("breakages.toml")
MARK = "BREAKAGES_COPY"
"""In the environment of each process of a copy. Tests remove variables that begin with MPIDDP_."""
DEADLINE, END_SECONDS = 300.0, 60.0
"""Seconds for one run of pytest; and for its fixtures to clean up when it is terminated."""
LIST_FILES = ("git", "-C", launchers.ROOT, "ls-files", "-z", "-co", "--exclude-standard")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long")
TEST_SECONDS = 250
"""A test that hangs fails within the deadline."""


@dataclass(frozen=True)
class Breakage:
    """An entry of the table: ``old``, which stands once in ``file``, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: the default tests that must notice it."""


def disable(old: str) -> str:
    """A condition becomes `False`, and any other statement `pass`."""
    if found := re.fullmatch(r"(\s*(?:el)?if )[^\n]+(:\n?)", old):
        return f"{found[1]}False{found[2]}"
    return re.sub(r"\S.*\S", "pass", old, count=1, flags=re.DOTALL)


def load() -> list[Breakage]:
    files = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [
        Breakage(name, file, old, *(new or [disable(old)]), tuple(row["tests"]))
        for file, rows in files.items()
        for name, row in rows.items()
        for old, *new in [row["change"]]
    ]


class Copy:
    """The checkout's files as they are now, in a directory of their own."""

    def __init__(self, parent: Path) -> None:
        self.root, self.temporary = parent / "checkout", parent / "t"
        self.temporary.mkdir(parents=True)
        self.changed = int(time.time())
        for name in subprocess.check_output(LIST_FILES, text=True).split("\0")[:-1]:
            if os.path.lexists(launchers.ROOT / name):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(launchers.ROOT / name, self.root / name, follow_symlinks=False)
        for prefix in filter(Path.exists, (launchers.MPICH_PREFIX, launchers.OPEN_MPI_PREFIX)):
            (self.root / prefix.name).symlink_to(prefix)

    def run(self, entry: Breakage, *, broken: bool) -> bool:
        """Whether the entry's tests pass, or notice the breakage; prints a line about it."""
        path = self.root / entry.file
        whole, began = path.read_text(encoding="utf-8"), time.monotonic()
        if broken:
            self.write(path, whole.replace(entry.old, entry.new))
        try:
            code, (said, *_) = self.test(entry.tests)
        finally:
            self.write(path, whole)
        verdict = f"ERROR, no test failed (exit code {code}): {said}"
        if code in (0, 1) and broken:
            verdict = f"noticed by {said}" if code else "NOT NOTICED"
        elif not broken:
            verdict = f"ERROR, exit code {code}: {said}" if code else "passed"
        name = entry.name if broken else f"unbroken {' '.join(entry.tests)}"
        print(f"{name}: {verdict}, {time.monotonic() - began:.1f} s", flush=True)
        return code == int(broken)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Bytecode is known by the time of the last change, in whole seconds.
        self.changed += 1
        os.utime(path, (self.changed, self.changed))

    def test(
        self, tests: tuple[str, ...], *, whole: bool = False, seconds: int = TEST_SECONDS
    ) -> tuple[int, list[str]]:
        """Pytest's exit code, negative past the deadline, and what failed or was said last.

        It stops at the first test that fails, unless the ``whole`` run is asked for. A test that
        takes more than ``seconds`` fails.
        """
        path = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "TMPDIR": str(self.temporary), MARK: str(self.root)}
        # Not a pipe, which a process that is left behind would keep open.
        with (self.temporary / "output").open("w+", errors="replace") as output:
            options = [f"--timeout={seconds}", *([] if whole else ["-x"])]
            process = subprocess.Popen(
                [sys.executable, *PYTEST, *options, *tests],
                cwd=self.root, env={**os.environ, **own},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
            try:
                code = process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                code = -signal.SIGTERM
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
            self.end()
            output.seek(0)
            text = output.read().strip()
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", text, re.MULTILINE)
        code = 1 if failed and code < 0 else code  # Ranks of its did not end in time.
        return code, failed or [text.rpartition("\n")[2]]

    def end(self) -> None:
        """Kill what a run has left behind."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if launchers.environ_of(pid).get(MARK) == str(self.root):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def make_copies(count: int) -> Iterator[list[Copy]]:
    """So many, which are removed at the end or by SIGTERM, with all that runs in them."""
    # Its path is short, since sockets are made below it; some tests read it as another user.
    with tempfile.TemporaryDirectory(prefix="b-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        copies: list[Copy] = []

        def end(number: int, _: object) -> None:
            for _ in range(2):  # Other threads go on with their next meanwhile.
                for copy in copies:
                    copy.end()
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(128 + number)

        signal.signal(signal.SIGTERM, end)
        copies += [Copy(Path(folder) / str(number)) for number in range(count)]
        yield copies


def try_all(entries: list[Breakage], jobs: int) -> tuple[int, int]:
    """How many entries were noticed, and how many could be tried."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def run(entry: Breakage, broken: bool) -> bool:
        copy = free.get()
        try:
            return copy.run(entry, broken=broken)
        finally:
            free.put(copy)

    with make_copies(jobs) as copies, ThreadPoolExecutor(jobs) as pool:
        for copy in copies:
            free.put(copy)
        selections = {each.tests: each for each in entries}
        passed = pool.map(lambda each: run(each, False), selections.values())
        sound = dict(zip(selections, passed, strict=True))
        tried = [each for each in entries if sound[each.tests]]
        return sum(pool.map(lambda each: run(each, True), tried)), len(tried)


def main() -> int:
    parser = argparse.ArgumentParser(description="Break lines, and see whether tests notice it.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="show the breakages, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies side by side")
    options, began = parser.parse_args(), time.monotonic()
    chosen = [each for each in load() if not options.names or each.name in options.names]
    if unknown := set(options.names) - {each.name for each in chosen}:
        parser.error(f"no such breakage: {', '.join(sorted(unknown))}")
    if options.list:
        print(*(f"{each.name} ({each.file})" for each in chosen), sep="\n")
        return 0
    noticed, tried = try_all(chosen, options.jobs)
    print(f"{len(chosen)} breakages: {noticed} noticed, {tried - noticed} not, "
          f"{len(chosen) - tried} not tried, in {time.monotonic() - began:.0f} s")  # fmt: skip
    return int(noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
