"""Whether the ranks of a node have enough cores, and no more threads than cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpiddp.doctor.examiner.findings import Finding, describe_range, passed, warned
from mpiddp.launch.device.device import share_cores
from mpiddp.process.cpus import count_shared_cores
from mpiddp.wording import count_noun, fold_numbers

CORES = "cores"
THREADS = "threads"
SHOWN = 8


@dataclass(frozen=True)
class RankCores:
    rank: int
    cores: frozenset[int]
    threads: str | None
    """OMP_NUM_THREADS as the rank found it; None if it was not set."""
    quota: float = math.inf
    """The cores' worth of time that its container has."""


def judge_cores(bindings: Sequence[RankCores]) -> Finding:
    """Whether a node has at least one core for each of its ranks."""
    crowd = find_crowd({binding.rank: binding.cores for binding in bindings})
    everyone = frozenset().union(*(binding.cores for binding in bindings))
    usable = count_shared_cores(*_split(bindings))
    if crowd is None and usable < len(bindings):
        whom = count_noun(len(bindings), "rank")
        return warned(
            CORES,
            f"{whom} have the time of {usable:g} cores between them: the quota of their container",
            "Raise it (docker run --cpus, a pod's limits.cpu), or start fewer ranks per node",
        )
    if crowd is None:
        bound = any(binding.cores != everyone for binding in bindings)
        each = describe_range([len(binding.cores) for binding in bindings])
        count = count_noun(len(everyone), "core")
        whom = count_noun(len(bindings), "rank")
        how = f"bound to {each} each" if bound else "shared by all"
        return passed(CORES, f"{count} for {whom}" + (f", {how}" if len(bindings) > 1 else ""))
    ranks, cores = crowd
    have = f"core{'' if len(cores) == 1 else 's'} {fold_numbers(cores, most=SHOWN)}"
    return warned(
        CORES,
        f"ranks {fold_numbers(ranks, most=SHOWN)} have only {have} between them",
        "Ask for cores for each rank: --cpus-per-task=CORES (and export SRUN_CPUS_PER_TASK: srun "
        "does not inherit it from sbatch), --cpu-bind=cores; or start fewer ranks per node",
    )


def find_crowd(masks: Mapping[int, frozenset[int]]) -> tuple[list[int], list[int]] | None:
    """Ranks that have fewer cores between them than they are, and those cores; None if none.

    A core for every rank is a matching of ranks and cores (Hall 1935, Kuhn 1955): if a rank has
    no augmenting path, its search has met more ranks than cores, and these are returned.
    """
    owners, holdings = dict[int, int](), dict[int, int]()
    """By core, and by rank."""
    for rank in masks:
        reached, path_of = [rank], dict[int, int]()
        core = None
        # Breadth first, and no recursion: a node may hold hundreds of ranks.
        for current in reached:
            new = sorted(masks[current] - path_of.keys())
            path_of |= dict.fromkeys(new, current)
            core = next((each for each in new if each not in owners), None)
            if core is not None:
                break
            reached += [owners[each] for each in new]
        if core is None:
            return sorted(reached), sorted(path_of)
        while core is not None:
            # Back along the path: each rank gives up the core that it has.
            owners[core] = taker = path_of[core]
            freed = holdings.get(taker)
            holdings[taker] = core
            core = freed
    return None


def judge_threads(bindings: Sequence[RankCores]) -> Finding:
    """Whether the threads of all ranks of a node fit its cores."""
    masks, quotas = _split(bindings)
    cores = count_shared_cores(masks, quotas)
    shares = [share_cores(masks, index, quotas) for index in range(len(masks))]
    asked = [_read_threads(binding.threads) for binding in bindings]
    used = [
        share if number is None else number for share, number in zip(shares, asked, strict=True)
    ]
    source = "OMP_NUM_THREADS" if any(n is not None for n in asked) else "mpiddp's choice"
    found = f"{describe_range(used)} per rank ({source})"
    # What mpiddp chooses is at least one for each rank, even if there are fewer cores.
    asks_too_much = any(number > share for number, share in zip(used, shares, strict=True))
    if not asks_too_much or sum(used) <= cores:
        return passed(THREADS, found)
    return warned(
        THREADS,
        f"{found}: {sum(used)} threads of {len(bindings)} ranks on {cores:g} cores",
        f"unset OMP_NUM_THREADS (mpiddp then gives each rank {min(shares)}), or ask for more cores",
    )


def _split(bindings: Sequence[RankCores]) -> tuple[list[frozenset[int]], list[float]]:
    """All ranks' cores, and their quotas."""
    return [binding.cores for binding in bindings], [binding.quota for binding in bindings]


def _read_threads(text: str | None) -> int | None:
    """The outermost level of OMP_NUM_THREADS, which may be a list; None for what is no number."""
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None
