"""Runs the doctor in real jobs, and reads its report."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import launchers

STAGE = ("--timeout", "100")
"""No stage is to be late on a busy machine."""
CHECKS = (
    "MPI library", "ranks", "kill on bad exit", "code", "host name", "cores", "threads",
    "locked memory", "open files", "shared memory", "core files", "fabric", "left behind",
    "run directory",
    "data directory", "variables", "torch version", "import torch", "torchvision", "interfaces",
    "reverse look-ups", "links", "clocks", "GPUs", "all-reduce",
)  # fmt: skip
"""The checks of a launch without GPUs, in the order of their lines."""

OF_ENVIRONMENT = (("import torch", "warn"), ("torchvision", "warn"), ("left behind", "warn"))
"""A busy machine is slow to import torch, torchvision's wheel is built for CUDA alone, and other
tests kill their jobs."""
STATUSES = ("pass", "skip", "warn", "fail")
LINE = re.compile(r"^(pass|skip|warn|fail)  (.{17})  (.*)$")
UCX_LINE = re.compile(r"^\[\d+\.\d+\] \[.*UCX.*\n", re.MULTILINE)
"""What the transport below MPICH has to say, it writes to standard output."""
SUMMARY = re.compile(
    r"^mpiddp\.doctor: (\d+) passed(?:, (\d+) skipped)?, (\d+) warnings?, (\d+) failures? "
    r"\(exit code (\d+)\) in ([\d.]+) s$",
    re.MULTILINE,
)

PATCHED = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
{patch}
from mpiddp.doctor.__main__ import main
main()
"""

NO_TORCH = """
from unittest import mock
torch = sys.modules["torch"] = mock.MagicMock(__version__="made up")
sys.modules.update({"torch.distributed": torch.distributed, "torch._C._distributed_c10d": torch})
torch.cuda.device_count.return_value = 0
torch.get_device_module.return_value = torch.cuda
torch.device.return_value.type = "cpu"
torch.version.cuda = torch.version.hip = torch.version.xpu = None
torch.distributed.is_initialized.return_value = False
"""
"""A patch for what ends before torch has a part in it: its import costs more than all the rest."""

RECORDED = launchers.ROOT / "tests" / "recorded"
"""Excerpts of what others published; the first line of each file says where."""


def read_recorded(name: str) -> str:
    source, _, content = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("\n")
    assert source.startswith("# https://"), source
    return content


@dataclass(frozen=True)
class Line:
    """One line of a report, with the lines of its table."""

    status: str
    check: str
    text: str


@dataclass(frozen=True)
class Reading:
    lines: tuple[Line, ...]
    result: launchers.Result

    def line(self, check: str) -> Line:
        (found,) = [line for line in self.lines if line.check == check]
        return found

    def bad(self) -> dict[str, str]:
        """Status by check, of those that are neither passed nor skipped, without what is the
        environment's."""
        found = {x.check: x.status for x in self.lines if x.status in ("warn", "fail")}
        return {name: found[name] for name in found if (name, found[name]) not in OF_ENVIRONMENT}


def read(result: launchers.Result, *, exit_code: int) -> Reading:
    """Read a job's output, which holds one whole report and nothing else."""
    result.expect(exit_code)
    lines: list[Line] = []
    stdout = UCX_LINE.sub("", result.stdout.replace("\r", ""))
    text, *rest = stdout.rstrip("\n").split("\nmpiddp.doctor: ")
    assert len(rest) == 1 and "\n" not in rest[0], str(result)
    for row in text.split("\n"):
        match = LINE.match(row)
        if match is not None:
            lines.append(Line(match[1], match[2].strip(), match[3]))
        else:
            assert row.startswith("      ") and lines, str(result)
            last = lines.pop()
            lines.append(Line(last.status, last.check, f"{last.text}\n{row}"))
    (summary,) = SUMMARY.findall(stdout)
    passed, skipped, warnings, failures, code = (int(number or 0) for number in summary[:5])
    assert code == exit_code
    counts = {status: sum(x.status == status for x in lines) for status in STATUSES}
    assert list(counts.values()) == [passed, skipped, warnings, failures], str(result)
    return Reading(tuple(lines), result)


def examine(
    launcher: launchers.Launcher | str,
    ranks: int,
    *options: str | Path,
    cwd: Path,
    exit_code: int = 0,
    patch: str = "",
    python: Path | None = None,
    env: dict[str, str | None] | None = None,
) -> Reading:
    """Run the doctor on ``ranks`` ranks, after ``patch`` on each of them, and read its report."""
    program: Sequence[str] = ["-m", "mpiddp.doctor"]
    if patch:
        program = ["-c", PATCHED.format(patch=patch)]
    keywords = {} if python is None else {"python": python}
    words = [*program, *STAGE, *options]
    result = launchers.run(launcher, ranks, words, env=env, cwd=cwd, **keywords)
    return read(result, exit_code=exit_code)
