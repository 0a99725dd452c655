"""What Slurm has given this job, and how many ranks and cores that makes on each node.

Slurm says it in the environment and in the job's record (``scontrol show job -d``). `ask` and
`find_lost_hosts` run Slurm's programs; all else here are functions of what was said.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.hostnames import count_noun, expand_hostnames

ANSWER_SECONDS = 10.0
"""How long Slurm may take to answer."""
LOST_STATES = frozenset({"DOWN", "FAIL", "FAILING", "NOT_RESPONDING", "POWERED_DOWN", "UNKNOWN"})


@dataclass(frozen=True)
class Record:
    """A job's record, as far as it counts here."""

    tasks: int | None = None
    gpus_asked: int | None = None
    """GPUs per node that were asked for."""
    gpus: Mapping[str, int] | None = None
    """GPUs that the job has, by host."""
    hosts: tuple[str, ...] = ()
    """Where the job still has nodes: those that failed are left out (``--no-kill``)."""


@dataclass(frozen=True)
class Node:
    """One node of a job."""

    host: str
    cores: int
    """As Slurm counts CPUs."""
    gpus: int = 0


@dataclass(frozen=True)
class Allocation:
    """A job's nodes, and what the user asked Slurm for."""

    nodes: tuple[Node, ...]
    tasks: int | None = None
    tasks_per_node: tuple[int, ...] = ()
    """Where there are ``tasks``."""
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(node.host for node in self.nodes)


@dataclass(frozen=True)
class Request:
    """How many ranks the front was asked for; None where it was not said."""

    ranks: int | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None

    @property
    def is_empty(self) -> bool:
        return self == Request()


@dataclass(frozen=True)
class Layout:
    """Which node runs how many ranks."""

    nodes: tuple[Node, ...]
    ranks_of: tuple[int, ...]
    """For each node."""
    world: int
    """Of ``--ntasks`` beside ``--ntasks-per-node`` less than the sum of ``ranks_of``."""
    cores: int
    """Per rank."""
    note: str = ""
    """Why a rank has fewer cores than were asked for."""
    is_overcommitted: bool = False
    is_slurms: bool = False
    """Whether the ranks per node are those that Slurm has chosen, and needs not be told."""
    is_part: bool = False
    """Whether the job has other nodes, too."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(node.host for node in self.nodes)

    @property
    def gpus_of(self) -> tuple[int, ...]:
        return tuple(node.gpus for node in self.nodes)

    def srun_options(self) -> list[str]:
        """What tells srun nodes, ranks and GPUs."""
        words = [f"--nodes={len(self.nodes)}", f"--ntasks={self.world}"]
        if not self.is_slurms and _are_equal(self.ranks_of):
            words.append(f"--ntasks-per-node={self.ranks_of[0]}")
            words += [f"--nodelist={','.join(self.hosts)}"] if self.is_part else []
        elif not self.is_slurms:
            # Slurm spreads tasks by cores, unless each rank's node is named.
            places = zip(self.hosts, self.ranks_of, strict=True)
            names = [host for host, ranks in places for _ in range(ranks)]
            words += ["--distribution=arbitrary", f"--nodelist={','.join(names)}"]
        # Not --gpus-per-task, nor --gpu-bind: a rank must see its neighbours' GPUs, as NCCL does.
        total = sum(self.gpus_of)
        if total and _are_equal(self.gpus_of):
            words.append(f"--gpus-per-node={self.gpus_of[0]}")
        elif total:
            words.append(f"--gpus={total}")
        return [*words, *(["--overcommit"] if self.is_overcommitted else [])]

    def describe_ranks(self) -> str:
        """``2 nodes x 4 ranks per node = 8 ranks``."""
        nodes, ranks = count_noun(len(self.nodes), "node"), count_noun(self.world, "rank")
        each = count_noun(self.ranks_of[0], "rank")
        if sum(self.ranks_of) != self.world:
            return f"{nodes}, at most {each} per node, {ranks}"
        if _are_equal(self.ranks_of):
            return f"{nodes} x {each} per node = {ranks}"
        return f"{nodes}, {'+'.join(map(str, self.ranks_of))} = {ranks}"

    def describe_cores(self) -> str:
        """``2 cores``, and why not more."""
        return count_noun(self.cores, "core") + (f" ({self.note})" if self.note else "")

    def describe_gpus(self) -> str:
        """``2 per node, …``, or ``none``."""
        total = sum(self.gpus_of)
        if not total:
            return "none"
        if _are_equal(self.gpus_of):
            return f"{self.gpus_of[0]} per node, each rank sees all of its node's"
        return f"{'+'.join(map(str, self.gpus_of))} = {total}, each rank sees all of its node's"


def _are_equal(values: Sequence[int]) -> bool:
    return len(set(values)) == 1


# What Slurm says


def ask(*command: str) -> str:
    """What a program of Slurm's prints. Raises ConfigurationError where it does not answer."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"Slurm gave no answer within {ANSWER_SECONDS:g} s ({' '.join(command)}): is slurmctld "
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

    Raises ConfigurationError where they contradict each other.
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
    gpus = [_choose_gpus(record, host, on_node) for host in hosts]
    return Allocation(
        nodes=tuple(Node(*each) for each in zip(hosts, cores, gpus, strict=True)),
        tasks=tasks,
        tasks_per_node=expand_counts(variables.get(environment.SLURM_TASKS_PER_NODE, "")),
        cpus_per_task=read_number(environment.SLURM_CPUS_PER_TASK, variables),
        cpus_per_gpu=read_number(environment.SLURM_CPUS_PER_GPU, variables),
    )


def _choose_gpus(record: Record, host: str, on_node: int) -> int:
    # With --exclusive a job has all of a node's GPUs, whatever it asked for.
    if record.gpus_asked is not None:
        return record.gpus_asked
    return (record.gpus or {}).get(host, on_node)


def read_number(name: str, variables: Mapping[str, str]) -> int | None:
    """A variable of Slurm's. Raises ConfigurationError where it holds no whole number."""
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

    Empty where Slurm does not answer.
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


# What is made of it


def choose_layout(allocation: Allocation, request: Request, without: Sequence[str] = ()) -> Layout:
    """Choose ranks and cores for the nodes that are not to be left ``without``.

    What ``request`` says counts, then what Slurm was asked for; else there is one rank per GPU, or
    one per node where there are none. Raises ConfigurationError where that is not possible.
    """
    if not request.is_empty:
        nodes, ranks_of = _distribute(allocation, request, without)
        return _add_cores(allocation, nodes, ranks_of, sum(ranks_of), is_slurms=False)
    tasks, given = allocation.tasks, allocation.tasks_per_node
    if tasks is None:
        total = sum(node.gpus for node in allocation.nodes)
        given = tuple(node.gpus if total else 1 for node in allocation.nodes)
        world = sum(given)
    else:
        world = tasks
    kept = [
        (node, ranks)
        for node, ranks in zip(allocation.nodes, given, strict=False)
        if node.host not in without
    ]
    nodes, ranks_of = tuple(node for node, _ in kept), tuple(ranks for _, ranks in kept)
    is_whole = len(nodes) == len(allocation.nodes)
    world = world if is_whole else min(world, sum(ranks_of))
    return _add_cores(allocation, nodes, ranks_of, world, is_slurms=tasks is not None and is_whole)


def _distribute(
    allocation: Allocation, request: Request, without: Sequence[str]
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    there = [node for node in allocation.nodes if node.host not in without]
    if request.nodes is not None and request.nodes > len(allocation.nodes):
        raise ConfigurationError(
            f"--nodes {request.nodes}, but this job has {count_noun(len(allocation.nodes), 'node')}"
        )
    nodes = tuple(there[: request.nodes])
    per_node = request.ranks_per_node
    if per_node is not None:
        ranks_of = [per_node] * len(nodes)
        if request.ranks is not None and request.ranks != sum(ranks_of) and not without:
            raise ConfigurationError(
                f"-n {request.ranks}, but --ranks-per-node {per_node} on "
                f"{count_noun(len(nodes), 'node')} is {sum(ranks_of)}: leave one of them out"
            )
    elif request.ranks is None:
        gpus = sum(node.gpus for node in nodes)
        ranks_of = [node.gpus if gpus else 1 for node in nodes]
    else:
        # Without some nodes, as many fewer ranks.
        usual = request.nodes or len(allocation.nodes)
        ranks_of = _spread(max(1, request.ranks * len(nodes) // usual), nodes)
    for node, ranks in zip(nodes, ranks_of, strict=True):
        if ranks > node.cores:
            raise ConfigurationError(_too_many(sum(ranks_of), nodes))
    return nodes, tuple(ranks_of)


def _too_many(ranks: int, nodes: Sequence[Node]) -> str:
    cores = "+".join(str(node.cores) for node in nodes)
    return (
        f"{count_noun(ranks, 'rank')} are more than this job's slots ({cores} cores on "
        f"{count_noun(len(nodes), 'node')}): ask Slurm for more with --cpus-per-task or --ntasks, "
        "or start fewer"
    )


def _spread(ranks: int, nodes: Sequence[Node]) -> list[int]:
    """As evenly as the nodes' GPUs allow, or their cores where there are too few GPUs."""
    gpus = [node.gpus for node in nodes]
    room = gpus if ranks <= sum(gpus) else [node.cores for node in nodes]
    if ranks > sum(room):
        raise ConfigurationError(_too_many(ranks, nodes))
    found = [0] * len(nodes)
    for _ in range(ranks):
        free = [at for at in range(len(nodes)) if found[at] < room[at]]
        found[min(free, key=lambda at: found[at])] += 1
    return found


def _add_cores(
    allocation: Allocation,
    nodes: tuple[Node, ...],
    ranks_of: tuple[int, ...],
    world: int,
    *,
    is_slurms: bool,
) -> Layout:
    """As many cores per rank as were asked for and each node has, on the nodes that have ranks."""
    used = [(node, ranks) for node, ranks in zip(nodes, ranks_of, strict=False) if ranks]
    if not used:
        raise ConfigurationError("no node of this job is left to start ranks on")
    nodes, ranks_of = tuple(node for node, _ in used), tuple(ranks for _, ranks in used)
    fitting = min(node.cores // ranks for node, ranks in used)
    wanted = allocation.cpus_per_task
    if wanted is None and allocation.cpus_per_gpu:
        wanted = min(allocation.cpus_per_gpu * node.gpus // ranks for node, ranks in used)
    cores, note = wanted if wanted is not None else fitting, ""
    if cores > fitting:
        note = f"{cores} cores for each rank were asked for, {fitting} are there"
        cores = fitting
    if cores < 1:
        note = "there are fewer cores than ranks"
    if note and allocation.tasks is None:
        note += "; --cpus-per-gpu=N gives every GPU's rank N cores"
    is_part = len(nodes) < len(allocation.nodes)
    return Layout(nodes, ranks_of, world, max(cores, 1), note, cores < 1, is_slurms, is_part)
