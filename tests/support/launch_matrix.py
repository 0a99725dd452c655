"""The table of docs/launching.md: every MPI library, launcher, network and place, each really run.

    python tests/support/launch_matrix.py [WORD …] [--document docs/launching.md]

prints its cells, and writes them into the document; with words, those alone whose names hold all
of them. In each cell somebody starts four ranks on two nodes of the virtual cluster. They work, or
mpiddp refuses in one message within REFUSAL_SECONDS, for a reason that the table explains; anything
else is a fault, and the exit code is 1.
"""

import argparse
import contextlib
import datetime
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import facts
import launchers
import slurm
import ssh
from copies import write_program
from mpiddp.launch.launcher.programs import find_mpirun

LIBRARIES = {
    "openmpi": "Open MPI 5", "openmpi4": "Open MPI 4", "mpich": "MPICH", "impi": "Intel MPI",
}  # fmt: skip
STARTS = ("srun --mpi=pmix", "srun --mpi=pmi2", "srun --mpi=none", "mpirun", "--hosts")
NETWORKS = {"IPv4": "4", "dual": "dual", "IPv6": "6"}
"""How machines are addressed, and the word of jobs/cluster/up for it."""
PLACES = ("bare", "step", "container")
PASSING = r"mpiddp: (started|note|hint)"
"""Messages of mpiddp's that are no refusal."""
RANKS, NODES = 4, {"node1": 2, "node2": 2}
REFUSAL_SECONDS, LONGEST_SECONDS = 20.0, 100.0
"""The first one on a machine with a core for whoever wants one."""
WORKS, ABSENT = "works", "–"
REASONS = {
    "PMI": r"cannot join them|process manager", "user": r"shows user \d+ as user",
    "memory": r"memory and processes that they share", "IPv4": r"over IPv4",
    "step": r"PMIX_HOSTNAME=\S+ comes from the step",
}  # fmt: skip
"""The words in the table for what mpiddp refuses, and what its messages say."""
LAUNCHER = "launcher"
"""The word for a launcher that starts no ranks, or whose MPI crashes, before mpiddp can speak."""
BEGIN, END = "<!-- launch matrix: begin -->", "<!-- launch matrix: end -->"
SCRIPT = """
import socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * 10 ** dist.get_rank()
dist.all_reduce(total)
found = f"{dist.get_rank()} {dist.get_world_size()} {int(total)} {socket.gethostname()}"
sys.stdout.write(f"cell {found}\\n")
"""
CONTAINER = """\
# Files, processes, memory and a user of its own; /tmp is shared, since MPI's sockets are there.
root=$(mktemp -d {folder}/root-XXXXXX) && exec unshare --mount --pid --fork --kill-child sh -c '
    root=$0
    mount --rbind / $root && mount --make-rslave $root && mount -t tmpfs none $root/opt &&
    mount -t tmpfs -o mode=1777 none $root/dev/shm && mount -t proc none $root/proc &&
    exec unshare --root=$root --wd="$PWD" --user --map-user=1000 --map-group=1000 "$@"
' "$root" "$@"
"""


@dataclass(frozen=True)
class Cell:
    library: str
    start: str
    network: str
    place: str

    def __str__(self) -> str:
        return f"{LIBRARIES[self.library]}, {self.start}, {self.network}, {self.place}"


def list_cells() -> list[Cell]:
    """All cells; those of one network stand together."""
    parts = itertools.product(NETWORKS, LIBRARIES, STARTS, PLACES)
    return [Cell(library, start, network, place) for network, library, start, place in parts]


def is_here(cell: Cell) -> bool:
    """Whether a cell's library is installed."""
    row = launchers.table().get(cell.library)
    return row is not None and not row.missing()


def is_hopeless(cell: Cell) -> bool:
    """Hydra looks its hosts up over IPv4 alone, and does not end in a step of Slurm's."""
    return cell.library in ("mpich", "impi") and (cell.start, cell.network) == ("mpirun", "IPv6")


@dataclass(frozen=True)
class Outcome:
    word: str
    """WORKS, a word of REASONS, LAUNCHER, or what is wrong."""
    said: str = ""
    """mpiddp's message, or all output."""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.word not in (WORKS, LAUNCHER, *REASONS)


@dataclass(frozen=True)
class Laboratory:
    """A cluster of one network, with SSH."""

    hosts: ssh.Hosts
    folder: Path

    def run(self, cell: Cell) -> Outcome:
        """Start the ranks of a cell, and see what comes of it."""
        if is_hopeless(cell):
            return Outcome(LAUNCHER)
        launcher = replace(launchers.find("alone"), environment=self._make_environment(cell))
        first, *rest = self._make_command(cell)
        with launchers.start(
            launcher, 1, rest, python=first, cwd=self.folder, env={"TMPDIR": self._find_tmp()}
        ) as job:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(LONGEST_SECONDS)
            if job.process.poll() is None:
                return Outcome("hangs", job.result().output, LONGEST_SECONDS)
            try:
                return judge(job.wait())
            except launchers.JobError as error:
                return Outcome("leaves processes behind", str(error))

    def _find_tmp(self) -> str:
        return str(self.hosts.find_tmp("node1"))

    def _make_environment(self, cell: Cell) -> Mapping[str, str]:
        row, cluster = launchers.find(cell.library), self.hosts.cluster
        found = {**cluster.environment(), **row.environment}
        found.pop("HYDRA_IFACE", None)  # Of ranks on one host.
        found["MPIDDP_CLUSTER_DIR"] = str(cluster.directory)
        found["MPIDDP_MPIRUN"] = str(row.mpirun)
        found["MPI4PY_LIBMPI"] = str(row.libmpi)
        found["PATH"] = f"{self.hosts.folder}/bin:{os.environ['PATH']}"
        if cell.place == "container":
            found["MPIDDP_WRAP"] = str(self.folder / "container")
        return found

    def _make_command(self, cell: Cell) -> list[str]:
        python = [sys.executable, "-m", "mpiddp"]
        ranks = [*python, "script.py"]
        if cell.place == "container":
            ranks = [str(self.folder / "container"), *ranks]
        places = ",".join(f"{name}:{ranks}" for name, ranks in NODES.items())
        if cell.start.startswith("srun"):
            own = f"--overlap -N 2 -n {RANKS} --ntasks-per-node 2 -w {','.join(NODES)}"
            words = [*cell.start.split(), *own.split(), *ranks]
        elif cell.start == "mpirun":
            mpirun = find_mpirun(str(launchers.find(cell.library).mpirun))
            line, flag = mpirun.command_on(NODES), mpirun.kind.passes_on
            names = ["PATH", "PYTHONPATH", "MPI4PY_LIBMPI"] if flag else []
            words = [*line, *(word for name in names for word in (flag, name)), *ranks]
        else:
            words = [*python, "-n", str(RANKS), "--hosts", places, "script.py"]
        if cell.place == "step":
            job = f"salloc --quiet -N 2 --ntasks-per-node 2 -w {','.join(NODES)}"
            words = [
                *job.split(), *["srun", "--overlap", "-N", "1", "-n", "1", "-w", "node1"], *words,
            ]  # fmt: skip
        return [str(slurm.COMMANDS / "exec"), "node1", *words]


def judge(result: launchers.Result) -> Outcome:
    """What a user would say of it."""
    everything = repr(result)
    if result.returncode == 0:
        lines = (line.split() for line in result.stdout.splitlines())
        rows = sorted(words[1:] for words in lines if words[:1] == ["cell"])
        is_whole = [row[:3] for row in rows] == [
            [str(rank), str(RANKS), "1" * RANKS] for rank in range(RANKS)
        ] and {row[3] for row in rows} == {*NODES}
        return Outcome(WORKS if is_whole else "is wrong", everything, result.seconds)
    messages = [line for line in facts.messages(result) if not re.match(PASSING, line)]
    if "Traceback" in result.output:
        return Outcome("gives a traceback", everything, result.seconds)
    if len(messages) != 1:
        return Outcome(f"says {len(messages)} things", everything, result.seconds)
    if result.seconds > REFUSAL_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)):
        return Outcome(f"refuses after {result.seconds:.0f} s", everything, result.seconds)
    said = result.stderr[result.stderr.index(messages[0]) :]
    words = [word for word, pattern in REASONS.items() if re.search(pattern, said)]
    return Outcome(words[0] if words else "is refused otherwise", said, result.seconds)


@contextlib.contextmanager
def open_laboratory(network: str) -> Iterator[Laboratory]:
    """A cluster whose machines have these addresses."""
    options = [f"--nodes={slurm.NODES}", f"--cpus={slurm.CPUS}", f"--ip={NETWORKS[network]}"]
    with slurm.bring_up(*options) as cluster, furnish(cluster) as laboratory:
        yield laboratory


@contextlib.contextmanager
def furnish(cluster: slurm.Cluster) -> Iterator[Laboratory]:
    """What cells need on a cluster."""
    with tempfile.TemporaryDirectory(prefix="mpiddp-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "script.py").write_text(SCRIPT)
        write_program(folder / "container", CONTAINER.format(folder=folder))
        (folder / "ssh").mkdir()
        with ssh.open_hosts(cluster, folder / "ssh") as hosts:
            yield Laboratory(hosts, folder)


def make_table(found: Mapping[Cell, str]) -> str:
    """In Markdown; a cell that was not run is ABSENT."""
    columns = [*itertools.product(NETWORKS, PLACES)]
    rows = [["library", "start", *(f"{network}, {place}" for network, place in columns)]]
    rows.append(["---"] * len(rows[0]))
    for library, start in itertools.product(LIBRARIES, STARTS):
        cells = [Cell(library, start, network, place) for network, place in columns]
        own = [found.get(cell, ABSENT) for cell in cells]
        rows.append([LIBRARIES[library], f"`{start}`", *own])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def read_table(text: str) -> dict[Cell, str]:
    """The cells of a document, and their words."""
    _, _, rest = text.partition(BEGIN)
    lines = [line for line in rest.partition(END)[0].splitlines() if line.startswith("|")]
    if not lines:
        return {}
    heads, _, *rows = ([word.strip() for word in line.split("|")[1:-1]] for line in lines)
    keys = {name: key for key, name in LIBRARIES.items()}
    return {
        Cell(keys[name], start.strip("`"), *head.split(", ")): word
        for name, start, *words in rows
        for head, word in zip(heads[2:], words, strict=True)
    }


def describe_versions() -> str:
    """What was run, for the document."""
    kinds = [(name, launchers.table().get(key)) for key, name in LIBRARIES.items()]
    versions = {
        re.sub(r" \d$", "", name) + f" {find_mpirun(str(row.mpirun)).version}": None
        for name, row in kinds
        if row is not None and not row.missing()
    }
    said = launchers.execute("srun", "--version").stdout.split()
    torch = version("torch").partition("+")[0]
    return ", ".join([*versions, f"Slurm {said[-1]}", f"torch {torch}"])


def put_into(path: Path, found: Mapping[Cell, str]) -> None:
    """Write cells into the table of a document."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    day = datetime.date.today()
    head = f"Run on {day.day} {day:%B %Y} with {describe_versions()}:"
    table = make_table(read_table(text) | dict(found))
    content = f"{textwrap.fill(head, 110)}\n\n{table}"
    path.write_text(f"{before}{BEGIN}\n{content}{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", metavar="WORD", nargs="*")
    parser.add_argument("--document", type=Path, metavar="FILE")
    options = parser.parse_args()
    chosen = [cell for cell in list_cells() if all(word in str(cell) for word in options.words)]
    found: dict[Cell, str] = {}
    has_faults = False
    for network, group in itertools.groupby(filter(is_here, chosen), lambda cell: cell.network):
        with open_laboratory(network) as laboratory:
            for cell in group:
                outcome = laboratory.run(cell)
                print(f"{cell}: {outcome.word} ({outcome.seconds:.0f} s)", flush=True)
                has_faults |= outcome.is_fault
                if outcome.is_fault:
                    print(outcome.said, flush=True)
                else:
                    found[cell] = outcome.word
        if options.document is not None:
            put_into(options.document, found)
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
