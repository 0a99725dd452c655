"""Random mutants of a folder, each run against the tests that cover its line.

    python tests/support/mutants.py mpiddp/schedules [--tests PATH …] [--count 150] [--jobs N]

A mutant is one change of a comparison, an operator, a constant or a condition, a statement that is
deleted, or two arguments that are swapped. First the tests run once under coverage, in all their
processes. Then each mutant runs in a copy against the tests that cover its line, the quickest
first. `equivalents.toml` lists mutants that change nothing, with the reason. The exit code is 1 if
fewer than --least of the others are killed. With --whole each runs against all of them, and the
tests that kill nothing that another does not are listed.
"""

import argparse
import ast
import functools
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

import launchers
from breakages import MARK, Copy, make_copies

EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}  # fmt: skip
STRICT = ("@dataclass(frozen=True)", "@dataclass(frozen=True, kw_only=True)")
"""Lines that are left alone: they guard against mistakes of developers, which tests do not make."""
BARE = '"-I", "-S"'
"""What a program is started with that needs the standard library alone."""
MOST_SECONDS, TEST_SECONDS = 20, 60
"""For a mutant's tests, the quickest; and for each of them, since some mutants never end."""
CONFIGURATION = """\
[run]
data_file = {folder}/data
parallel = true
source = {source}
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit
disable_warnings = no-data-collected, module-not-imported
[report]
"""


@dataclass(frozen=True)
class Mutant:
    """Bytes ``begin`` to ``end`` of a file become ``new``."""

    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old!r} -> {self.new!r}"


class Source:
    """A file, and the mutants that it has."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.content = file, text.encode()
        self._starts = [0]
        for line in self.content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.tree = ast.parse(text)

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _change(self, begin: int, end: int, new: str) -> Mutant:
        old = self.content[begin:end].decode()
        return Mutant(self.file, self.content[:begin].count(b"\n") + 1, begin, end, old, new)

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> Mutant:
        return self._change(*self._place(node), new)

    def _between(self, left: ast.expr, right: ast.expr, words: tuple[str, str]) -> Iterator[Mutant]:
        old, new = words
        begin, end = self._place(left)[1], self._place(right)[0]
        place = self.content.find(old.encode(), begin, end)
        if place >= 0:
            yield self._change(place, place + len(old), new)

    def list_mutants(self) -> Iterator[Mutant]:
        # Types, and strings that stand for themselves, change nothing.
        still: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
                still |= set(ast.walk(node.annotation))
            elif isinstance(node, ast.FunctionDef) and node.returns is not None:
                still |= set(ast.walk(node.returns))
        for node in ast.walk(self.tree):
            if node not in still:
                yield from self._mutate(node)

    def _mutate(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                yield from self._between(left, right, COMPARISONS[type(kind)])
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in OPERATORS:
                texts = (ast.JoinedStr, ast.List, ast.Tuple)
                if not any(isinstance(each, texts) or _is_text(each) for each in (left, right)):
                    yield from self._between(left, right, OPERATORS[type(kind)])
            case ast.BoolOp(op=kind, values=[left, right]):
                yield from self._between(left, right, OPERATORS[type(kind)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replace(node, ast.unparse(operand))
            case ast.Constant(value=bool() as value):
                yield self._replace(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield self._replace(node, repr(value + 1))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield self._replace(test, f"(not ({ast.unparse(test)}))")
            case ast.Call(func=ast.Name("min" | "max")):
                pass  # In either order they give the same.
            case ast.Call(args=[ast.Starred(), *_] | [_, ast.Starred(), *_]):
                pass
            case ast.Call(args=[first, second, *_]):
                new = ast.unparse(second), ast.unparse(first)
                begin, end = self._place(first)[0], self._place(second)[1]
                if new[0] != new[1]:
                    yield self._change(begin, end, ", ".join(new))
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                yield self._replace(node, "pass")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


@dataclass(frozen=True)
class Covered:
    """Which tests run which lines; each list begins with the quickest."""

    by_line: dict[tuple[str, int], list[str]]
    """By file and line."""
    by_file: dict[str, list[str]]
    seconds: dict[str, float]

    def find(self, mutant: Mutant, *, whole: bool) -> list[str]:
        """All tests, or those for which there is time.

        Lines that run at import belong to all tests that run anything of the file.
        """
        near = self.by_line.get((mutant.file, mutant.line)) or self.by_file.get(mutant.file, [])
        sums = itertools.accumulate(self.seconds[each] for each in near[1:])
        return near if whole else near[: 1 + sum(each < MOST_SECONDS for each in sums)]


class _Contexts:
    """A plugin of pytest: lines belong to the test that runs; prints its seconds."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        current = coverage.Coverage.current()
        if current is not None:
            current.switch_context(item.nodeid)
        began = time.monotonic()
        result = yield
        self._seconds[item.nodeid] = time.monotonic() - began
        return result


def run_covered(tests: list[str], target: str) -> int:
    """What the process under coverage does: run pytest, and write each test's seconds.

    What fails, as under a limit of memory that coverage exceeds, is said and left out.
    """
    seconds: dict[str, float] = {}
    words = ["-q", "-p", "no:cacheprovider", "-m", "not long", "-n", "0", *tests]
    contexts = _Contexts(seconds)
    code = pytest.main(words, plugins=[contexts])
    for each in contexts.failed:
        print(f"left out, since it fails unchanged: {each}", flush=True)
        seconds.pop(each, None)
    Path(target).write_text(json.dumps(seconds))
    return 0 if code == pytest.ExitCode.TESTS_FAILED and seconds else int(code)


def cover(copy: Copy, folder: str, tests: list[str]) -> Covered:
    """Run the tests once. Lines of other processes than pytest's belong to the whole test file."""
    place = copy.temporary / "coverage"
    place.mkdir()
    rc = place / "rc"
    source = copy.root / folder
    source = source.parent if source.is_file() else source  # Coverage knows folders alone.
    rc.write_text(CONFIGURATION.format(folder=place, source=source))
    # The copy's own harness: jobs are started in the tree in which their launcher lies.
    program = copy.root / Path(__file__).relative_to(launchers.ROOT)
    path = os.pathsep.join((str(copy.root), str(program.parent)))
    # With the file's name a process reads the test's name from its own environment.
    own = {"PYTHONPATH": path, "TMPDIR": str(copy.temporary), MARK: str(copy.root),
           "COVERAGE_PROCESS_START": str(rc)}  # fmt: skip
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={rc}", str(program), "--covered",
               str(place / "seconds"), folder, "--tests", *tests]  # fmt: skip
    # Processes that load no site-packages would not be measured.
    bare = [path for path in (copy.root / "mpiddp").rglob("*.py") if BARE in path.read_text()]
    for path in bare:
        copy.write(path, path.read_text().replace(BARE, '"-I"'))
    environ = {**os.environ, **own}
    code = subprocess.run(command, cwd=copy.root, env=environ, check=False).returncode
    for path in bare:
        copy.write(path, (launchers.ROOT / path.relative_to(copy.root)).read_text())
    if code:
        raise SystemExit(f"the tests of {folder} fail unchanged (exit code {code})")
    seconds: dict[str, float] = json.loads((place / "seconds").read_text())
    whole = coverage.Coverage(config_file=str(rc))
    whole.combine([str(place)])
    data = whole.get_data()
    near: dict[str, set[str]] = defaultdict(set)
    for each in seconds:
        near[each.partition("::")[0]].add(each)

    @functools.cache
    def list_tests(context: str) -> set[str]:
        # A pool's rank has the context of its start, and that of the call.
        context = context.rpartition("|")[2]
        test = context.removesuffix(" (call)").removesuffix(" (setup)")
        # A rank that several tests share began with the first of them.
        return near[test.partition("::")[0]] if test != context else {test} & seconds.keys()

    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    at_import: set[tuple[str, int]] = set()
    for file in data.measured_files():
        name = str(Path(file).relative_to(copy.root))
        for line, contexts in data.contexts_by_lineno(file).items():
            found[name, line].update(*map(list_tests, contexts))
            if "" in contexts:
                at_import.add((name, line))
    files: dict[str, set[str]] = defaultdict(set)
    for (name, _), each in found.items():
        files[name] |= each

    def order(names: set[str]) -> list[str]:
        return sorted(names, key=seconds.__getitem__)

    return Covered(
        {where: order(each) for where, each in found.items() if where not in at_import},
        {name: order(each) for name, each in files.items()},
        seconds,
    )


def run(copy: Copy, mutant: Mutant, tests: list[str], *, whole: bool) -> list[str]:
    """The test that kills it, or all of them; empty if none does."""
    path = copy.root / mutant.file
    content = path.read_bytes()
    changed = content[: mutant.begin] + mutant.new.encode() + content[mutant.end :]
    copy.write(path, changed.decode())
    try:
        code, said = copy.test(tuple(tests), whole=whole, seconds=TEST_SECONDS)
        if code == pytest.ExitCode.USAGE_ERROR:
            # Their file cannot be imported any more, or a table of cases has other names.
            files = tuple(dict.fromkeys(each.partition("::")[0] for each in tests))
            code, said = copy.test(files, whole=whole, seconds=TEST_SECONDS)
    finally:
        copy.write(path, content.decode())
    return said if code else []


def list_idle(killed: list[set[str]], tests: set[str]) -> list[str]:
    """The tests without which each mutant is still killed; of two that do the same, one."""
    needed: set[str] = set()
    for killers in sorted(killed, key=len):
        if not killers & needed:
            needed.add(max(sorted(killers), key=lambda each: sum(each in own for own in killed)))
    return sorted(tests - needed)


def _name_function(test: str) -> str:
    return test.partition("[")[0].partition("@")[0]


def load_equivalents() -> set[tuple[str, str, str]]:
    """File, line, and what a mutant writes."""
    return {
        (file, line, new)
        for file, rows in tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8")).items()
        for line, *changes, _ in rows
        for new in changes
    }


def draw(folder: str, count: int, seed: int) -> list[Mutant]:
    """So many mutants of the file, or of the folder's modules, or all that there are."""
    place = launchers.ROOT / folder
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    known = load_equivalents()
    mutants = [
        mutant
        for file in files
        for mutant in Source(
            str(file.relative_to(launchers.ROOT)), file.read_text(encoding="utf-8")
        ).list_mutants()
    ]
    chosen = random.Random(seed).sample(mutants, min(count, len(mutants)))
    lines = [(each, _show(each)) for each in chosen]
    return [
        each
        for each, line in lines
        if line not in STRICT and (each.file, line, each.new) not in known
    ]


def _show(mutant: Mutant) -> str:
    """Its whole line, by which an equivalent one is known."""
    lines = (launchers.ROOT / mutant.file).read_text(encoding="utf-8").splitlines()
    return lines[mutant.line - 1].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutate lines, and see whether tests notice it.")
    parser.add_argument("folder", help="such as mpiddp/schedules; or a file")
    parser.add_argument("--tests", nargs="+", help="default: the folder's below tests/")
    parser.add_argument("--count", type=int, default=150, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies side by side")
    parser.add_argument("--least", type=float, default=0.85, metavar="SHARE")
    parser.add_argument("--whole", action="store_true", help="which tests kill nothing alone?")
    parser.add_argument("--covered", help=argparse.SUPPRESS)
    options = parser.parse_args()
    package, _, room = options.folder.rstrip("/").partition("/")
    tests = options.tests or [f"tests/{room if package == 'mpiddp' else package}"]
    if options.covered:
        return run_covered(tests, options.covered)
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    mutants = draw(options.folder, options.count, options.seed)
    with make_copies(options.jobs) as copies:
        covered = cover(copies[0], options.folder, tests)
        for copy in copies:
            free.put(copy)

        def try_one(mutant: Mutant) -> list[str] | None:
            near = covered.find(mutant, whole=options.whole)
            copy = free.get()
            try:
                killers = run(copy, mutant, near, whole=options.whole) if near else None
            finally:
                free.put(copy)
            verdict = f"killed by {', '.join(killers[:3])}" if killers else "SURVIVED"
            print(f"{mutant}: {'NOT COVERED' if killers is None else verdict}", flush=True)
            return killers

        with ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(try_one, mutants))
    killed = [set(map(_name_function, each)) for each in found if each]
    for test, count in Counter(each for own in killed for each in own).most_common(20):
        print(f"{count:4} {test}")
    if options.whole:
        names = {_name_function(each) for own in covered.by_file.values() for each in own}
        print("kill nothing that another does not:", *list_idle(killed, names), sep="\n     ")
    share = len(killed) / len(found) if found else 1.0
    print(f"{options.folder}: {len(killed)} of {len(found)} killed ({share:.0%}), "
          f"{found.count(None)} not covered, {found.count([])} survived")  # fmt: skip
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
