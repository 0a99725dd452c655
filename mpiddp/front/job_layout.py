"""Which node of a job runs how many ranks, with how many cores for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpiddp.errors import ConfigurationError
from mpiddp.front.allocation import Allocation, Node
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.script.front_options import LayoutRequest
from mpiddp.wording import count_noun


@dataclass(frozen=True)
class JobLayout:
    """Which node runs how many ranks."""

    nodes: tuple[Node, ...]
    ranks_of: tuple[int, ...]
    """For each node."""
    world: int
    """Ranks in all; fewer than ``ranks_of`` if Slurm was given --ntasks-per-node, too."""
    cores: int
    """Per rank."""
    note: str
    """Why a rank has fewer cores than were asked for."""
    is_overcommitted: bool
    is_from_slurm: bool
    """Whether the ranks per node are Slurm's own choice, so that srun is not told them."""
    is_part: bool
    """Whether the job has other nodes, too."""
    spares: tuple[str, ...] = ()
    """Hosts without ranks, which take the place of one that a restart leaves out."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(node.host for node in self.nodes)

    @property
    def gpus_of(self) -> tuple[int, ...]:
        return tuple(node.gpus for node in self.nodes)

    def srun_options(self) -> list[str]:
        """What tells srun nodes, ranks and GPUs."""
        words = [f"--nodes={len(self.nodes)}", f"--ntasks={self.world}"]
        if not self.is_from_slurm and _are_equal(self.ranks_of):
            words.append(f"--ntasks-per-node={self.ranks_of[0]}")
            words += [f"--nodelist={','.join(self.hosts)}"] if self.is_part else []
        elif not self.is_from_slurm:
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

    def describe_spares(self) -> str:
        """``n[4-5]``; empty without such hosts."""
        return fold_hostnames(self.spares)

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


def choose_layout(
    allocation: Allocation, request: LayoutRequest, without: Sequence[str] = ()
) -> JobLayout:
    """Choose ranks and cores for the nodes that are not to be left ``without``.

    What ``request`` says counts, then what Slurm was asked for; else there is one rank per GPU, or
    one per node if there are none. Raises ConfigurationError if that is not possible.
    """
    layout = _choose_ranks(allocation, request, without)
    used = {*layout.hosts, *without}
    return replace(layout, spares=tuple(h for h in allocation.hosts if h not in used))


def _choose_ranks(
    allocation: Allocation, request: LayoutRequest, without: Sequence[str]
) -> JobLayout:
    if not request.is_empty:
        nodes, ranks_of = _distribute(allocation, request, without)
        return _add_cores(allocation, nodes, ranks_of, sum(ranks_of), is_from_slurm=False)
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
    return _add_cores(
        allocation, nodes, ranks_of, world, is_from_slurm=tasks is not None and is_whole
    )


def _distribute(
    allocation: Allocation, request: LayoutRequest, without: Sequence[str]
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    there = [node for node in allocation.nodes if node.host not in without]
    if request.nodes is not None and request.nodes > len(allocation.nodes):
        raise ConfigurationError(
            f"--nodes {request.nodes}, but this job has "
            f"{count_noun(len(allocation.nodes), 'node')}: choose at most so many, or get more"
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
        ranks_of = [node.slots or (node.gpus if gpus else 1) for node in nodes]
    else:
        # Without some nodes, as many fewer ranks, unless others are there that had none.
        usual = min(request.nodes or len(allocation.nodes), request.ranks)
        ranks = max(1, request.ranks * min(len(nodes), usual) // usual)
        if without:
            ranks = min(ranks, sum(node.cores for node in nodes))
        ranks_of = _spread(ranks, nodes, allocation.hint)
    for node, ranks in zip(nodes, ranks_of, strict=True):
        if ranks > node.cores:
            raise ConfigurationError(_explain_too_many(sum(ranks_of), nodes, allocation.hint))
    return nodes, tuple(ranks_of)


def _explain_too_many(ranks: int, nodes: Sequence[Node], hint: str) -> str:
    cores = "+".join(str(node.cores) for node in nodes)
    return (
        f"{count_noun(ranks, 'rank')} are more than this job's slots ({cores} on "
        f"{count_noun(len(nodes), 'node')}): {hint}, or start fewer"
    )


def _spread(ranks: int, nodes: Sequence[Node], hint: str) -> list[int]:
    """As evenly as the nodes' GPUs allow, or their cores if there are too few GPUs."""
    gpus = [node.gpus for node in nodes]
    room = gpus if ranks <= sum(gpus) else [node.cores for node in nodes]
    if ranks > sum(room):
        raise ConfigurationError(_explain_too_many(ranks, nodes, hint))
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
    is_from_slurm: bool,
) -> JobLayout:
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
    return JobLayout(nodes, ranks_of, world, max(cores, 1), note, cores < 1, is_from_slurm, is_part)
