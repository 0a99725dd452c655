"""Which launcher started this process: recorded, mixed, contradicting; and lists of hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp import environment
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher.hostnames import expand_hostnames, fold_hostnames, is_host
from mpiddp.launch.launcher.launcher import (
    find_launcher,
    has_manager_hint,
    is_first,
    tasks_of_allocation,
)
from mpiddp.wording import fold_numbers


def _read(text):
    """Variables as ``env`` prints them."""
    return dict(each.split("=", 1) for each in text.split())


# What each launcher sets, shortened to what decides. The first four were recorded, the others
# follow Slurm's, PALS's, Flux's, JSM's and torchrun's documentation.
OPEN_MPI_5 = _read("""
    OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0
    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-node1-10346@1 PMIX_RANK=2
    PMIX_SERVER_URI41=prterun-node1-10346@0.0;tcp4://127.0.0.1:58249 PRTE_LAUNCHED=1
""")
OPEN_MPI_4 = _read("""
    OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0
    OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_ess_base_vpid=2 PMIX_NAMESPACE=1149829121 PMIX_RANK=2
""")
HYDRA = _read(
    "HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=0 PMI_FD=9 PMI_RANK=2 PMI_SIZE=4"
)
TORCHRUN = _read("TORCHELASTIC_RUN_ID=none RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2")
OURS = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "mpiddp-00ff"}
ALLOCATION = _read("SLURM_JOB_ID=17 SLURM_JOB_NAME=train SLURM_NTASKS=8 SLURM_JOB_NUM_NODES=2")
STEP = ALLOCATION | _read(
    "SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=4"
)
SRUN_PMIX = {**STEP, "PMIX_NAMESPACE": "slurm.pmix.17.0", "PMIX_RANK": "2"}
PALS = _read("PALS_RANKID=2 PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=2 PMI_RANK=2 PMI_SIZE=4")
INTEL = {"I_MPI_HYDRA_UUID": "a7", **{name: HYDRA[name] for name in HYDRA if name[0] in "MP"}}
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4"}
JSM = {"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "4"}
SRUN_CRAY = {**STEP, "PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "2", "PMI_SIZE": "4"}
SRUN_PMI2 = {**STEP, "PMI_FD": "11", "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "17.0"}
SECOND_STEP = _read("SLURM_STEP_ID=1 SLURM_STEPID=1 PMI_JOBID=17.1")
OUTER = _read("PMIX_NAMESPACE=slurm.pmix.17.0 PMIX_RANK=0")
OTHER_JOB = _read("PMIX_NAMESPACE=slurm.pmix.16.0 PMIX_RANK=0")
COMPONENT = _read("SLURM_JOB_ID=18 SLURM_HET_SIZE=2")
INSIDE_ALLOCATION = {**STEP, **OPEN_MPI_5, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
HYDRA_INSIDE = {**STEP, **HYDRA, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}

RECORDED = {
    # environment: (key, sizes, process managers); the rank is 2 throughout
    "mpirun 5": (OPEN_MPI_5, "openmpi", (4,), {"pmix"}),
    "mpirun 4": (OPEN_MPI_4, "openmpi", (4,), {"pmix"}),
    "hydra": (HYDRA, "hydra", (4,), {"pmi"}),
    "torchrun": (TORCHRUN, "torchrun", (4,), set()),
    "torchrun in a step": ({**SRUN_PMIX, **TORCHRUN}, "torchrun", (4,), {"pmix"}),
    "srun pmix": (SRUN_PMIX, "slurm", (4,), {"pmix"}),
    "srun pmi2": (SRUN_PMI2, "slurm", (4,), {"pmi"}),
    "srun none": (STEP, "slurm", (4,), set()),
    "srun pmi2 in a step": (SRUN_PMI2 | SECOND_STEP | OUTER, "slurm", (4,), {"pmi"}),
    "srun none in a job's step": (STEP | OTHER_JOB, "slurm", (4,), set()),
    "srun pmix of a component": (SRUN_PMIX | COMPONENT, "slurm", (4,), {"pmix"}),
    "mpirun in an allocation": (INSIDE_ALLOCATION, "openmpi", (4,), {"pmix"}),
    "mpiexec in an allocation": (HYDRA_INSIDE, "hydra", (4,), {"pmi"}),
    "ours under srun": ({**SRUN_PMIX, **OURS}, "slurm", (4,), {"pmix"}),
    "intel": (INTEL, "hydra", (4,), {"pmi"}),
    "prte": ({"PRTE_LAUNCHED": "1", "PMIX_RANK": "2"}, "prrte", (), {"pmix"}),
    "pals": (PALS, "pals", (4,), {"pmi"}),
    "srun cray_shasta": (SRUN_CRAY, "slurm", (4,), {"pmi"}),
    "flux cray-pals": ({**FLUX, "PALS_RANKID": "2", "PMI_RANK": "2"}, "flux", (4,), {"pmi"}),
    "flux": ({**FLUX, "FLUX_TASK_LOCAL_ID": "1", "PMI_FD": "8"}, "flux", (4,), {"pmi"}),
    "jsm": (JSM, "jsm", (4,), set()),
}


HETEROGENEOUS = _read("SLURM_HET_SIZE=2 SLURM_NTASKS_HET_GROUP_0=4 SLURM_NTASKS_HET_GROUP_1=2")
"""A job with two components, of 4 and 2 tasks."""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        (OPEN_MPI_5, False),
        ({**HYDRA, "MPI_LOCALNRANKS": "4"}, True),
        ({**STEP, "SLURM_STEP_NODELIST": "n1"}, True),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-2]"}, False),
        # A part of a heterogeneous job: a step may span all of it.
        ({**STEP, "SLURM_STEP_NODELIST": "n1", **HETEROGENEOUS}, False),
        # The allocation's hosts say nothing of where mpirun started what.
        ({**INSIDE_ALLOCATION, "SLURM_STEP_NODELIST": "n1"}, False),
        ({"PRTE_LAUNCHED": "1", "PMIX_RANK": "2"}, False),
        ({"PALS_RANKID": "2"}, False),
        ({**PALS, "PALS_LOCAL_SIZE": "4"}, True),
        (PALS, False),
    ],
)
def test_whether_all_are_on_this_host(variables, expected):
    launcher = find_launcher(variables)
    assert launcher is not None and launcher.is_on_one_host is expected


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_environments(name):
    variables, key, sizes, managers = RECORDED[name]
    launcher = find_launcher(variables)
    assert launcher is not None
    assert (launcher.key, launcher.rank, launcher.sizes) == (key, 2, sizes)
    assert launcher.process_managers == managers
    assert launcher.size == (4 if sizes else None)
    assert not is_first(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # A batch script and a salloc shell carry the job's variables, and are not tasks.
        *(
            STEP | _read(f"SLURM_STEP_ID={step} SLURM_STEPID={step} SLURM_PROCID=0")
            for step in (0xFFFFFFFA, 0xFFFFFFFB)
        ),
        ALLOCATION,
        {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        OURS,
        # Exported by hand, as many scripts do.
        {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"},
    ],
)
def test_started_by_hand(variables):
    assert find_launcher(variables) is None
    assert is_first(variables)


@pytest.mark.parametrize(
    ("rank", "own", "more", "sizes"),
    [
        # The step may span one component or all of them, and MPI's size settles which.
        ("3", "4", HETEROGENEOUS, {4, 6}),
        ("5", "2", HETEROGENEOUS, {2, 6}),
        ("3", "4", {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "4"}, {4}),
    ],
)
def test_components_of_a_heterogeneous_job_are_summed(rank, own, more, sizes):
    step = {**SRUN_PMIX, **more, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": own}
    launcher = find_launcher(step)
    assert launcher is not None and launcher.rank == int(rank)
    assert set(launcher.sizes) == sizes and launcher.size == max(sizes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "4"]),
        ({"OMPI_COMM_WORLD_RANK": "-1"}, ["OMPI_COMM_WORLD_RANK", "-1"]),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, ["OMPI_COMM_WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": ""}, ["OMPI_COMM_WORLD_RANK is not set"]),
        ({"OMPI_COMM_WORLD_SIZE": "1.5"}, ["OMPI_COMM_WORLD_SIZE", "'1.5'"]),
    ],
)
def test_contradictions_name_the_launcher_and_the_variable(changes, named):
    with pytest.raises(LaunchError) as caught:
        find_launcher({**OPEN_MPI_5, **changes})
    for words in ["Open MPI's mpirun", *named]:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


TABLE = {name for row in environment.LAUNCHERS for name in (*row.signs, row.rank, row.size) if name}
TABLE |= {environment.SLURM_JOB_TASKS, environment.SLURM_HETEROGENEOUS_SIZE}
TABLE |= {f"{environment.SLURM_HETEROGENEOUS_TASKS}{number}" for number in (0, 1)}
TABLE.update(environment.MANAGER_HINTS)
VALUES = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(["", " 1 ", "1_0", "²", "٣", "x", "1e3", "99999"]),
    st.text("012-+_. ²٣½x", max_size=4),
)


@given(st.dictionaries(st.sampled_from(sorted(TABLE)), VALUES))
def test_any_mixture_is_a_launcher_or_a_launch_error(variables):
    try:
        launcher = find_launcher(variables)
    except LaunchError:
        return
    has_manager_hint(variables)
    assert tasks_of_allocation(variables) >= 0
    if launcher is None:
        assert is_first(variables)
        return
    assert launcher.rank >= 0
    assert launcher.size is None or launcher.rank < launcher.size
    assert is_first(variables) == (launcher.rank == 0)


def test_a_manager_that_the_table_does_not_know_leaves_a_hint():
    assert has_manager_hint({"PMI_FD": "3"}) and has_manager_hint({"PMIX_RANK": "0"})
    assert not has_manager_hint({"PMI_FD": ""}) and not has_manager_hint(ALLOCATION)


@pytest.mark.parametrize(("text", "tasks"), [("8", 8), ("", 1), ("many", 1), ("²", 1), ("-3", 1)])
def test_tasks_of_allocation(text, tasks):
    assert tasks_of_allocation({"SLURM_NTASKS": text}) == tasks
    assert tasks_of_allocation({}) == 1


JOB = {"SLURM_JOB_ID": "18", "SLURM_JOB_NAME": "resnet"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        (JOB, "resnet-18"),
        ({"SLURM_JOB_ID": "18"}, "job-18"),
        # Every task of an array has a job id of its own, but finds its run by array and task.
        ({**JOB, "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "resnet-17_3"),
        ({**JOB, "SLURM_JOB_NAME": "../../etc/x"}, "-..-etc-x-18"),
        ({**JOB, "SLURM_JOB_NAME": ".."}, "-18"),
        ({**JOB, "SLURM_RESTART_COUNT": "2"}, "resnet-18"),
    ],
)
def test_job_name(variables, name):
    assert environment.job_name(variables) == name


# Slurm's short form of a list of hosts


@pytest.mark.parametrize(
    ("name", "hostname", "expected"),
    [
        ("node1", "node1", True),
        ("node1", "node1.cluster.local", True),
        ("Node1", "node1.Cluster.local", True),
        ("node1.cluster.local", "node1.cluster.local", True),
        ("node1.cluster", "node1.cluster.local", False),
        ("node1", "node10.cluster.local", False),
        # Patterns.
        ("node*", "node1.cluster", True),
        ("node[12]", "node2.cluster", True),
        ("*.cluster", "node1.cluster", True),
        ("*.cluster", "node1", True),
        ("node*.cluster", "node1.elsewhere", False),
        ("node?", "node10", False),
    ],
)
def test_whose_name_it_is(name, hostname, expected):
    assert is_host(name, hostname) is expected
    assert {*name} & {*"*?["} or is_host(hostname, name) is expected


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["node001", "node002", "node003", "login"], "login,node[001-003]"),
        (["n1", "n3", "n2", "n7"], "n[1-3,7]"),
        # The width is part of the name: node1 and node01 are two hosts.
        (["node1", "node01"], "node01,node1"),
        (["n099", "n100"], "n[099-100]"),
        (["gpu1-ib", "gpu2-ib", "gpu1"], "gpu1,gpu[1-2]-ib"),
        (["r1n4", "r1n5", "r2n4"], "r1n[4-5],r2n4"),
        # Numbers of a domain are not what tells its hosts apart.
        (["n1.dc2.local", "n2.dc2.local", "n2.dc3.local"], "n2.dc3.local,n[1-2].dc2.local"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["n9", "n10", "m08", "m9", "m10"], "m9,m[08,10],n[9-10]"),
    ],
)
def test_fold_hostnames(names, folded):
    assert fold_hostnames(names) == folded


def test_of_many_ranges_the_first_are_written_out():
    shown = [fold_numbers([9, 0, 1, 5], most=most) for most in (1, 2, 3, None)]
    assert shown == ["0-1,…", "0-1,5,…", "0-1,5,9", "0-1,5,9"]


HOSTNAMES = st.from_regex(
    r"[a-c]{0,2}[0-9]{0,3}[a-c]{1,2}-?[0-9]{0,3}(?:\.c[12]?)?", fullmatch=True
)


@given(st.lists(HOSTNAMES, min_size=1, max_size=12))
def test_a_folded_list_expands_to_the_same_hosts(names):
    assert sorted(expand_hostnames(fold_hostnames(names))) == sorted(set(names))
    assert expand_hostnames("r[1-2]n[09-10]-ib,n1") == (
        *("r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"), "n1",
    )  # fmt: skip


@pytest.mark.parametrize("text", ["", ",", "n[x]", "n[1-x]"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match=r"no host|invalid literal"):
        expand_hostnames(text)
