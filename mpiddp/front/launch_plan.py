"""How the ranks are started: by which launcher, with which options and variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.front.allocation import Allocation, Node, ask, read_allocation, read_number, read_record
from mpiddp.front.hosts import schedulers
from mpiddp.front.hosts.agents import find_agent
from mpiddp.front.hosts.reachability import Answers, Question, ask_hosts, is_own
from mpiddp.front.job_layout import JobLayout, choose_layout
from mpiddp.front.mpi_library import choose_pmi
from mpiddp.launch.device.visibility import count_gpus
from mpiddp.launch.launcher.host_list import Host, HostList
from mpiddp.launch.launcher.programs import (
    OTHER,
    SRUN,
    SRUN_FIXED,
    LauncherKind,
    Mpirun,
    fill_hosts,
    find_mpirun,
    find_program,
    with_home,
)
from mpiddp.launch.script.front_options import NONE, FrontOptions, LayoutRequest, split_words
from mpiddp.process import cpus
from mpiddp.wording import count_noun

RANKS_PER_CORE = 64
"""The most on this machine. Beyond it, -n is more likely a slip than an experiment."""
FLUX_NOTE = (
    "python -m mpiddp starts ranks on one node of a Flux job; for more, type: "
    "flux run -N NODES -n {} python -m mpiddp SCRIPT"
)
"""Flux lists its nodes in no variable, and starts their processes itself."""


@dataclass(frozen=True)
class LaunchPlan:
    """A launcher's command line without the program, and what its environment must have."""

    kind: LauncherKind
    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """To be set: those that the user has not set, and those that mpiddp must decide."""
    unset: tuple[str, ...] = ()
    layout: JobLayout | None = None
    """In an allocation."""
    ranks: int | None = None
    """None if the program starts its ranks itself."""
    note: str = ""
    """What is worth telling before the ranks start; empty if all is as usual."""
    is_over_ssh: bool = False
    """Whether ranks are on hosts that neither Slurm nor this process's own machine gives."""

    def make_words(self, variables: Mapping[str, str]) -> list[str]:
        """The command line, with what hands ``variables`` on to ranks of other hosts."""
        words, flag = list(self.words), self.kind.passes_on
        if not self.is_over_ssh or not flag:
            return words
        names = [name for name in sorted(variables) if environment.is_of_job(name)]
        at = words.index("-n")
        return [*words[:at], *(word for name in names for word in (flag, name)), *words[at:]]

    def environment(self) -> dict[str, str]:
        """This process's environment with what the launcher needs."""
        kept = {name: value for name, value in os.environ.items() if name not in self.unset}
        return with_home({**kept, **self.variables})

    def describe(self, program: Sequence[str]) -> str:
        """One line that starts ``program`` in the same way when it is pasted into a shell."""
        unset = [word for name in self.unset if name in os.environ for word in ("-u", name)]
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        prefix = ["env", *unset, *settings] if unset or settings else []
        return shlex.join([*prefix, *self.make_words(self.environment()), *program])


def is_in_allocation(variables: Mapping[str, str]) -> bool:
    """Whether this process belongs to a Slurm job."""
    return environment.is_set((environment.SLURM_JOB_ID,), variables)


def find_hosts(request: FrontOptions) -> HostList | None:
    """The hosts that the user or a scheduler other than Slurm names; None: this machine or Slurm.

    Raises ConfigurationError if they cannot be read, or cannot be used here.
    """
    what = "--hosts" if request.hosts is not None else "--hostfile"
    if request.hosts is None and request.hostfile is None:
        is_open = request.launcher != NONE and not is_in_allocation(os.environ)
        return _find_scheduled(request) if is_open else None
    if request.launcher in (NONE, "srun") or is_in_allocation(os.environ):
        reason = "a Slurm job's ranks are on its own nodes"
        if request.launcher == NONE:
            reason = "with --launcher none the program starts its ranks itself"
        raise ConfigurationError(f"{what} names machines for mpirun, but {reason}: leave it out")
    if request.hosts is not None:
        return request.hosts
    assert request.hostfile is not None
    return HostList(schedulers.read_file(request.hostfile, "--hostfile"), "--hostfile")


def _find_scheduled(request: LayoutRequest) -> HostList | None:
    """The hosts of a scheduler. A list that cannot be read is left over from another job, or is
    outside of a container: a number of ranks alone needs none, and is of this machine then.
    """
    try:
        return schedulers.find_hosts()
    except ConfigurationError as error:
        if request.ranks is None or (request.nodes, request.ranks_per_node) != (None, None):
            raise ConfigurationError(
                f"{error}; -n N alone starts N ranks on this machine"
            ) from None
        note = f"{error}: all ranks are on this machine"
        return HostList((Host("localhost", request.ranks),), "-n", note=note)


def make_plan(
    request: FrontOptions, without: Sequence[str] | None = None, question: Question | None = None
) -> LaunchPlan:
    """Choose how ranks are started from this process.

    Args:
        request: what the front was asked for.
        without: for a restart, the hosts of the job that are not to be used.
        question: what hosts that are reached over SSH are asked before; None: nothing.

    Raises ConfigurationError if there is no such launcher, or the request cannot be fulfilled.
    """
    inside, launcher = is_in_allocation(os.environ), request.launcher
    options = split_words("--launcher-options", request.launcher_options)
    hosts = find_hosts(request)
    _check_restarts(request, inside or hosts is not None)
    if hosts is not None:
        return _plan_hosts(request, hosts, options, without, question)
    if launcher == NONE:
        return _plan_none(request, options)
    if not inside and launcher == "srun":
        raise ConfigurationError(
            "--launcher srun starts ranks inside an allocation, and this shell has none: submit "
            "jobs/run.sbatch, or get one with salloc"
        )
    is_flux = environment.is_set((environment.FLUX_BROKER,))
    if not inside and (request.nodes is not None or request.ranks_per_node is not None):
        what = "--nodes" if request.nodes is not None else "--ranks-per-node"
        if is_flux:
            raise ConfigurationError(f"{what}: {FLUX_NOTE.format('RANKS')}")
        raise ConfigurationError(
            f"{what} counts the nodes of a job, and this shell is in none of a scheduler's: leave "
            "it out to start ranks on this machine, submit a job, or name machines with --hosts"
        )
    if not inside:
        plan = _plan_machine(request, _find_mpirun(launcher), options)
        return replace(plan, note=FLUX_NOTE.format(plan.ranks)) if is_flux else plan
    job = os.environ[environment.SLURM_JOB_ID]
    record = read_record(ask("scontrol", "show", "job", "-d", job), job)
    layout = choose_layout(read_allocation(record, os.environ), request, without or ())
    srun = find_program("srun") if launcher in ("auto", "srun") else None
    if launcher == "srun" and srun is None:
        raise ConfigurationError("there is no srun in PATH; --launcher mpirun uses your MPI's own")
    if srun is not None:
        return _plan_srun(layout, options, without)
    return _plan_mpirun(_find_mpirun(launcher), layout, options)


def _find_mpirun(launcher: str) -> Mpirun:
    return find_mpirun(None if launcher in ("auto", "mpirun") else launcher)


def _plan_mpirun(mpirun: Mpirun, layout: JobLayout, options: Sequence[str]) -> LaunchPlan:
    """Ranks on several hosts."""
    places = dict(zip(layout.hosts, layout.ranks_of, strict=True))
    words = _insert(mpirun.command_on(places), options)
    inside, kind = is_in_allocation(os.environ), mpirun.kind
    if inside and kind.fills_hosts and len(fill_hosts(places)[1]) > len(places):
        raise ConfigurationError(
            f"{kind.name}'s {kind.program} cannot give different numbers of ranks to the nodes of "
            "a Slurm job: take --launcher srun, or as many on each (--ranks-per-node N)"
        )
    wanted = {**kind.on_hosts_variables, **(kind.in_slurm_variables if inside else {})}
    found = {name: value for name, value in wanted.items() if name not in os.environ}
    found |= {environment.MPI4PY_LIBRARY: str(mpirun.library)} if mpirun.library else {}
    # Other hosts would look for mpirun at their own loopback address.
    name = environment.HYDRA_INTERFACE
    is_loopback = len(places) > 1 and os.environ.get(name) == kind.local.get(name, "")
    unset = (name,) if is_loopback else ()
    return LaunchPlan(kind, words, found, unset, layout, layout.world)


def _plan_hosts(
    request: FrontOptions,
    listed: HostList,
    options: Sequence[str],
    without: Sequence[str] | None,
    question: Question | None,
) -> LaunchPlan:
    """Ask the hosts, if need be, and divide the ranks. Hosts that a restart lost stay out.

    This machine alone needs neither SSH nor a question.
    """
    mpirun, names = _find_mpirun(request.launcher), [host.name for host in listed.hosts]
    # An MPI that is not known reads its scheduler's list itself, as HPE's does.
    reads_list = not (listed.is_firm or mpirun.kind.on_hosts)
    is_here = reads_list or all(map(is_own, names))
    agent = find_agent(mpirun.kind, options)
    lost, told, note = {*(without or ())}, dict[str, str](), ""
    cores = cpus.count_cores() * (1 if listed.is_firm else RANKS_PER_CORE)
    found: Mapping[str, Mapping[str, Any]] = {}
    if is_here:
        own = {"gpus": count_gpus(), "cores": cores}
        found = dict.fromkeys(names, own)
    elif question is not None:
        hosts = [name for name in names if name not in lost]
        asked = replace(question, agent=agent, needs_room=mpirun.kind.has_session)
        answers = _ask(hosts, asked, request, is_restart=without is not None)
        told = {environment.ASKED_HOSTS: answers.encode()} if question.is_examination else {}
        if request.preflight and answers.problems and without is None:
            note = f"{answers.describe_problems()}\n  with --preflight they are left out"
        lost, found = lost | {*answers.problems}, answers.found
    nodes = tuple(_make_node(host, found.get(host.name, {}), listed) for host in listed.hosts)
    allocation = Allocation(
        nodes=nodes,
        tasks=sum(node.slots for node in nodes),
        tasks_per_node=tuple(node.slots for node in nodes),
        hint=f"give more with HOST:N in {listed.name}" if listed.is_firm else "ask it for more",
    )
    layout = choose_layout(allocation, request, [*lost])
    # mpirun would look for these hosts in its own file, and find others.
    files = (*environment.OPEN_MPI_HOST_FILES, *environment.HYDRA_HOST_FILES)
    unset = () if reads_list else files
    if is_here:
        plan = _plan_machine(replace(request, ranks=layout.world), mpirun, options)
        return replace(plan, unset=unset, note=listed.note or plan.note)
    plan = _plan_mpirun(mpirun, layout, options)
    variables = {**plan.variables, **told, **agent.variables}
    unset = (*plan.unset, *unset)
    return replace(plan, variables=variables, unset=unset, note=note, is_over_ssh=True)


def _ask(
    hosts: Sequence[str], question: Question, request: FrontOptions, *, is_restart: bool
) -> Answers:
    """Raises ConfigurationError if one cannot take part, and it is not to be left out."""
    answers = ask_hosts(hosts, question)
    fewest = 1 if question.is_examination else request.min_nodes or request.nodes or len(hosts)
    is_enough = len(hosts) - len(answers.problems) >= fewest
    leaves_out = is_enough and (question.is_examination or request.preflight)
    if not (is_restart or leaves_out):
        answers.check()
    return answers


def _make_node(host: Host, answer: Mapping[str, Any], listed: HostList) -> Node:
    """One rank per GPU of a host, else one per core, if the list does not say."""
    gpus, cores = int(answer.get("gpus") or 0), int(answer.get("cores") or 1)
    slots = host.slots or gpus or cores
    if answer and slots > cores * RANKS_PER_CORE:
        raise ConfigurationError(
            f"{listed.name}: {slots} on {host.name} are more than {RANKS_PER_CORE} ranks per core: "
            f"it has {count_noun(cores, 'core')}, so give it at most {cores * RANKS_PER_CORE}"
        )
    most = slots if listed.is_firm else max(slots, cores)
    return Node(host.name, most, min(gpus, most), slots)


def _check_restarts(request: FrontOptions, inside: bool) -> None:
    """Raise ConfigurationError for an option about restarts that would have no effect."""
    if request.preflight and request.launcher == NONE:
        raise ConfigurationError(
            "--preflight examines the nodes of ranks that are started here, and with --launcher "
            "none the program starts its own: leave it out"
        )
    if request.min_nodes is not None and request.launcher == NONE:
        raise ConfigurationError(
            "--min-nodes counts the nodes that have ranks, and with --launcher none the program "
            "chooses them: leave it out"
        )
    if request.min_nodes is not None and not inside:
        raise ConfigurationError(
            "--min-nodes counts the nodes of a job, and this shell is in none of a scheduler's: "
            "leave it out, or name machines with --hosts"
        )
    for name in ("restart_window", "min_nodes"):
        has_effect = request.restarts or (request.preflight and name == "min_nodes")
        if getattr(request, name) is not None and not has_effect:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} has no effect without restarts: add --restarts N, or "
                "leave it out"
            )


def _insert(words: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """The user's options stand before the number of ranks, after those of the table.

    They replace the table's own: Open MPI refuses a policy that is given twice.
    """
    kept, given = list(words), {word.partition("=")[0] for word in options}
    for policy in ("--map-by", "--bind-to"):
        if policy in given and policy in kept:
            at = kept.index(policy)
            del kept[at : at + 2]
    at = kept.index("-n")
    return (*kept[:at], *options, *kept[at:])


def _plan_none(request: LayoutRequest, options: Sequence[str]) -> LaunchPlan:
    if not request.is_empty:
        raise ConfigurationError(
            "--launcher none is for a program that starts its ranks itself: leave out -n, --nodes "
            "and --ranks-per-node, and give their numbers to the program"
        )
    if options:
        raise ConfigurationError("--launcher-options needs a launcher, and --launcher is none")
    # The srun that it starts takes them from there.
    cores = read_number(environment.SLURM_CPUS_PER_TASK, os.environ)
    return LaunchPlan(OTHER, (), {environment.SRUN_CPUS_PER_TASK: str(cores)} if cores else {})


def _plan_machine(request: LayoutRequest, mpirun: Mpirun, options: Sequence[str]) -> LaunchPlan:
    slots = cpus.count_cores()
    ranks = request.ranks or count_gpus() or slots
    if ranks > slots * RANKS_PER_CORE:
        raise ConfigurationError(
            f"-n {ranks} is more than {RANKS_PER_CORE} ranks per core: this process may use "
            f"{count_noun(slots, 'core')}, so start at most {slots * RANKS_PER_CORE}"
        )
    wanted = mpirun.variables(ranks)
    found = {name: value for name, value in wanted.items() if name not in os.environ}
    library = f" with {mpirun.library}" if mpirun.library is not None else ""
    note = "" if mpirun.is_own else f"using {mpirun.program}{library}"
    return LaunchPlan(
        mpirun.kind, _insert(mpirun.command(ranks, ()), options), found, ranks=ranks, note=note
    )


def _plan_srun(
    layout: JobLayout, options: Sequence[str], without: Sequence[str] | None
) -> LaunchPlan:
    excluded = [f"--exclude={','.join(without)}"] if without else []
    if without is not None:
        # A step holds all of its nodes until Slurm has given up the one that does not answer.
        excluded.append("--overlap")
    words = (
        "srun",
        f"--mpi={choose_pmi(os.environ)}",
        *SRUN_FIXED,
        *layout.srun_options(),
        *excluded,
        *options,
    )
    most = () if layout.is_from_slurm else (environment.SLURM_MOST_TASKS_PER_NODE,)
    unset = (*environment.SLURM_CONTRADICTING, *most)
    cores = {environment.SRUN_CPUS_PER_TASK: str(layout.cores)}
    return LaunchPlan(SRUN, words, cores, unset, layout, layout.world)
