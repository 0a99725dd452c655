"""What mpiddp produces from fixed inputs, as digests: a change of structure leaves them equal.

    PYTHONPATH=tests/support:tests/programs:tests/training python tests/support/pins.py

writes ``tests/recorded/pins.json`` anew. A commit that changes it says what changed, and why.
"""

import contextlib
import hashlib
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import copies
import launchers
import promises
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.errors import ConfigurationError
from mpiddp.front import front, launch_plan
from mpiddp.launch.script.command_line import split
from mpiddp.process import cpus
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import halve, segment
from mpiddp.training.options.config import Configuration

RECORD = Path(__file__).parents[1] / "recorded" / "pins.json"
DIGITS = 16
"""Hexadecimal, of each digest."""

NODES = ([2], [3], [4], [7], [2, 2], [3, 2])
CUTS = {
    "shared-memory": BufferCut(1 << 16, 1 << 16, True),
    "shared-memory+mpi": BufferCut(1 << 10, 1 << 12, True), "mpi": BufferCut(15_000, 15_000, True),
    "torch": BufferCut(1 << 30, 1 << 30, False),
}  # fmt: skip
COUNTS = (5, 40_003)
"""Elements of a buffer."""

MPIRUNS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.4",
    "hydra": "HYDRA build details:",
}
REQUESTS = (
    "-n 1", "-n 3", "-n 1000", "-n auto", "-n 2 --launcher-options '--tag-output'", "--nodes 2",
    "-n 4 --nodes 2", "--ranks-per-node 2", "-n 2 --launcher mpirun", "-n 2 --launcher none",
    "-n 2 --restarts 3", "-n 2 --bind numa", "-n 2 --requeue", "-n x", "--launcher srun",
)  # fmt: skip
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
TWO_NODES = (
    "JobId=7 JobName=run\\n   NodeList=n[1-2]\\n   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=1 \\n"
)


def digest(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def list_programs() -> Iterator[tuple[str, str]]:
    """Each algorithm's programs of all ranks, with those of its halves."""
    for name in registry.names():
        for nodes in NODES:
            whole = promises.build(name, sum(nodes), nodes)
            variants = [whole, segment(whole, 3), *(halve(whole) if whole.owners else ())]
            for transport, cut in CUTS.items():
                places = nodes if transport.startswith("shared") else [1] * sum(nodes)
                found = [
                    promises.compile_all(each, count, places, cut)
                    for each in variants
                    for count in COUNTS
                ]
                shape = "+".join(map(str, nodes))
                # As the class was called when they were recorded.
                text = repr(found).replace("ProgramMessage(", "Message(")
                yield f"{name} on {shape} ranks by {transport}", digest(text)


def list_commands() -> Iterator[tuple[str, str]]:
    """What the front would start, or its error, on a machine and in a job."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text("")
        for name, version in MPIRUNS.items():
            for place in ("machine", "job"):
                for words in REQUESTS:
                    text = _run_front(Path(folder), version, place == "job", shlex.split(words))
                    yield f"{words} by {name} in a {place}", digest(text)


def _run_front(folder: Path, version: str, in_job: bool, words: Sequence[str]) -> str:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {
        "mpirun": f"echo '{version}'",
        "scontrol": f"printf '{TWO_NODES}'",
        "srun": "echo 'pmix pmi2'",
    }.items():
        copies.write_program(programs / name, text)
    words = ["--dry-run", *words, "script.py"]
    kept = {
        name: each for name, each in os.environ.items() if not launchers.INHERITED.fullmatch(name)
    }
    kept["PATH"] = f"{programs}:/usr/bin:/bin"
    output = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch.dict(os.environ, {**kept, **(JOB if in_job else {})}, clear=True),
        mock.patch.object(sys, "argv", ["mpiddp", *words]),
        mock.patch.object(sys, "orig_argv", [sys.executable, "-m", "mpiddp", *words]),
        mock.patch.object(sys, "prefix", str(folder)),
        mock.patch.object(os, "geteuid", return_value=1000),
        mock.patch.object(cpus, "count_cores", return_value=4),
        mock.patch.object(launch_plan, "count_gpus", return_value=0),
    ):
        try:
            front.run(split(words))
        except ConfigurationError as error:
            output.write(str(error))
        except SystemExit as end:
            output.write(f"exit {end.code}")
    output.seek(0)
    return output.read().replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON")


def _resolve(values: Mapping[str, Any]) -> str:
    """The resolved configuration as text, or the error."""
    try:
        return repr(sorted(vars(Configuration(**values).resolve()).items()))
    except ConfigurationError as error:
        return f"error: {error}"


def list_configurations() -> Iterator[tuple[str, str]]:
    """What each option leads to alone and with each other one."""
    from test_config import EXAMPLES

    for name, value in EXAMPLES.items():
        yield f"{name} alone", digest(_resolve({name: value}))
    pairs: dict[str, list[str]] = {name: [] for name in EXAMPLES}
    for first, second in combinations(EXAMPLES, 2):
        pairs[first].append(_resolve({first: EXAMPLES[first], second: EXAMPLES[second]}))
    for name, found in pairs.items():
        yield f"{name} with each other option", digest(found)


KINDS = {
    "programs": list_programs, "commands": list_commands, "configurations": list_configurations,
}  # fmt: skip

if __name__ == "__main__":
    found = {kind: dict(list_all()) for kind, list_all in KINDS.items()}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
