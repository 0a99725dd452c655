"""What a session gives, agrees, sets, prints, and leaves as it was."""

import re
from dataclasses import asdict, replace
from fractions import Fraction

import pytest

import facts
import launchers
import mpiddp
from mpiddp import environment
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi.world import Roster, World, check_size, find_oddities, solitary_world
from mpiddp.launch.options import Options
from mpiddp.launch.rendezvous.route import find_route
from mpiddp.launch.summary import describe_cores

SIZES = [2, pytest.param(4, marks=pytest.mark.long)]


@pytest.mark.parametrize("ranks", SIZES)
def test_what_every_rank_is_given(recent_launcher, ranks):
    found, _ = facts.collect(recent_launcher.name, ranks)
    jobs = {row["job"] for row in found}
    assert len(jobs) == 1 and len(jobs.pop()) == 32
    for rank, row in enumerate(found):
        host = row["gethostname"]
        assert row["world"] == asdict(World(rank, ranks, rank, ranks, 0, 1, host, host))
        assert row["group"] == [rank, ranks, "gloo"] and row["comm"] == [rank, ranks]
        assert row["early imports"] == []
        assert (row["backend"], row["device"]) == ("gloo", "cpu")
        assert row["any"] == [False, True, True]
        assert row["agree"] is True
        assert row["broadcast"] == 0
        # 1 + 2 + … + n
        assert row["sum"] == [ranks * (ranks + 1) / 2] * 3
        assert row["stored"] == [str(rank) for rank in range(ranks)]
        assert row["master"] == found[0]["master"]
        assert row["is_torchelastic_launched"] is True
        # Though scripts find a rank's numbers under all names.
        assert row["launcher"] == ("openmpi" if "open" in recent_launcher.name else "hydra")
    check_listening(found)
    masks = [set(row["cores"]) for row in found]
    for row, mask in zip(found, masks, strict=True):
        share = sum(Fraction(1, sum(core in other for other in masks)) for core in mask)
        threads = max(1, int(share))
        assert (row["threads"], row["torch threads"]) == (threads, threads)
        assert row["set"]["OMP_NUM_THREADS"] == str(threads)


def check_environment(found: list[dict]) -> None:
    for rank, row in enumerate(found):
        address, port = row["master"]
        job = {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"mpiddp-{row['job']}"}
        expected = {**facts.torchrun_variables(rank, len(found), address), **job}
        assert {name: row["set"].get(name) for name in expected} == expected
        numbers = facts.rank_numbers(rank, len(found))
        found_numbers = row["before"] | row["set"]
        assert {name: found_numbers.get(name) for name in numbers} == numbers
        check_inherited(row, numbers)
        names = {name for group in environment.RANK_VARIABLES.values() for name in group}
        others = row["set"].keys() - expected.keys() - names
        assert others == {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MPIDDP_EXPORTED"}
        assert row["removed"] == []


def check_inherited(row: dict, numbers: dict[str, str]) -> None:
    """A child has the launcher's own numbers, and its own groups meet at a port that is free."""
    inherited = dict(line.split("=", 1) for line in row["inherited"] if "=" in line)
    for name in numbers:
        assert inherited.get(name) == row["before"].get(name), name
    assert inherited["RANK"] == row["set"]["RANK"]
    assert inherited["MASTER_ADDR"] == row["set"]["MASTER_ADDR"]
    assert inherited["MASTER_PORT"] not in ("", row["set"]["MASTER_PORT"])
    assert "TORCHELASTIC_USE_AGENT_STORE" not in inherited


@pytest.mark.parametrize("ranks", SIZES)
def test_the_environment_is_torchruns_and_is_given_back(recent_launcher, ranks):
    found, _ = facts.collect(recent_launcher.name, ranks)
    check_environment(found)
    for row in found:
        assert row["changed afterwards"] == {}
        assert row["open afterwards"] is False
        assert row["finalized"] is True
        assert row["hook afterwards"].startswith("torch.")


def test_without_mpi_the_environment_is_the_same():
    found, result = facts.collect("alone", 1)
    check_environment(found)
    assert block(result)["MPI"] == "none (one process; for more: python -m mpiddp -n RANKS …)"
    host = found[0]["gethostname"]
    assert found[0]["world"] == asdict(World(0, 1, 0, 1, 0, 1, host, host))
    assert found[0]["comm"] is None and found[0]["group"] == [0, 1, "gloo"]
    assert (found[0]["launcher"], found[0]["is managed"]) == (None, False)
    assert found[0]["changed afterwards"] == {}
    assert found[0]["hook afterwards"].startswith("torch.") and not found[0]["open afterwards"]
    assert "finalized" not in found[0]
    check_listening(found)


def test_what_the_user_chose_is_kept():
    interfaces = (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "=lo"))
    variables = (*interfaces, ("RANK", "17"), ("OMP_NUM_THREADS", "1"))
    ((row,), result) = facts.collect("alone", 1, "auto", variables)
    assert "OMP_NUM_THREADS" not in row["set"]
    assert row["torch threads"] == 1
    assert block(result)["devices"].startswith("CPU, 1 thread per rank")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & row["set"].keys()
    # What a job script exported is overwritten while the session lasts, and comes back.
    assert row["set"]["RANK"] == "0"
    assert row["changed afterwards"] == {}


def check_listening(found: list[dict]) -> None:
    for rank, row in enumerate(found):
        assert {host for host, _ in row["listening"]} <= {"127.0.0.1"}
        # Rank 0 holds the store; every rank of a Gloo group listens for its peers, and so does
        # UCX.
        assert (row["master"] in row["listening"]) == (rank == 0)
        assert len(row["listening"]) <= 3 + (rank == 0)


def test_an_interface_for_another_host_is_refused():
    options = {"interface": "nosuch.local=lo", "port_range": "", "timeout": 60}
    said = "^--interface 'nosuch.local=lo' names none of the job's hosts, which are node7: expected"
    with pytest.raises(ConfigurationError, match=said):
        find_route(solitary_world(), None, ["node7"], **options)


def block(result: launchers.Result) -> dict[str, str]:
    """The lines of the start-up block by their heads."""
    lines = result.stderr.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.endswith("mpiddp: started"))
    rows = [re.fullmatch(r"  (\S.*?)  +(\S.*)", line) for line in lines[begin + 1 :]]
    return {row[1]: row[2] for row in rows if row is not None}


NAMES = {"openmpi": r"Open MPI 5\.\S+", "openmpi4": r"Open MPI 4\.\S+", "mpich": r"MPICH \d\.\S+",
         "impi": r"Intel MPI 20\S+"}  # fmt: skip


def test_the_block(recent_launcher):
    found, result = facts.collect(recent_launcher.name, 2)
    host = found[0]["gethostname"]
    rows = block(result)
    assert ", ".join(rows) == (
        "ranks, ranks per node, master, interface, backend, devices, cores, MPI, seconds"
    )
    assert rows["ranks"] == f"2 ranks on 1 node: {host}"
    assert rows["ranks per node"] == "2"
    assert rows["master"] == "{} at {}:{}".format(host, *found[0]["master"])
    assert rows["interface"] == "lo"
    assert rows["backend"] == "gloo"
    assert re.match(r"CPU, \d+ threads? per rank", rows["devices"])
    masks = [frozenset(row["cores"]) for row in found]
    assert rows["cores"] == describe_cores(masks)
    assert re.fullmatch(NAMES[recent_launcher.name], rows["MPI"])
    phases = re.findall(r"(\w[\w -]*?) (\d+\.\d{3}) \(rank ([01])\)(?:, |$)", rows["seconds"])
    expected = ["MPI", "import torch", "address", "store", "group", "first all-reduce"]
    assert [phase for phase, *_ in phases] == expected
    assert sum(float(seconds) for _, seconds, _ in phases) < 3 * result.seconds
    # Rank 0 knows how long each phase took, to the digits that are shown.
    shown = {phase: seconds for phase, seconds, _ in phases}
    assert {phase: f"{each:.3f}" for phase, each in found[0]["seconds"].items()} == shown
    assert found[1]["seconds"] == {}
    # One block in all, and no rank says anything else.
    assert facts.messages(result) == ["mpiddp: started"]
    assert result.stdout == ""


# Agreement


def differ(session: mpiddp.Session) -> str:
    """What an agreement raises in which the last rank of three has something else."""
    session.agree(7, "seven")
    value = {"bytes": b"x" * 1000} if session.world.rank != 2 else "other"
    with pytest.raises(ConfigurationError) as caught:
        session.agree(value, "the configuration")
    return str(caught.value)


@pytest.mark.by_default("openmpi")
def test_ranks_that_differ_are_named(either_launcher, pool):
    said, *others = pool(either_launcher, 3).call(differ).values
    wanted = "the configuration must be the same on all ranks, but it differs from rank 0's on rank"
    assert said.startswith(f"{wanted} 2: ") and said.endswith("rank 2 has 'other'")
    assert others == [said] * 2


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("timeout", float("nan"), "seconds above 0"),
        ("timeout", 0, "seconds above 0"),
        ("stall_timeout", -1, "seconds up to .*, or 0 for never"),
        ("collectives", "gloo", "one of framework, mpiddp"),
        ("timeout", "5", "a number of seconds, found '5'"),
        ("port_range", 5, "text, found 5"),
        ("allow_shared_gpu", "no", "True or False, found 'no'"),
        ("bind", "socket", "one of auto, none, cores, numa"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name, value, expected):
    with pytest.raises(ConfigurationError, match=f"{name}: expected {expected}"):
        Options(**{name: value})


# Life cycle

TWICE = """
import mpiddp
for time in (1, 2):
    with mpiddp.init(timeout=90) as session:
        session.any(True)
    session.close()
    print(f"closed {time}\\n", end="", flush=True)
"""


@pytest.mark.long
@pytest.mark.by_default("mpich")
def test_with_mpi_a_second_session_is_refused(either_launcher):
    result = launchers.run(either_launcher, 2, ["-c", TWICE]).expect(3)
    assert result.stdout.count("closed 1") == 2 and "closed 2" not in result.stdout
    assert result.stderr.count("MPI was shut down earlier in this process") == 1
    assert "Traceback" not in result.output


BARE = """
import sys, mpiddp, torch
session = mpiddp.init(timeout=90)
print("rank", session.world.rank, flush=True)
if "raise" in sys.argv and session.world.rank == 1:
    raise ValueError("bare")
session.any("raise" in sys.argv)
for name in ("first", "second"):
    session.at_close(lambda name=name: (mpiddp.barrier(), sys.stdout.write(f"{name}\\n")))
    mpiddp.all_reduce(torch.ones(3))
"""


@pytest.mark.by_default("mpich")
def test_a_session_without_with_is_closed_at_exit(either_launcher):
    """And what is done at the close may call collectives."""
    result = launchers.run(either_launcher, 2, ["-c", BARE]).expect(0)
    assert "Traceback" not in result.output and result.stdout.count("rank ") == 2
    assert sorted(re.findall("first|second", result.stdout)) == ["first"] * 2 + ["second"] * 2


@pytest.mark.by_default("mpich")
def test_a_session_without_with_ends_the_job_when_a_rank_raises(either_launcher):
    result = launchers.run(either_launcher, 2, ["-c", BARE, "raise"]).expect(1)
    assert result.stderr.count("ValueError: bare") == 1
    assert result.stderr.count("Traceback") == 1
    assert "mpiddp: rank 1 of 2 on " in result.stderr


LEAVES_EARLY = """
import mpiddp, torch
with mpiddp.init(timeout=90) as session:
    if session.world.rank == 1:
        mpiddp.all_reduce(torch.ones(4))
        raise SystemExit("not reached")
"""


@pytest.mark.by_default("mpich")
def test_a_rank_that_leaves_while_another_one_makes_its_first_call_ends_the_job(either_launcher):
    result = launchers.run(either_launcher, 2, ["-c", LEAVES_EARLY]).expect(6)
    lines = [line for line in facts.messages(result) if not line.endswith("mpiddp: started")]
    assert len(lines) == 1, str(result)
    said = (
        r"mpiddp: rank [01] of 2 on [^\s:]+(:| left early:) .+ was matched with a different call "
        r"on another rank: all ranks must make the same calls, and leave the session together.*"
    )
    assert re.fullmatch(said, lines[0]), lines[0]
    assert result.stderr.count("was matched with a different call on another rank") == 1
    assert "Traceback" not in result.output and "not reached" not in result.output


MPI_IS_UP = """
from mpi4py import MPI
import mpiddp
with mpiddp.init(timeout=90) as session:
    assert session.world.size == MPI.COMM_WORLD.size == 2
    assert session.comm is not MPI.COMM_WORLD
assert MPI.COMM_WORLD.allreduce(1) == 2
"""


@pytest.mark.long
@pytest.mark.by_default("mpich")
def test_an_mpi_that_was_up_before_stays_up(either_launcher):
    launchers.run(either_launcher, 2, ["-c", MPI_IS_UP]).expect(0)


# Notebooks

NOTEBOOK = """
import gc, os, sys, types
ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: object()
sys.modules["IPython"] = ipython
import mpiddp
from mpiddp.launch.rendezvous import store
before, all_reduce = dict(os.environ), store.first_all_reduce

def fail(*_):
    raise RuntimeError("on purpose")

def begin(**options):
    try:
        return mpiddp.init(**{"timeout": 90, **options})
    except (RuntimeError, mpiddp.errors.ConfigurationError) as error:
        print("raised:", error)

store.first_all_reduce = fail
begin()
assert gc.isenabled()
assert dict(os.environ) == before
store.first_all_reduce = all_reduce
with begin() as session:
    print("again", session.world.size)
    begin()
begin(backend="nccl")
begin(timeout=-1)
os.environ["GLOO_SOCKET_IFNAME"] = "nosuch"
begin()
del os.environ["GLOO_SOCKET_IFNAME"]
session = begin()
assert sys.excepthook.__module__.startswith("torch.")
try:
    with session:
        raise KeyError("cell")
except KeyError:
    print("the cell failed, the kernel lives")
import torch.distributed as distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
begin()
"""


def test_in_a_notebook_errors_raise_and_the_kernel_lives():
    env = {"CUDA_VISIBLE_DEVICES": ""}
    result = launchers.run("alone", 1, ["-c", NOTEBOOK], env=env).expect(0)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["raised: on purpose", "again 1"]
    assert "mpiddp.init() was called in this process before" in lines[2] and "close()" in lines[2]
    assert lines[3].startswith("raised: backend nccl needs a GPU")
    assert lines[4].startswith("raised: timeout: expected seconds above 0")
    assert lines[5].startswith("raised: GLOO_SOCKET_IFNAME is 'nosuch', but the interfaces of ")
    assert lines[6] == "the cell failed, the kernel lives"
    assert "default group exists already" in lines[7] and len(lines) == 8
    assert "Traceback" not in result.stderr


CONSOLE = """
import code, mpiddp
session = mpiddp.init()
code.interact(local=globals())
"""


@pytest.mark.parametrize("words", [["-i"], ["-c", CONSOLE]], ids=["interpreter", "console"])
def test_a_typing_error_does_not_end_an_interactive_python(words: list[str]) -> None:
    typed = """
import mpiddp
session = session if "session" in globals() else mpiddp.init()
tpyo
with session: raise KeyError("cell")

print("lives", session.world.size)
"""
    result = launchers.run_python(*words, input=typed)
    assert result.returncode == 0, result
    assert "lives 1\n" in result.stdout
    assert "NameError: name 'tpyo'" in result.stderr and "KeyError: 'cell'" in result.stderr


# Where ranks are, and the error in which every rank is 0 of 1

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
FOUR = Launcher("slurm", "srun", 0, (4,), frozenset({"pmix"}))


def test_sizes_that_agree_pass():
    check_size(4, OPEN_MPI, FOUR)
    check_size(7, OPEN_MPI, None)
    # A heterogeneous step spans one component or all of them.
    for size in (4, 6):
        check_size(size, OPEN_MPI, replace(FOUR, sizes=(4, 6)))
    check_size(1, OPEN_MPI, replace(FOUR, sizes=()))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1, r"every process would be rank 0 of 1.*tart it with( the mpirun of .*)?: "),
        (2, r"srun started 4 processes.*Open MPI 5.0.11 sees 2: the environment mixes two lau"),
    ],
)
def test_sizes_that_differ_are_refused(size, said):
    with pytest.raises(LaunchError, match=said):
        check_size(size, OPEN_MPI, FOUR)


def test_one_process_alone_in_an_allocation_is_pointed_out(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    (oddity,) = find_oddities(solitary_world(), None, None)
    assert "one process alone in an allocation of 8 tasks" in oddity and "srun" in oddity
    # One that srun started alone was meant so.
    assert find_oddities(solitary_world(), replace(FOUR, sizes=(1,)), None) == []
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find_oddities(solitary_world(), None, None) == []


def test_one_host_that_stands_for_several_nodes_is_pointed_out():
    world = World(0, 3, 0, 1, 0, 3, "n1", "n1")
    roster = Roster(("n1", "n2", "n3"), (1, 1, 1), (0, 1, 2))
    assert find_oddities(world, FOUR, roster) == []
    (oddity,) = find_oddities(world, FOUR, replace(roster, hostnames=("n1", "n2", "n1")))
    assert "3 nodes" in oddity and "n1 stands for several" in oddity


@pytest.mark.mpi
def test_uneven_nodes():
    # Even ranks on one node, odd ones on the other: 0 and 2, and 1 by itself.
    variables = (("MPIR_CVAR_ODD_EVEN_CLIQUES", "1"),)
    found, result = facts.collect("mpich", 3, "lo", variables)
    keys = ("node_rank", "node_count", "local_rank", "local_size")
    places = [tuple(row["world"][key] for key in keys) for row in found]
    assert places == [(0, 2, 0, 2), (1, 2, 0, 1), (0, 2, 1, 2)]
    assert [row["set"]["LOCAL_WORLD_SIZE"] for row in found] == ["2", "1", "2"]
    assert [row["set"]["GROUP_RANK"] for row in found] == ["0", "1", "0"]
    host = found[0]["gethostname"]
    assert f"3 ranks on 2 nodes: {host}" in result.stderr
    assert f"{host} stands for several of them" in result.stderr
    assert "ranks per node  2 on 1, 1 on 1" in result.stderr


# Every rank is 0 of 1

INIT = "import mpiddp; mpiddp.init(timeout=90)"


def mix(name: str, library: str) -> launchers.Launcher:
    """The launcher ``name``, whose ranks load the MPI library of another launcher."""
    return replace(launchers.find(name), libmpi=launchers.find(library).libmpi)


def expect_refusal(result: launchers.Result, *words: str) -> None:
    """One message in all the output, on one line, which holds ``words``."""
    lines = facts.messages(result)
    assert len(lines) == 1, str(result)
    # torchrun prints its own traceback, without a frame of mpiddp.
    assert f'File "{launchers.ROOT / "mpiddp"}/' not in result.output
    for word in ("every process would be rank 0 of 1", *words):
        assert word in lines[0]


@pytest.mark.mpi
def test_mpich_under_open_mpis_mpirun():
    result = launchers.run(mix("openmpi", "mpich"), 2, ["-c", INIT]).expect(3)
    command = f"Start it with: {launchers.find('mpich').mpirun} -n 2 python -c"
    expect_refusal(result, "Open MPI's mpirun started 2 processes", "MPICH 5.", command)


@pytest.mark.mpi
def test_only_the_first_rank_speaks_where_mpi_cannot_say_who_that_is():
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    env["SLURM_STEP_NUM_TASKS"] = "2"
    result = launchers.run(mix("alone", "mpich"), 1, ["-c", INIT], env=env).expect(3)
    assert result.output == ""


def run_refused(row, ranks, arguments, folder, **env) -> launchers.Result:
    """Run a launch that is refused, and check that MPI leaves no files."""
    memory = folder / "memory"
    memory.mkdir()
    places = {"OMPI_MCA_btl_sm_backing_directory": str(memory)}
    with launchers.start(row, ranks, arguments, env={**places, **env}) as job:
        result = job.wait()
        left = [path for path in (*job._scratch.rglob("*"), *memory.iterdir()) if path.is_file()]
    # Ours, and torchrun's.
    assert not [p for p in left if p.name not in ("stdout", "stderr") and "torche" not in str(p)]
    return result


@pytest.mark.mpi
def test_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(INIT)
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    result = run_refused(mix("alone", "openmpi"), 1, arguments, tmp_path).expect(1)
    found = ("torchrun started 2 processes", "Open MPI 5.", "Start it with: ", "-n 2 python")
    expect_refusal(result, *found)
    # torchrun's own report of what its workers ended with.
    assert re.search(r"exitcode\s*: 3", result.stderr)


@pytest.mark.mpi
def test_what_is_only_known_once_mpi_is_up_leaves_nothing_either(tmp_path):
    # JSM has its own MPI, and this one is another.
    env = {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}
    result = run_refused(mix("alone", "openmpi"), 1, ["-c", INIT], tmp_path, **env).expect(3)
    expect_refusal(result, "IBM JSM (jsrun) started 2 processes")
