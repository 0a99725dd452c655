"""What Slurm has given this job, from its environment and its record (``scontrol show job -d``).

`ask` and `find_lost_hosts` run Slurm's programs; the other functions read what these have printed.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.hostnames import expand_hostnames
from mpiddp.wording import count_noun

ANSWER_SECONDS = 100.0
"""How long Slurm may take to answer. Its own programs wait for a busy slurmctld for MessageTimeout:
10 s by default, and at most this long without a warning of Slurm's."""
PAUSE_SECONDS = 1.0
"""Before it is asked again."""
_BUSY = re.compile("Socket timed out|Unable to contact slurm controller|Zero Bytes were")
"""What its programs say of a slurmctld that may answer later."""
LOST_STATES = frozenset({"DOWN", "FAIL", "FAILING", "NOT_RESPONDING", "POWERED_DOWN", "UNKNOWN"})


@dataclass(frozen=True)
class Record:
    """A job's record, as far as it counts here."""

    tasks: int | None = None
    gpus_per_node: int | None = None
    """As the job asked for them; None if it did not."""
    gpus: Mapping[str, int] | None = None
    """GPUs that the job has, by host."""
    hosts: tuple[str, ...] = ()
    """The job's nodes, without those that have failed (``--no-kill``)."""


@dataclass(frozen=True)
class Node:
    """One node of a job."""

    host: str
    cores: int
    """As Slurm counts CPUs."""
    gpus: int = 0
    slots: int = 0
    """Ranks that a list of hosts gives it; Slurm says none."""


@dataclass(frozen=True)
class Allocation:
    """A job's nodes, and what the user asked Slurm for."""

    nodes: tuple[Node, ...]
    tasks: int | None = None
    tasks_per_node: tuple[int, ...] = ()
    """Empty if ``tasks`` is None."""
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    hint: str = "ask Slurm for more with --cpus-per-task or --ntasks"
    """How a user gets room for more ranks."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(node.host for node in self.nodes)


def ask(*command: str, seconds: float = ANSWER_SECONDS) -> str:
    """What a program of Slurm's prints. Raises ConfigurationError if it does not answer."""
    end = time.monotonic() + seconds
    try:
        while True:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                errors="replace",
                timeout=max(0.0, end - time.monotonic()),
                check=False,
            )
            is_busy = done.returncode != 0 and _BUSY.search(done.stderr) is not None
            if not is_busy or time.monotonic() + PAUSE_SECONDS > end:
                break
            time.sleep(PAUSE_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"Slurm gave no answer within {seconds:g} s ({' '.join(command)}): is slurmctld "
            "up? try again, or ask your administrator"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigurationError(
            f"Slurm does not answer about this job ({' '.join(command)}): {said}"
        )
    return done.stdout


def read_record(text: str, job: str) -> Record:
    """Read what ``scontrol show job -d JOB`` printed; an array's first task shows its siblings."""
    blocks = re.split(r"\n\s*\n", text)
    block = next((each for each in blocks if f"{each} ".startswith(f"JobId={job} ")), "")
    tasks, asked = None, None
    gpus: dict[str, int] = {}
    hosts: tuple[str, ...] = ()
    for line in map(str.strip, block.splitlines()):
        if match := re.match(r"NumNodes=\S+ .*\bNumTasks=(\d+)", line):
            tasks = int(match[1]) or None
        elif line.startswith("TresPerNode="):
            asked = read_gpus(line.partition("=")[2]) or None
        elif line.startswith("NodeList="):
            hosts = _expand_hosts(line.partition("=")[2])
        elif match := re.match(r"Nodes=(\S+) .*\bGRES=(.*)", line):
            gpus.update(dict.fromkeys(_expand_hosts(match[1]), read_gpus(match[2])))
    return Record(tasks, asked, gpus, hosts)


def _expand_hosts(text: str) -> tuple[str, ...]:
    return () if text.strip() in ("", "(null)") else expand_hostnames(text)


def read_gpus(text: str) -> int:
    """GPUs of ``gpu:2(IDX:0-1)``, ``gres:gpu:2``, ``gres/gpu:a100:2,gres/gpu:h100=1``."""
    total = 0
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = re.split(r"[:=]", re.sub(r"^gres[:/]", "", part.strip()))
        if words[0] == "gpu":
            total += int(words[-1]) if words[-1].isdigit() else 1
    return total


def expand_counts(text: str) -> tuple[int, ...]:
    """``4(x2),1`` becomes 4, 4, 1."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(f"Slurm counts as in 4(x2),1, but said {text!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def read_allocation(record: Record, variables: Mapping[str, str]) -> Allocation:
    """Put together what the record and the environment say.

    Raises ConfigurationError if they contradict each other.
    """
    components = read_number(environment.SLURM_HETEROGENEOUS_SIZE, variables) or 1
    if components > 1:
        raise ConfigurationError(
            "ranks are started in one component of a job only, and this one has "
            f"{components}; submit it as one component"
        )
    tasks = read_number(environment.SLURM_JOB_TASKS, variables)
    if None not in (tasks, record.tasks) and tasks != record.tasks:
        raise ConfigurationError(
            f"SLURM_NTASKS is {tasks}, but Slurm gave this job {record.tasks} tasks: left over "
            "from the shell that submitted it; unset it there, or give --ntasks"
        )
    hosts = _expand_hosts(variables.get(environment.SLURM_JOB_NODES, ""))
    cores = expand_counts(variables.get(environment.SLURM_JOB_CORES, ""))
    if not hosts or len(hosts) != len(cores):
        raise ConfigurationError(
            f"{environment.SLURM_JOB_NODES} names {count_noun(len(hosts), 'node')} and "
            f"{environment.SLURM_JOB_CORES} the cores of {len(cores)}: start this in a shell "
            "without variables of another job"
        )
    on_node = read_number(environment.SLURM_GPUS_ON_NODE, variables) or 0
    # With --exclusive a job has all of a node's GPUs, whatever it asked for.
    asked, found = record.gpus_per_node, record.gpus or {}
    gpus = [found.get(host, on_node) if asked is None else asked for host in hosts]
    return Allocation(
        nodes=tuple(Node(*each) for each in zip(hosts, cores, gpus, strict=True)),
        tasks=tasks,
        tasks_per_node=expand_counts(variables.get(environment.SLURM_TASKS_PER_NODE, "")),
        cpus_per_task=read_number(environment.SLURM_CPUS_PER_TASK, variables),
        cpus_per_gpu=read_number(environment.SLURM_CPUS_PER_GPU, variables),
    )


def read_number(name: str, variables: Mapping[str, str]) -> int | None:
    """A variable of Slurm's. Raises ConfigurationError if it holds no whole number."""
    text = variables.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigurationError(
            f"{name} is {text!r}, but Slurm sets it to a whole number: left over from the shell "
            "that submitted this job; unset it there"
        )
    return int(text)


def find_lost_hosts(hosts: Sequence[str], job: str) -> set[str]:
    """Those of a job's hosts that Slurm has taken from it, or knows to be down.

    Empty if Slurm does not answer.
    """
    try:
        record = read_record(ask("scontrol", "show", "job", "-d", job), job)
        states = read_states(ask("scontrol", "--oneliner", "show", "node", ",".join(hosts)))
    except ConfigurationError:
        return set()
    taken = set(hosts) - set(record.hosts) if record.hosts else set()
    return taken | {host for host in hosts if states.get(host, frozenset()) & LOST_STATES}


def read_states(text: str) -> dict[str, frozenset[str]]:
    """The states of each node in what ``scontrol --oneliner show node`` printed."""
    found = re.findall(r"^NodeName=(\S+) .*?\bState=(\S+)", text, re.MULTILINE)
    # An asterisk at the end of a state: the node does not respond.
    return {
        host: frozenset(states.replace("*", "+NOT_RESPONDING").split("+")) for host, states in found
    }
