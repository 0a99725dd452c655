"""Runs torch's own tests of its backends (distributed_test.py) with Gloo and with mpiddp.

python tests/torch_backend/torch_suite.py docs/about/torch-backend-tests.md

torch starts new processes for each test, which import torch again. Here one process for each
backend and world size has imported it, and forks the ranks of each test.
"""

import json
import os
import re
import signal
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

HEAD = """# torch's own tests

torch tests its backends with `torch.testing._internal.distributed.distributed_test`. These are the
results with backend `mpiddp` on CPUs, beside Gloo's.
`python tests/torch_backend/torch_suite.py docs/about/torch-backend-tests.md` runs the tests with
both, and writes what it finds with the installed release of torch.

A test runs with 3 ranks, or with 4 or 8 if it needs them. torch chooses tests by the name of the
backend; here mpiddp gets the tests that Gloo gets.

| torch | Gloo passes | mpiddp passes | mpiddp fails | torch leaves out | Gloo alone passes |
|---|---|---|---|---|---|
"""
SECTION = "\n## What Gloo does not pass with torch "
"""Of the newest release in the document, with the reasons of single tests."""
SIZES = (3, 4, 8)
"""World sizes, tried in turn while a test asks for another one."""
BODY_SECONDS = 120
"""For one test, after which its ranks are killed."""
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


@dataclass(frozen=True)
class Outcome:
    kind: str
    reason: str = ""


def run(backend: str, names: Sequence[str] = ()) -> dict[str, Outcome]:
    """The outcome of each test of ``names``, or of all. Takes at most 2 minutes for each."""
    outcomes: dict[str, Outcome] = {}
    for size in SIZES:
        wanted = [
            name for name, found in outcomes.items()
            if found.kind == SKIPPED and re.search(r"world ?size", found.reason)
        ]  # fmt: skip
        if not outcomes or wanted:
            outcomes |= _run_with(backend, size, wanted or names)
    return outcomes


def _run_with(backend: str, size: int, names: Sequence[str]) -> dict[str, Outcome]:
    variables = os.environ | {
        "BACKEND": backend, "WORLD_SIZE": str(size), "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", "MPIDDP_WAIT": "sleep",
        # Reasons show sets.
        "PYTHONHASHSEED": "0",
        # Tests that begin anew use the file of their ranks.
        "INIT_METHOD": "file://",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(BODY_SECONDS),
    }  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *names],
        env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = server.communicate(timeout=BODY_SECONDS * (len(names) or 400))
    finally:
        # Its ranks as well, if it was interrupted.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    return {name: Outcome(*each) for name, each in json.loads(text).items()}


def write(path: Path) -> None:
    """Run all tests, and write what is found into the file ``path``, which keeps the rows of other
    releases of torch."""
    text = path.read_text() if path.exists() else ""
    release = version("torch").partition("+")[0]
    gloo, own = run("gloo"), run("mpiddp")
    rows = dict(re.findall(r"^(\| (\d+\.\d+\.\d+) \|.*\n)", text, re.MULTILINE))
    releases = {name: row for row, name in rows.items()} | {release: describe(release, gloo, own)}
    newest, *others = sorted(releases, key=lambda name: [*map(int, name.split("."))], reverse=True)
    table = "".join(releases[name] for name in (newest, *others))
    section = text.partition(SECTION)[2]
    if newest == release:
        section = "\n".join([release, "", *list_reasons(gloo), ""])
    path.write_text(HEAD + table + SECTION + section)


def describe(release: str, gloo: Mapping[str, Outcome], own: Mapping[str, Outcome]) -> str:
    theirs, ours = (Counter(each.kind for each in found.values()) for found in (gloo, own))
    missed = (f"`{name}`: {own[name].reason}" for name in find_missed(gloo, own))
    numbers = [theirs[PASSED], ours[PASSED], ours[FAILED], ours[SKIPPED]]
    return f"| {' | '.join([release, *map(str, numbers), '<br>'.join(missed) or 'none'])} |\n"


def list_reasons(gloo: Mapping[str, Outcome]) -> Iterator[str]:
    yield from ("| reason, as torch says it | tests |", "|---|---|")
    reasons = Counter(found.reason for found in gloo.values() if found.kind != PASSED)
    yield from (f"| {reason} | {count} |" for reason, count in reasons.most_common())


def find_missed(gloo: Mapping[str, Outcome], own: Mapping[str, Outcome]) -> list[str]:
    return [name for name in gloo if gloo[name].kind == PASSED != own[name].kind]


def find_reason(text: str) -> str:
    """The last error of a traceback: its type and the first line of its message."""
    errors = re.findall(r"^([A-Za-z_][\w.]*(?:Error|Exception): .*)$", text, re.MULTILINE)
    return errors[-1] if errors else text.strip().splitlines()[-1]


def serve(names: Sequence[str]) -> None:
    """Run tests, with the backend and the world size of the environment; print the outcomes."""
    # What ranks print goes to the standard error: the outcomes stand alone.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind = _make_test_case()
    names = names or unittest.defaultTestLoader.getTestCaseNames(kind)
    suite = unittest.TestSuite(map(kind, names))
    found = unittest.TextTestRunner(verbosity=2).run(suite)
    outcomes = dict.fromkeys(names, (PASSED, ""))
    for test, text in found.failures + found.errors:
        outcomes[test._testMethodName] = (FAILED, find_reason(text))
    for test, text in found.skipped:
        outcomes[test._testMethodName] = (SKIPPED, text)
    json.dump(outcomes, stream)


def _make_test_case() -> type[Any]:
    """torch's test case, whose ranks are forked."""
    from torch import multiprocessing
    from torch.testing._internal import common_distributed as common

    import mpiddp.torch_backend  # noqa: F401 - registers the backend

    # The conditions under which torch leaves tests out are those of Gloo. They are read now.
    backend = os.environ["BACKEND"]
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test as tests

    tests.BACKEND = os.environ["BACKEND"] = backend
    common.TIMEOUT_OVERRIDE.clear()

    class ForkedTest(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:  # noqa: N802 - unittest's name
            super().setUp()
            tests.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:  # noqa: N802 - unittest's name
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        def _barrier(self, *arguments: Any, **options: Any) -> None:
            # torch's 10 s are too short for a busy machine.
            tests.Barrier.sync(*arguments, **{"timeout": BODY_SECONDS, **options})

        def _test_accumulate_gradients_no_sync(self, *arguments: Any, **options: Any) -> None:
            # Chooses the model's device by the backend's name.
            with mock.patch.object(tests, "BACKEND", "gloo"):
                super()._test_accumulate_gradients_no_sync(*arguments, **options)

        def run_test(self, name: str, pipe: Any) -> None:
            body = getattr(self, name)

            def tell() -> None:
                try:
                    body()
                except unittest.SkipTest as skip:
                    pipe.send(str(skip))
                    raise

            setattr(self, name, tell)
            super().run_test(name, pipe)

        def _check_return_codes(self, *arguments: Any) -> None:
            try:
                super()._check_return_codes(*arguments)
            except unittest.SkipTest:
                pipe = self.pid_to_pipe[self.processes[0].pid]
                if self.processes[0].exitcode == common.TEST_SKIPS["generic"].exit_code:
                    raise unittest.SkipTest(pipe.recv()) from None
                raise

    return ForkedTest


if __name__ == "__main__":
    serve(sys.argv[2:]) if sys.argv[1] == "--serve" else write(Path(sys.argv[1]))
