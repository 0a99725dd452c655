"""The startup benchmark: launchers, contenders, reports, finding a cluster, and real small runs."""

import contextlib
import itertools
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import documents
from benchmark_runs import check_drawing, record_benchmark, run_benchmark
from benchmarks import __main__ as commands
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.launching import launchers, processes, srun
from benchmarks.measure.launching.processes import Program, Run, RunError
from benchmarks.measure.launching.srun import Srun
from benchmarks.measure.startup import launches, tables
from benchmarks.measure.startup.contenders import QUANTITY, make_cells, measure_group
from benchmarks.measure.startup.launches import (
    FLOOR,
    FRONT,
    HELP,
    MPIDDP,
    MPIDDP_TUNED,
    PYTHON,
    SESSION,
    TORCHRUN,
    TORCHRUN_STATIC,
    Launch,
    list_contenders,
    list_on_cluster,
)
from benchmarks.measure.startup.tables import format_group
from benchmarks.measure.startup.targets import judge
from benchmarks.records.environment import ROOT, clean_environment
from benchmarks.records.schema import read_record
from benchmarks.records.statistics import make_series
from benchmarks.show import results
from copies import make_mpirun, write_program
from launchers import is_alive, run_python, until
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.options.outputs import PICTURE, check_outputs, writes
from mpiddp.process import cpus

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2"


@pytest.mark.parametrize(
    ("text", "title", "tuned", "crowded"),
    [
        (OPEN_MPI_5, "Open MPI 5.0.11", "self,sm", ":OVERSUBSCRIBE"),
        (OPEN_MPI_4, "Open MPI 4.1.4", "self,vader", "--oversubscribe"),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "Open MPI 4.1.4", "self,vader", "--oversubscribe"),
        (MPICH, "MPICH 5.0.2", None, None),
        ("something else 1.0", "mpirun", None, None),
    ],
)
def test_each_mpi_is_recognised(tmp_path, monkeypatch, text, title, tuned, crowded):
    """Each has its own words for shared memory, for more ranks than cores, and for root."""
    monkeypatch.setattr(launchers, "share_memory", lambda ranks: True)
    monkeypatch.setattr(cpus, "count_cores", lambda: 4)
    mpirun = launchers.find_mpirun(str(make_mpirun(tmp_path, text)), {})
    assert mpirun.title == title
    assert mpirun.tuned.get("OMPI_MCA_btl") == tuned
    names = [each.name for each in list_contenders(2, mpirun)]
    assert (MPIDDP_TUNED in names) == (tuned is not None)
    assert {MPIDDP, TORCHRUN, TORCHRUN_STATIC, FLOOR} <= set(names)
    monkeypatch.setattr(launchers, "share_memory", lambda ranks: False)
    assert mpirun.tuned.get("OMPI_MCA_btl") == (tuned and f"{tuned},tcp")
    for user, ranks in ((0, 4), (1000, 5)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        command = mpirun.command(ranks)
        assert ("--allow-run-as-root" in command) == (tuned is not None and user == 0)
        assert ("--bind-to" in command) == (tuned is not None)
        is_crowded = crowded is not None and ranks == 5
        assert (crowded in command) == is_crowded
        assert ("OMPI_MCA_mpi_yield_when_idle" in mpirun.variables(ranks)) == is_crowded


def test_the_environment_of_an_earlier_launch_is_removed(monkeypatch):
    """srun keeps the settings of its cluster and of MPI."""
    inherited = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_SIZE", "RANK", "LOCAL_WORLD_SIZE"]
    inherited += ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "HYDI_CONTROL_FD"]
    inherited += ["MPI_LOCALRANKID", "MPI4PY_RC_INITIALIZE", "MKL_NUM_THREADS"]
    of_cluster = ["SLURM_CONF", "SLURM_JOB_ID", "OMPI_MCA_pml"]
    kept = ["PMIX_MCA_psec", "MPICH_GPU", "RANKING"]
    for name in [*inherited, *of_cluster, *kept, "OMP_NUM_THREADS"]:
        monkeypatch.setenv(name, "7")
    here = clean_environment({"ADDED": "1"})
    there = srun.Srun(Path("srun"), "", 4, False).environment({"ADDED": "1"})
    assert not {*inherited, *of_cluster} & here.keys() and not {*inherited} & there.keys()
    assert all(there[name] == "7" for name in (*of_cluster, *kept))
    for environment in (here, there):
        assert (environment["OMP_NUM_THREADS"], environment["ADDED"]) == ("1", "1")
    assert here["RANKING"] == "7"
    assert here["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


def test_ranks_find_the_files_that_variables_name_relative_to_the_caller(monkeypatch, tmp_path):
    """They run in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    given = {"MPIDDP_TUNING": "t.json", "NCCL_CONF_FILE": "/etc/nccl", "PYTHONPATH": "lib:../other"}
    paths = [ROOT, tmp_path / "lib", tmp_path.parent / "other"]
    wanted = {"MPIDDP_TUNING": str(tmp_path / "t.json"), "NCCL_CONF_FILE": "/etc/nccl",
              "PYTHONPATH": ":".join(map(str, paths))}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    srun = Srun(Path("/usr/bin/srun"), "22.05.8", 2, False)
    for environment in (clean_environment(), srun.environment()):
        assert wanted.items() <= environment.items()


def test_contenders_differ_in_nothing_but_what_they_compare(tmp_path):
    mpirun = launchers.find_mpirun(str(make_mpirun(tmp_path, OPEN_MPI_5)), {})
    contenders = {each.name: each for each in list_contenders(2, mpirun)}
    plain, tuned = contenders[MPIDDP].program, contenders[MPIDDP_TUNED].program
    assert plain.command == tuned.command
    assert dict(tuned.environment) == {**plain.environment, **mpirun.tuned}
    assert contenders[TORCHRUN].program.environment == contenders[FLOOR].program.environment
    assert contenders[TORCHRUN].program.command[-2:] == plain.command[-2:]
    shown = "OMPI_MCA_pml=ob1 UCX_MEM_EVENTS=n OMPI_MCA_btl="
    assert contenders[MPIDDP_TUNED].describe().startswith(shown)
    assert str(ROOT) not in contenders[MPIDDP].describe()


PLAN = QUANTITY.parse([]).plan


def _group(ranks: int, **seconds: list[float]) -> CellGroup:
    names = {"tuned": MPIDDP_TUNED, "slow": TORCHRUN, "quick": TORCHRUN_STATIC, "floor": FLOOR}
    names |= {"plain": MPIDDP, "help": HELP, "front": FRONT}
    cells = []
    for key, values in seconds.items():
        series = make_series(list(enumerate(Run(v, v, 0.0, v / 2) for v in values)), 0)
        contender = Launch(names[key], "mpiddp", Program(("x",), {}), "")
        cells += make_cells(contender, series, {"ranks": max(1, ranks), "nodes": 1})
    return CellGroup(ranks=ranks, cells=cells)


def test_targets_are_ratios_of_rounds_to_the_quicker_torchrun():
    times = {"tuned": [1, 1.2, 5], "slow": [9, 9, 9], "quick": [2.5, 3, 14], "floor": [0.5, 1, 4]}
    group = _group(2, **{name: each * 6 for name, each in times.items()})
    torchrun, floor = judge([group], PLAN)
    assert "at most 0.5: 0.400: met; round by round (0.35" in str(torchrun)
    assert "at most 1.1: 1.250: missed; round by round (1.197–" in str(floor)
    assert str(floor).endswith("of medians 1.200")
    # A front may take a little longer.
    seconds = {"tuned": [1, 1.2, 5], "slow": [9] * 3, "quick": [8] * 3, "floor": [1, 1, 1]}
    *_, found = judge([_group(2, **seconds, front=[1.4, 1, 7])], PLAN)
    assert (found.met, found.found[""]) == (False, pytest.approx(0.2))
    *_, found = judge([_group(2, **seconds, front=[1.3, 1, 7])], PLAN)
    assert found.met
    # Defaults are judged where nothing is tuned, and two ranks alone.
    group = _group(2, plain=[1.0], slow=[1.0], quick=[4.0], floor=[1.0])
    assert [target.found for target in judge([group], PLAN)] == [{"": 1.0}, {"": 1.0}]
    four = _group(4, tuned=[1.0], slow=[1.0], quick=[1.0], floor=[1.0])
    (target,) = judge([four, _group(0, help=[0.3, 0.41, 0.5])], PLAN)
    assert (target.found, target.met) == ({"": 0.41}, False)


def test_the_table_shows_every_contender_and_ratios_round_by_round():
    seconds = {"tuned": [1.0, 3.0, 2.0], "slow": [4.0] * 3, "quick": [2.0, 4.0, 8.0]}
    lines = format_group(_group(2, **seconds, floor=[1.0] * 3)).splitlines()
    assert lines[0].startswith("2 ranks, 3 rounds")
    row = next(line for line in lines if line.startswith(MPIDDP_TUNED))
    # median, quartiles, no interval of three, half of the median, 1/2 3/4 1/4, 1 3 2, CPU
    expected = "2.000 1.500–2.500 – 1.000 0.50 2.00 2.00"
    assert row.removeprefix(MPIDDP_TUNED).split() == expected.split()
    assert len({len(line) for line in lines[1:6]}) == 1


def test_a_link_is_the_file_that_it_leads_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("q.svg").symlink_to("p.png")
    with pytest.raises(ConfigurationError, match="named twice"):
        check_outputs(tuple(map(writes(PICTURE).read, ("p.png", "q.svg"))))


def test_it_is_not_run_under_a_launcher(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="without a launcher"):
        QUANTITY.find_launcher(QUANTITY.parse([]))


def test_a_wrong_command_line_is_one_line_and_code_2():
    answer = run_benchmark()
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "no COMMAND given" in answer.stderr and answer.stderr.count("\n") == 1
    with pytest.raises(ConfigurationError, match="expected allreduce or reduce-scatter"):
        commands.run(["nope"])
    with pytest.raises(ConfigurationError, match="did you mean training-step"):
        commands.run(["train-step"])


PRINT_HELPS = """
import contextlib, io, runpy, sys

for command in sys.argv[1:]:
    sys.argv = ["benchmarks", *command.split(), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module("benchmarks", run_name="__main__", alter_sys=False)
        except SystemExit as error:
            assert not error.code
    assert not {"torch", "mpi4py", "matplotlib"} & set(sys.modules), command
    assert f"python -m benchmarks {command}" in printed.getvalue(), command
"""


def test_help_imports_neither_torch_nor_mpi():
    words = ["", "startup", "allreduce", "point-to-point", "training-step", "stragglers"]
    words += ["checkpoint", "numerics", "prove", "explain", "simulate"]
    run_python("-c", PRINT_HELPS, *words).expect(0)


def test_a_terminated_benchmark_ends_its_runs(tmp_path):
    note = tmp_path / "note"
    text = f'[ "$1" = --version ] && echo && exit\necho $$ >> {note}\nexec sleep 300'
    slow = write_program(tmp_path / "mpirun", text)
    # An order in which no torchrun comes first, which would be a real one.
    words = ["-m", "benchmarks", "startup", "--launcher", str(slow), "--ranks", "1", "--seed", "5"]
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    around = {"cwd": ROOT, "env": clean_environment(), **quiet}
    with subprocess.Popen([sys.executable, *words], **around) as benchmark:
        until(lambda: note.exists() and note.read_text(), "the first run")
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(30) == 130
    pid = int(note.read_text().split()[0])
    # Killed it is at once; whoever inherits it may take a moment to read its status.
    until(lambda: not is_alive(pid), "the end of the run")


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


def test_nodes_that_are_busy_count_and_each_counts_once(tmp_path, beside):
    rows = ["n1 idle main*", "n2 mixed main*", "n2 mixed debug", "n3 allocated main*", "n4 down m*"]
    found = srun.find_srun(make_slurm(tmp_path, list_nodes(*rows)), None, (3, 6))
    assert (found.nodes, found.version, found.inside) == (3, "22.05.8", False)
    # Over the most nodes that fit all.
    for ranks, nodes in (((4, 8), 2), ((4, 6), 2), ((5,), 1), ((3, 4), 1)):
        found = srun.find_srun(make_slurm(tmp_path, list_nodes(*rows)), None, ranks)
        assert found.nodes == nodes
    assert found.title == "Slurm 22.05.8"


def test_ranks_and_nodes_must_fit(tmp_path, beside):
    idle = list_nodes(*(f"node{number} idle main*" for number in range(4)))
    for nodes, ranks, message in (
        (5, (5,), "--nodes 5: the cluster's default partition has usable 4"),
        (4, (4, 6), "--ranks 6 cannot be spread evenly over 4 nodes"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            srun.find_srun(make_slurm(tmp_path, idle), nodes, ranks)


def test_inside_an_allocation_its_nodes_count(tmp_path, beside, monkeypatch):
    program = make_slurm(tmp_path, "exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    found = srun.find_srun(program, None, (4, 8))
    assert (found.nodes, found.inside) == (2, True)
    with pytest.raises(ConfigurationError, match="--nodes 4: the allocation has 2"):
        srun.find_srun(program, 4, (4,))


def test_a_batch_script_may_run_it_and_a_step_may_not(tmp_path, monkeypatch):
    batch = {"STEP_ID": "4294967291", "PROCID": "0", "JOB_ID": "7", "JOB_NUM_NODES": "4"}
    for name, value in batch.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    words = ["--launcher", make_slurm(tmp_path, "exit 1")]
    found = QUANTITY.find_launcher(QUANTITY.parse(words))
    assert isinstance(found, srun.Srun) and found.inside
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for size in ("1", "4"):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", size)
        with pytest.raises(LaunchError, match=r"srun started .*: run it without a launcher"):
            QUANTITY.find_launcher(QUANTITY.parse(words))


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
    for name, cores in ((TORCHRUN, 4), (FLOOR, 1)):
        assert f"--cpus-per-task={cores}" in contenders[name].program.command


@pytest.mark.parametrize("total", [1, 2])
def test_the_plain_script_tells_when_its_sum_was_known(total, monkeypatch, capsys):
    """On two ranks, of which the other one gives its 1 or nothing."""
    fakes = {"get_world_size": lambda: 2, "get_rank": int, "init_process_group": str,
             "destroy_process_group": int, "all_reduce": lambda it: it.fill_(total)}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.distributed, name, fake)
    monkeypatch.setattr(sys, "argv", [launches.SCRIPT, "-"])
    with contextlib.nullcontext() if total == 2 else pytest.raises(SystemExit, match="expected 2"):
        runpy.run_path(launches.SCRIPT)
    assert ('mpiddp-benchmark: {"finished": ' in capsys.readouterr().out) == (total == 2)


def make_group(ranks: int, *own: tuple[float, float, float], nodes: int | None = 4, **more):
    """A group whose session's runs took these seconds for address, store and group."""
    rest = {"MPI": 1.0, "import torch": 2.0, "first all-reduce": 0.01, "summary": 9.0}
    seconds = [rest | dict(zip(tables.OWN, each, strict=True)) for each in own]
    runs = [Run(5.0, None, None, 3.0, each) for each in seconds]
    plain = [Run(6.0, None, None, 3.0)] * len(runs)
    cells, others = [], dict.fromkeys((TORCHRUN, TORCHRUN_STATIC, FLOOR), plain)
    for name, each in {SESSION: runs, **others}.items():
        contender = Launch(name, "mpiddp", Program(("x",), {}, reaches_out=True), "")
        place = {"ranks": ranks, "nodes": nodes or 1}
        cells += make_cells(contender, make_series(list(enumerate(each)), 0), place)
    return CellGroup(ranks=ranks, nodes=nodes, cells=cells, **more)


def test_own_phases_are_summed_run_by_run_and_shown_in_milliseconds():
    group = make_group(4, (0.1, 0.01, 0.02), (0.2, 0.02, 0.01))
    assert tables.sum_own(group) == pytest.approx([0.13, 0.23])
    phases = {cell.at["phase"] for cell in group.cells if cell.quantity == tables.PHASE}
    assert phases == set(tables.SHOWN)
    groups = [make_group(4, *[(0.1, 0.01, 0.02)] * 6), make_group(8, *[(0.1, 0.03, 0.04)] * 6)]
    lines = tables.format_phases(groups, 0).splitlines()
    assert "4 nodes" in lines[0] and "milliseconds" in lines[0]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:4]}
    assert rows["4"] == ["1000", "2000", "100", "10", "20", "10", "130", "130–130"]
    assert rows["8"] == ["1000", "2000", "100", "30", "40", "10", "170", "170–170"]
    assert lines[4] == "own grows by 10.00 ms (95 %: 10.00 to 10.00) per added rank, 4 to 8 ranks"
    local = CellGroup(ranks=4)
    assert tables.format_phases([local], 0) == "" and judge([local], PLAN) == []
    # What cannot be known of other machines is a dash.
    row = tables.format_group(group).splitlines()[2]
    assert row.startswith(SESSION) and row.split()[-1] == "–"
    assert tables.describe_others(group) == ""


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
    many, four = (make_group(ranks, (0.1, 0.1, 0.2)) for ranks in (32, 4))
    (target,) = judge([other, many, four], PLAN)
    assert (target.found, target.met) == ({"": pytest.approx(0.4)}, False)


@pytest.fixture
def fail_runs(monkeypatch):
    """Lets the runs of these numbers, from 1 on, fail; the others take a second."""

    def plant(error, *numbers):
        counter = itertools.count(1)

        def run(program, deadline):
            if next(counter) in numbers:
                raise error
            return Run(1.0, None, None, None)

        monkeypatch.setattr(processes, "run", run)

    return plant


@pytest.mark.parametrize(("lost", "ends"), [((1,), True), ((1, 2), False)])
def test_a_run_that_the_cluster_lost_is_made_again_once(fail_runs, lost, ends):
    fail_runs(RunError("lost"), *lost)
    contenders = [Launch(FLOOR, "floor", Program(("true",), {}, reaches_out=True), "")]
    plan = QUANTITY.parse(["--repetitions", "2", "--warm-up", "0"]).plan
    if not ends:
        with pytest.raises(RunError):
            list(measure_group(plan, 4, 4, contenders))
        return
    (group,) = measure_group(plan, 4, 4, contenders)
    assert [failure.contender for failure in group.refusals] == [FLOOR]
    assert len(group.find_samples(FLOOR)) == 2


def test_an_interruption_keeps_the_whole_rounds(fail_runs):
    fail_runs(KeyboardInterrupt(), 6)
    contenders = [Launch(name, "floor", Program(("true",), {}), "") for name in "ab"]
    plan = QUANTITY.parse(["--repetitions", "9", "--warm-up", "1"]).plan
    groups = measure_group(plan, 2, None, contenders)
    assert [len(cell.samples) for cell in next(groups).cells] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        next(groups)


@pytest.mark.long
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
    starts = [cell for cell in found.cells if cell.quantity == "start-up"]
    samples = {(cell.contender, cell.at.get("part")): cell.samples[0] for cell in starts}
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


def test_the_ranks_of_each_node_are_told(slurm_cluster, monkeypatch):
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    found = srun.find_srun("srun", 2, (4,))
    places = found.place(4)
    assert list(places.values()) == [[0, 1], [2, 3]]
    assert set(places) < set(results.find_hosts(found))


@pytest.mark.long
@pytest.mark.mpi
def test_startup_measures_prints_and_writes(tmp_path):
    drawing = tmp_path / "startup.svg"
    arguments = documents.read_command("python -m benchmarks startup")
    arguments += ["--targets", "--output", str(drawing)]
    # Variables of an outer launch must not reach the ranks.
    record = tmp_path / "startup.jsonl"
    printed, found = record_benchmark(record, "startup", *arguments, PMIX_RANK="7")
    assert "2 ranks, 1 rounds" in printed
    targets = [line for line in printed.splitlines() if line.startswith("target:")]
    # Of torchrun's time, of the floor's, of the front's, and of the help.
    assert len(targets) == 4 and "--help" in targets[-1]
    cells = {(cell.ranks, cell.contender, cell.at.get("part")): cell for cell in found.cells}
    assert [name for ranks, name, _ in cells if ranks == 1] == [HELP, PYTHON]
    for (ranks, name, part), cell in cells.items():
        if ranks == 2 and part is None:
            assert cell.details["cpu_seconds"][0] > 0.5  # every contender imports torch
            if name != FLOOR:
                assert 0 < cells[2, name, "first all-reduce"].samples[0] < cell.samples[0]
    environment = found.environment
    assert environment["packages"]["torch"] and environment["mpi_library"]
    assert environment["command"].startswith("python -W error -m benchmarks startup")
    check_drawing(drawing)
