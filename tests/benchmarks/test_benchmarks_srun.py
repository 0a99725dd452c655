"""``benchmarks startup --launcher srun``: finding a cluster, phases, real runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_runs import check_drawing, record_benchmark, run_benchmark, write_program
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.launching import processes, srun
from benchmarks.measure.launching.processes import Program, Run, RunError
from benchmarks.measure.startup import tables
from benchmarks.measure.startup.contenders import QUANTITY, make_cells, measure_group
from benchmarks.measure.startup.launches import (
    FLOOR,
    MPIDDP,
    SESSION,
    TORCHRUN,
    TORCHRUN_STATIC,
    Launch,
    list_on_cluster,
)
from benchmarks.measure.startup.targets import judge
from benchmarks.measure.trials import FAILED, Refusal
from benchmarks.records.environment import clean_environment
from benchmarks.records.options import is_srun
from benchmarks.records.schema import read_record
from benchmarks.records.statistics import make_series
from benchmarks.show import results
from launchers import until
from mpiddp.errors import ConfigurationError, LaunchError

# Finding the cluster


@pytest.fixture
def beside(monkeypatch):
    """No allocation around the tests."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def make_slurm(folder: Path, sinfo: str = "") -> str:
    """An srun that only knows its version, beside a sinfo that runs ``sinfo``."""
    write_program(folder / "sinfo", sinfo)
    return str(write_program(folder / "srun", "echo slurm-wlm 22.05.8"))


def list_nodes(*rows: str) -> str:
    return "cat <<'ROWS'\n" + "\n".join(rows) + "\nROWS"


IDLE = list_nodes(*(f"node{number} idle main*" for number in range(4)))


@pytest.mark.parametrize(
    ("name", "answer"),
    [("srun", True), ("/opt/slurm/bin/srun", True), ("mpirun", False), ("srunner", False)],
)
def test_srun_is_known_by_its_name(name, answer):
    assert is_srun(name) is answer
    assert not is_srun(None)


@pytest.mark.parametrize(
    ("sinfo", "message"),
    [
        ("echo cannot connect >&2; exit 1", "no cluster answers sinfo (cannot connect)"),
        (list_nodes("n1 down* main*", "n2 drained main*"), "nodes: n1 down*, n2 drained"),
        (list_nodes("n1 idle other"), "no node of the cluster's default partition"),
        ("true", "its nodes: none"),
    ],
)
def test_a_cluster_that_takes_no_job_is_refused(tmp_path, beside, sinfo, message):
    with pytest.raises(ConfigurationError) as caught:
        srun.find_srun(make_slurm(tmp_path, sinfo), None, (4,))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_srun_it_says_where_srun_comes_from(monkeypatch, tmp_path, beside):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"'srun' is not a program in PATH: .*Slurm"):
        QUANTITY.find_launcher(QUANTITY.parse(["--launcher", "srun"]))


@given(available=st.integers(1, 20), ranks=st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_ranks_are_spread_over_the_most_nodes_that_fit_all(available, ranks):
    chosen = srun._choose_nodes(available, ranks)
    fitting = [n for n in range(1, available + 1) if all(count % n == 0 for count in ranks)]
    assert chosen == max(fitting)


def test_nodes_that_are_busy_count_and_each_counts_once(tmp_path, beside):
    rows = ["n1 idle main*", "n2 mixed main*", "n2 mixed debug", "n3 allocated main*", "n4 down m*"]
    found = srun.find_srun(make_slurm(tmp_path, list_nodes(*rows)), None, (3, 6))
    assert (found.nodes, found.version, found.inside) == (3, "22.05.8", False)
    assert found.title == "Slurm 22.05.8"


@pytest.mark.parametrize(
    ("nodes", "ranks", "message"),
    [
        (5, (5,), "--nodes 5: the cluster's default partition has usable 4"),
        (4, (4, 6), "--ranks 6 cannot be spread evenly over 4 nodes"),
    ],
)
def test_ranks_and_nodes_must_fit(tmp_path, beside, nodes, ranks, message):
    with pytest.raises(ConfigurationError, match=message):
        srun.find_srun(make_slurm(tmp_path, IDLE), nodes, ranks)


def test_inside_an_allocation_its_nodes_count(tmp_path, beside, monkeypatch):
    program = make_slurm(tmp_path, "exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    found = srun.find_srun(program, None, (4, 8))
    assert (found.nodes, found.inside) == (2, True)
    with pytest.raises(ConfigurationError, match="--nodes 4: the allocation has 2"):
        srun.find_srun(program, 4, (4,))


def test_the_usual_ranks_depend_on_the_launcher():
    assert QUANTITY.parse([]).plan.ranks == (2, 4)
    assert QUANTITY.parse(["--launcher", "srun"]).plan.ranks == (4, 8, 16)
    assert QUANTITY.parse(["--launcher", "srun", "--ranks", "6", "6"]).plan.ranks == (6,)


@pytest.mark.parametrize("size", ["1", "4"])
def test_it_is_not_run_as_a_step(tmp_path, monkeypatch, size):
    for name, value in (("STEP_ID", "0"), ("PROCID", "0"), ("STEP_NUM_TASKS", size)):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(LaunchError, match=r"srun started .*: run it without a launcher"):
        QUANTITY.find_launcher(QUANTITY.parse(["--launcher", make_slurm(tmp_path, IDLE)]))


def test_a_batch_script_may_run_it(tmp_path, monkeypatch):
    batch = {"STEP_ID": "4294967291", "PROCID": "0", "JOB_ID": "7", "JOB_NUM_NODES": "4"}
    for name, value in batch.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = QUANTITY.find_launcher(QUANTITY.parse(["--launcher", make_slurm(tmp_path, "exit 1")]))
    assert isinstance(found, srun.Srun)
    assert found.inside


def test_srun_keeps_its_cluster_and_mpi_settings_but_no_earlier_launch(monkeypatch):
    kept = ["SLURM_CONF", "SLURM_JOB_ID", "OMPI_MCA_pml", "PMIX_MCA_psec", "MPICH_GPU"]
    dropped = ["PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "RANK", "MASTER_ADDR"]
    dropped += ["MPI4PY_RC_INITIALIZE", "TORCHELASTIC_RUN_ID", "MKL_NUM_THREADS"]
    for name in [*kept, *dropped, "OMP_NUM_THREADS"]:
        monkeypatch.setenv(name, "7")
    environment = srun.Srun(Path("srun"), "", 4, False).environment({"ADDED": "1"})
    assert all(environment[name] == "7" for name in kept)
    assert not set(dropped) & set(environment)
    assert (environment["OMP_NUM_THREADS"], environment["ADDED"]) == ("1", "1")
    assert "SLURM_CONF" not in clean_environment()


def test_contenders_ask_for_the_same_nodes():
    launcher = srun.Srun(Path("/usr/bin/srun"), "22.05.8", 4, False)
    contenders = {each.name: each for each in list_on_cluster(16, launcher)}
    assert list(contenders) == [MPIDDP, SESSION, TORCHRUN, TORCHRUN_STATIC, FLOOR]
    for name, contender in contenders.items():
        command = contender.program.command
        per_node = 1 if contender.kind == "torchrun" else 4
        assert contender.program.reaches_out
        assert command[0] == "/usr/bin/srun" and "--nodes=4" in command
        assert f"--ntasks-per-node={per_node}" in command, name
        assert f"--ntasks={4 * per_node}" in command
        assert ("--mpi=pmix" in command) == (contender.kind == "mpiddp")
    # A torchrun starts its node's ranks, and may use as many cores as they.
    assert "--cpus-per-task=4" in contenders[TORCHRUN].program.command


# Phases


def make_group(ranks: int, *own: tuple[float, float, float], nodes: int | None = 4, **more):
    """A group whose session's runs took these seconds for address, store and group."""
    rest = {"MPI": 1.0, "import torch": 2.0, "first all-reduce": 0.01, "summary": 9.0}
    seconds = [rest | dict(zip(tables.OWN, each, strict=True)) for each in own]
    runs = [Run(5.0, None, None, 3.0, each) for each in seconds]
    plain = [Run(6.0, None, None, 3.0)] * len(runs)
    cells = []
    for name, each in {
        SESSION: runs,
        TORCHRUN: plain,
        TORCHRUN_STATIC: plain,
        FLOOR: plain,
    }.items():
        contender = Launch(name, "mpiddp", Program(("x",), {}, reaches_out=True), "")
        place = {"ranks": ranks, "nodes": nodes or 1}
        cells += make_cells(contender, make_series(list(enumerate(each)), 0), place)
    return CellGroup(ranks=ranks, nodes=nodes, cells=cells, **more)


PLAN = QUANTITY.parse([]).plan


def test_own_phases_are_summed_run_by_run():
    group = make_group(4, (0.1, 0.01, 0.02), (0.2, 0.02, 0.01))
    assert tables.sum_own(group) == pytest.approx([0.13, 0.23])
    phases = {cell.at["phase"] for cell in group.cells if cell.quantity == tables.PHASE}
    assert phases == set(tables.SHOWN)


def test_the_table_of_phases_is_in_milliseconds():
    groups = [
        make_group(4, *[(0.1, 0.01, 0.02)] * 6),
        make_group(8, *[(0.1, 0.03, 0.04)] * 6),
    ]
    lines = tables.format_phases(groups, 0).splitlines()
    assert "4 nodes" in lines[0] and "milliseconds" in lines[0]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:4]}
    assert rows["4"] == ["1000", "2000", "100", "10", "20", "10", "130", "130–130"]
    assert rows["8"] == ["1000", "2000", "100", "30", "40", "10", "170", "170–170"]
    assert lines[4] == "own grows by 10.00 ms (95 %: 10.00 to 10.00) per added rank, 4 to 8 ranks"


def test_without_phases_there_is_no_table():
    local = CellGroup(ranks=4)
    assert tables.format_phases([local], 0) == ""
    assert not tables.list_phased([local])
    assert judge([local], PLAN) == []


@pytest.mark.parametrize(("late", "reached"), [(0.02, True), (0.06, False)])
def test_targets_are_medians_and_the_growth(late, reached):
    groups = [make_group(n, *[(0.1, 0.01, 0.02 + late * (n - 4) / 12)] * 5) for n in (4, 8, 16)]
    *own, growth = judge(groups, PLAN)
    found = [target.found[""] for target in own]
    assert found == pytest.approx([0.13, 0.13 + late / 3, 0.13 + late])
    assert all(target.met and target.at_most == 0.3 for target in own)
    assert growth.found[""] == pytest.approx(1e3 * late / 12)
    assert (growth.at_most, growth.met) == (2.0, reached)


def test_targets_are_for_four_nodes_and_up_to_sixteen_ranks():
    other = make_group(4, (0.1, 0.1, 0.2), nodes=2)
    many = make_group(32, (0.1, 0.1, 0.2))
    four = make_group(4, (0.1, 0.1, 0.2))
    (target,) = judge([other, many, four], PLAN)
    assert (target.found, target.met) == ({"": pytest.approx(0.4)}, False)


def test_a_record_holds_phases_and_nodes():
    failure = Refusal(tables.START_UP, SESSION, "srun … ended with exit code 1", FAILED)
    failed = make_group(4, (0.1, 0.01, 0.02), refusals=[failure])
    group = make_group(8, (0.1, 0.2, 0.3))
    assert {cell.nodes for cell in group.cells} == {4}
    cells = [cell for cell in group.cells if cell.details.get("is_own")]
    own = {cell.at["phase"]: cell.samples for cell in cells}
    assert own == {"address": (0.1,), "store": (0.2,), "group": (0.3,)}
    assert f"{SESSION} 1" in tables.describe_failures(failed)
    assert tables.describe_failures(group) == ""


def test_what_cannot_be_known_of_other_machines_is_a_dash():
    group = make_group(4, (0.1, 0.01, 0.02))
    row = tables.format_group(group).splitlines()[2]
    assert row.startswith(SESSION) and row.split()[-1] == "–"
    assert tables.describe_others(group) == ""


# Runs that a cluster loses


@pytest.mark.parametrize(("lost", "ends"), [(1, True), (2, False)])
def test_a_run_that_the_cluster_lost_is_made_again_once(monkeypatch, lost, ends):
    calls = []

    def run(program, deadline):
        calls.append(program)
        if len(calls) <= lost:
            raise RunError("lost")
        return Run(1.0, None, None, None)

    monkeypatch.setattr(processes, "run", run)
    contenders = [Launch(FLOOR, "floor", Program(("true",), {}, reaches_out=True), "")]
    plan = QUANTITY.parse(["--repetitions", "2", "--warm-up", "0"]).plan
    if not ends:
        with pytest.raises(RunError):
            list(measure_group(plan, 4, 4, contenders))
        return
    (group,) = measure_group(plan, 4, 4, contenders)
    assert [failure.contender for failure in group.refusals] == [FLOOR]
    assert len(group.find_samples(FLOOR)) == 2


def test_an_interruption_keeps_the_whole_rounds(monkeypatch):
    calls = []

    def run(program, deadline):
        calls.append(program)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return Run(1.0, None, None, None)

    monkeypatch.setattr(processes, "run", run)
    contenders = [Launch(name, "floor", Program(("true",), {}), "") for name in "ab"]
    plan = QUANTITY.parse(["--repetitions", "9", "--warm-up", "1"]).plan
    groups = measure_group(plan, 2, None, contenders)
    assert [len(cell.samples) for cell in next(groups).cells] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        next(groups)


# Real runs


@pytest.mark.long
@pytest.mark.slurm
def test_it_measures_a_cluster(slurm_cluster, tmp_path):
    drawing = tmp_path / "startup.svg"
    arguments = ["--launcher", "srun", "--ranks", "4", "--repetitions", "1", "--warm-up", "0"]
    arguments += ["--hosts", "--output", str(drawing)]
    # Variables of an outer launch must not reach the ranks.
    variables = {**slurm_cluster.environment(), "PMIX_RANK": "7"}
    printed, found = record_benchmark(tmp_path / "a.jsonl", "startup", *arguments, **variables)
    assert "4 ranks on 4 nodes, 1 rounds" in printed
    places = found.environment["hosts"]["4"]
    assert len(places) == found.environment["nodes"] == 4
    assert sorted(places.values()) == [[0], [1], [2], [3]]
    samples = {
        (cell.contender, cell.at.get("part")): cell.samples[0]
        for cell in found.cells
        if cell.quantity == "start-up"
    }
    whole = [name for name, part in samples if part is None]
    assert whole == [MPIDDP, SESSION, TORCHRUN, TORCHRUN_STATIC, FLOOR]
    for name in whole[:-1]:
        assert 0 < samples[name, "first all-reduce"] < samples[name, None], name
    seen = {cell.at["phase"]: cell.samples[0] for cell in found.cells if "phase" in cell.at}
    assert set(tables.SHOWN) <= set(seen)
    assert all(seconds > 0 for seconds in seen.values())
    # Each starts when the one before has ended on all ranks, but for torch, whose import runs
    # beside MPI's start.
    in_turn = [seconds for name, seconds in seen.items() if name != "import torch"]
    assert sum(in_turn) < samples[SESSION, None]
    check_drawing(drawing)
    assert slurm_cluster.ask("squeue", "-h") == ""


@pytest.mark.long
@pytest.mark.slurm
def test_inside_an_allocation_runs_are_its_steps(slurm_cluster, tmp_path):
    record = tmp_path / "startup.jsonl"
    arguments = ["--launcher", "srun", "--ranks", "2", "--repetitions", "1", "--warm-up", "0"]
    around = (str(shutil.which("salloc")), "--quiet", "--nodes=2", "--ntasks=4", "--exclusive")
    before = newest_job(slurm_cluster)
    arguments += ["--output", str(record)]
    variables = {**slurm_cluster.environment(), "PMIX_RANK": "7"}
    answer = run_benchmark("startup", *arguments, around=around, **variables)
    assert answer.returncode == 0, answer.stderr
    assert read_record(record).environment["nodes"] == 2
    # No name of a node, unless it is asked for.
    names = slurm_cluster.ask("sinfo", "-h", "-N", "-o", "%N").split()
    assert not any(name in record.read_text() for name in names)
    # The allocation is one job, in which the runs made no others.
    assert newest_job(slurm_cluster) == before + 2


def newest_job(cluster) -> int:
    """The number of a job that is made for the purpose."""
    return int(cluster.ask("srun", "--quiet", "--ntasks=1", "printenv", "SLURM_JOB_ID"))


@pytest.mark.slurm
def test_the_ranks_of_each_node_are_told(slurm_cluster, monkeypatch):
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    found = srun.find_srun("srun", 2, (4,))
    places = found.place(4)
    assert list(places.values()) == [[0, 1], [2, 3]]
    assert set(places) < set(results.find_hosts(found))


@pytest.mark.long
@pytest.mark.slurm
def test_a_run_past_its_deadline_leaves_no_job(slurm_cluster):
    command = ("srun", "--quiet", "--nodes=4", "--ntasks=4", "sleep", "300")
    environment = clean_environment(slurm_cluster.environment())
    with pytest.raises(RunError, match="ran past 3 s"):
        processes.run(Program(command, environment, reaches_out=True), 3)
    until(lambda: slurm_cluster.ask("squeue", "-h") == "", "the end of the job", pause=0.1)
