"""Launches on a real Slurm cluster of several nodes, and how they end when something breaks."""

import os
import re
import shlex
import sys
from dataclasses import replace

import pytest

import facts
import launchers
import ranks
import slurm

pytestmark = pytest.mark.slurm

INTERFACES = ("ens1f1", "ens1f0np0", "ens1f0", "eth0")
INIT = """
import os, sys, mpiddp
with mpiddp.init(timeout=60) as session:
    world = session.world
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
    numbers = " ".join(os.environ[name] for name in names)
    sys.stdout.write(f"seen {world.rank} {world.size} {world.hostname} {numbers}\\n")
"""


@pytest.fixture(autouse=True)
def idle(slurm_cluster):
    """What an earlier test left in the queue would hold nodes."""
    yield
    if slurm_cluster.ask("squeue", "-h"):
        slurm_cluster.ask("scancel", "--full", "--state=RUNNING")
        slurm_cluster.ask("scancel", "--state=PENDING")


def collect(launcher, ranks, folder, **env):
    """The facts of every rank, by rank, and the finished job."""
    program = f"import os; os.chdir({str(folder)!r})\n{facts.PROGRAM}"
    result = launchers.run(launcher, ranks, ["-c", program, "auto"], env=env)
    return facts.read(folder, result, ranks), result


def expect_ranks(result, ranks: int) -> list[list[str]]:
    """What INIT printed on so many ranks, by rank: rank, size, host, and by Slurm's variables
    rank, size, local rank, node rank."""
    lines = result.expect(0).stdout.splitlines()
    rows = sorted(line.split()[1:] for line in lines if line.startswith("seen "))
    expected = [[str(rank), str(ranks)] for rank in range(ranks)]
    assert [row[:2] for row in rows] == [row[3:5] for row in rows] == expected, result
    return rows


def worlds(found) -> list[tuple[str, int, int, int, int]]:
    """Host, local rank, local size, node rank, node count of each rank."""
    names = ("hostname", "local_rank", "local_size", "node_rank", "node_count")
    return [tuple(row["world"][name] for name in names) for row in found]


@pytest.mark.long
def test_nodes_and_ranks(slurm_cluster, tmp_path):
    flags = ("--nodelist=node[1-4]", "--nodes=4", "--ntasks-per-node=3")
    found, result = collect(slurm_cluster.srun(*flags), 12, tmp_path)
    assert worlds(found) == [
        (f"node{node + 1}", local, 3, node, 4) for node in range(4) for local in range(3)
    ]
    assert [row["sum"] for row in found] == [[78.0] * 3] * 12
    assert {row["world"]["master_hostname"] for row in found} == {"node1"}
    wanted = [name for name in INTERFACES for _ in range(3)]
    assert [row["set"]["GLOO_SOCKET_IFNAME"] for row in found] == wanted
    assert re.search(r"ranks +12 ranks on 4 nodes: node\[1-4\]", result.stderr)


@pytest.mark.parametrize(
    ("library", "mpi"),
    [
        ("openmpi", "pmix"),
        pytest.param("impi", "pmi2", marks=launchers.marks_of("impi")),
        pytest.param("impi", "pmix", marks=launchers.marks_of("impi")),
    ],
)
def test_uneven_nodes_in_cyclic_order(library, mpi, slurm_cluster, tmp_path):
    flags = ("--nodelist=node[1-3]", "--nodes=3", "--distribution=cyclic", "--exclusive")
    launcher = slurm_cluster.srun(*flags, library=library, mpi=mpi)
    found, result = collect(launcher, 4, tmp_path)
    first, second, third, fourth = worlds(found)
    assert (first, fourth) == (("node1", 0, 2, 0, 3), ("node1", 1, 2, 0, 3))
    assert (second, third) == (("node2", 0, 1, 1, 3), ("node3", 0, 1, 2, 3))
    assert "2 on 1, 1 on 2" in result.stderr


@pytest.mark.long
def test_a_heterogeneous_step_spans_its_components(slurm_cluster):
    command = [sys.executable, "-c", INIT]
    words = ["-c", INIT, ":", "-n2", "--nodes=2", *command]
    for attempt in range(3):
        try:
            result = launchers.run(slurm_cluster.srun("--nodes=1"), 1, words)
            break
        except launchers.JobError:
            # Slurm 22.05's srun now and then stays for ever when all tasks of such a step have
            # ended: then slurmd's log says that they are done, and Slurm knows no step any more.
            if attempt == 2:
                raise
    assert len({row[2] for row in expect_ranks(result, 3)}) == 3


def run_inside(launcher, allocation, command) -> launchers.Result:
    """Run INIT with ``command`` inside an allocation that salloc makes."""
    line = [*allocation, *command, sys.executable, "-c", INIT]
    salloc, alone = slurm.find_program("salloc"), replace(launcher, mpirun=None)
    return launchers.run(alone, 1, line, python=salloc, env={"HYDRA_IFACE": None})


def test_words_reach_the_script_past_srun(slurm_cluster, tmp_path):
    words = [":", "a", "", "a\nb", "--map-by", "-n", "%t", "'", "\udcff"]
    script = tmp_path / "words.py"
    script.write_text("import sys\nsys.stdout.write(f'{sys.argv[1:]}\\n')  # mpiddp\n")
    # salloc reads colons as well.
    inside = shlex.join([sys.executable, "-m", "mpiddp", "-n", "2", str(script), *words])
    salloc, alone = slurm.find_program("salloc"), replace(slurm_cluster.srun(), mpirun=None)
    line = ["--nodes=2", "sh", "-c", inside]
    result = launchers.run(alone, 1, line, python=salloc).expect(0)
    assert result.stdout.splitlines() == [str(words)] * 2


def test_a_shell_in_a_step_starts_ranks_of_its_own(slurm_cluster, tmp_path):
    """As ``srun --pty bash`` gives one: a task with several cores."""
    (tmp_path / "seen.py").write_text(INIT)
    words = [sys.executable, "-m", "mpiddp"]
    inside = shlex.join([*words, "-n", "2", str(tmp_path / "seen.py")])
    alone = shlex.join(["env", "SLURM_PTY_PORT=1", *words, str(tmp_path / "seen.py")])
    srun, launcher = slurm.find_program("srun"), replace(slurm_cluster.srun(), mpirun=None)
    line = ["-n1", "--cpus-per-task=2", "sh", "-c", f"{inside} && echo then && {alone}"]
    result = launchers.run(launcher, 1, line, python=srun)
    two, one = result.expect(0).stdout.split("then")
    for rows, count in ((two, 2), (one, 1)):
        expect_ranks(replace(result, stdout=rows), count)
    assert result.stderr.count("this terminal is one task of a Slurm step") == 1


@pytest.mark.parametrize("name", launchers.list_names("openmpi4", "mpich"))
def test_mpirun_inside_an_allocation(name, slurm_cluster):
    mpirun = launchers.table()[name].mpirun
    flags = ["--allow-run-as-root", "--map-by", "ppr:2:node:OVERSUBSCRIBE"]
    if name in ("mpich", "impi"):
        flags = ["-n", "4", "-ppn", "2"]
    launcher = slurm_cluster.srun(library=name)
    result = run_inside(launcher, ["--nodes=2", "--ntasks-per-node=1"], [mpirun, *flags])
    rows = expect_ranks(result, 4)
    # For Slurm there is one task on each node, a daemon of mpirun's.
    assert [row[5:] for row in rows] == [["0", "0"], ["1", "0"], ["0", "1"], ["1", "1"]]
    assert len({row[2] for row in rows}) == 2


def test_mpich_starts_whatever_lies_behind_its_address(slurm_cluster):
    """Without mpiddp.launch.mpi.slurm_pmi, MPI_Init aborts in a part of the ranks here."""
    launcher = slurm_cluster.srun("--nodes=2", mpi="pmi2", library="mpich")
    reports = ranks.collect(launcher, 2, "dense_memory.py")
    assert len(set(reports[0])) == 2 and reports == [reports[0]] * 2


# How jobs end, under a bare srun: no --kill-on-bad-exit

BARE = ("--nodelist=node[1-2]", "--nodes=2", "--distribution=plane=2")
RAISE = """
import mpiddp
with mpiddp.init(timeout=900) as session:
    if session.world.rank == 1:
        raise ValueError("broken on purpose")
    session.comm.Barrier()  # The others would wait for ever.
"""


def test_a_rank_that_raises_ends_the_job(slurm_cluster):
    result = launchers.run(slurm_cluster.srun(*BARE[:2]), 2, ["-c", RAISE]).expect(1)
    (head,) = (line for line in facts.messages(result) if "failed" in line)
    assert "rank 1 of 2 on node2" in head
    assert result.stderr.count("ValueError: broken on purpose") == 1


TRAIN = """
import pathlib, sys, time, torch, torch.distributed as distributed, mpiddp
with mpiddp.init(timeout=900, lifeline_timeout=5) as session:
    (pathlib.Path(sys.argv[1]) / f"at-{session.world.hostname}").touch()
    while True:
        distributed.all_reduce(torch.ones(1000))
        time.sleep(0.05)
"""


def test_a_node_that_is_cut_off_in_training_ends_the_job(slurm_cluster, tmp_path):
    """Both sides leave by the lifeline's time-out, long before the collective's.

    srun itself waits for a node that Slurm cannot reach, and ends when it is back.
    """
    with launchers.start(slurm_cluster.srun(*BARE), 3, ["-c", TRAIN, str(tmp_path)]) as job:
        job.until(lambda: len(list(tmp_path.glob("at-*"))) == 2, "both nodes")
        try:
            slurm_cluster.must("cut", "node2")
            for node in ("node1", "node2"):
                # Each look reads all of /proc.
                launchers.until(
                    lambda n=node: not slurm_cluster.list_on_node(job, n), f"{node}'s", pause=0.2
                )
        finally:
            slurm_cluster.must("heal", "node2")
        result = job.wait()
    told = [line for line in facts.messages(result) if " was lost: nothing has been" in line]
    lost = sorted(line.split(":")[1] for line in told)
    assert lost == [f" rank {n} of 3 on node{1 + n // 2} was lost" for n in (0, 2)], str(result)
    assert result.returncode != 0


FABRIC = """
import os, pathlib, sys, torch
import mpiddp
from mpiddp.launch.device import device
from mpiddp.launch import fabrics
from mpiddp.launch.rendezvous import store
find = fabrics.find_fabrics
root = pathlib.Path(sys.argv[1])
fabrics.find_fabrics = lambda table, variables=os.environ, _=None: find(table, variables, root)
device.choose_backend = lambda *_: "nccl"
real = store.make_group
def make_group(store, world, backend, taken, timeout):
    real(store, world, "gloo", torch.device("cpu"), timeout)
store.make_group = make_group
with mpiddp.init() as session:
    sys.stdout.write(f"seen {session.world.rank} {os.environ.get('NCCL_NET')}\\n")
"""
"""Slingshot's cards are pretended, and Gloo does NCCL's part."""


def test_a_fabric_between_nodes(slurm_cluster, tmp_path):
    for place in ("sys/class/cxi/cxi0", "proc/driver/nvidia/gpus/0000:10:00.0", "lib"):
        (tmp_path / place).mkdir(parents=True)
    site = tmp_path / "site.toml"
    site.write_text('[[settings]]\nvariable = "NCCL_CROSS_NIC"\nvalue = "0"\n')
    (tmp_path / "lib" / "libnccl-net.so").touch()
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    env = {"MPIDDP_SITE": str(site), "LD_LIBRARY_PATH": f"/lib:{libraries}"}
    env["FI_MR_CACHE_MONITOR"] = "memhooks"
    srun = slurm_cluster.srun("--nodes=2", "--ntasks-per-node=1")
    result = launchers.run(srun, 2, ["-c", FABRIC, tmp_path], env=env).expect(0)
    assert all(f"seen {rank} AWS Libfabric\n" in result.stdout for rank in range(2))
    name = "Slingshot (cxi0), NVIDIA"
    line = rf"  site defaults +{re.escape(f'{name}, {site}')}: NCCL_CROSS_NIC=0 FI_.*NCCL_NET="
    assert re.search(line, result.stderr)
    assert f"mpiddp: note: {name}: FI_MR_CACHE_MONITOR=memhooks" in result.stderr
