"""The startup benchmark: launchers, contenders, reports, command lines, and a real small run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import documents
from benchmark_runs import check_drawing, record_benchmark, run_benchmark, write_program
from benchmarks import __main__ as commands
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.launching import launchers, processes
from benchmarks.measure.launching.processes import Program, Run
from benchmarks.measure.launching.srun import Srun
from benchmarks.measure.startup.contenders import QUANTITY, make_cells
from benchmarks.measure.startup.launches import (
    FLOOR,
    FRONT,
    HELP,
    MPIDDP,
    MPIDDP_TUNED,
    PYTHON,
    TORCHRUN,
    TORCHRUN_STATIC,
    Launch,
    list_contenders,
)
from benchmarks.measure.startup.tables import format_group
from benchmarks.measure.startup.targets import judge
from benchmarks.records.environment import ROOT, clean_environment
from benchmarks.records.statistics import make_series
from copies import make_mpirun
from launchers import is_alive, run_python, until
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.options.outputs import FOLDER, PAGE, PICTURE, Kind, Output, check_outputs, writes
from mpiddp.process import cpus

# Launchers


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
        is_crowded = crowded is not None and ranks == 5
        assert (crowded in command) == is_crowded
        assert ("OMPI_MCA_mpi_yield_when_idle" in mpirun.variables(ranks)) == is_crowded


def test_an_mpirun_and_its_library_are_found(tmp_path):
    program = make_mpirun(tmp_path / "bin", MPICH)
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libmpi.so.12"
    library.touch()
    assert launchers.find_mpirun(str(program), {}).library == library
    named = launchers.find_mpirun(str(program), {"MPI4PY_LIBMPI": "/named/libmpi.so"})
    assert named.variables(2)["MPI4PY_LIBMPI"] == "/named/libmpi.so"
    other = make_mpirun(tmp_path / "other", OPEN_MPI_4)
    variables = {"MPIDDP_MPIRUN": str(other)}
    assert launchers.find_mpirun(None, variables).program == other
    assert launchers.find_mpirun(str(program), variables).program == program


def test_the_environment_of_an_earlier_launch_is_removed(monkeypatch):
    inherited = ["OMPI_COMM_WORLD_RANK", "OMPI_MCA_pml", "PMIX_RANK", "PMI_SIZE", "SLURM_JOB_ID"]
    inherited += ["RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"]
    inherited += ["HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MPI4PY_RC_INITIALIZE", "MKL_NUM_THREADS"]
    for name in [*inherited, "OMP_NUM_THREADS", "RANKING"]:
        monkeypatch.setenv(name, "7")
    environment = clean_environment({"ADDED": "1"})
    assert not set(inherited) & set(environment)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert (environment["RANKING"], environment["ADDED"]) == ("7", "1")
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


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


# The report


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


def test_a_front_may_take_a_little_longer():
    seconds = {"tuned": [1, 1.2, 5], "slow": [9, 9, 9], "quick": [8] * 3, "floor": [1, 1, 1]}
    *_, found = judge([_group(2, **seconds, front=[1.4, 1, 7])], PLAN)
    assert (found.met, found.found[""]) == (False, pytest.approx(0.2))
    *_, found = judge([_group(2, **seconds, front=[1.3, 1, 7])], PLAN)
    assert found.met


def test_defaults_are_judged_without_tuned_variables_and_two_ranks_alone():
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
    assert row.removeprefix(MPIDDP_TUNED).split() == (
        ["2.000", "1.500–2.500", "–", "1.000", "0.50", "2.00", "2.00"]
    )
    assert len({len(line) for line in lines[1:6]}) == 1


def test_without_matplotlib_a_drawing_is_refused_in_advance(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'mpiddp\[plot\]'"):
        check_outputs((Output(Path("drawing.svg"), PICTURE),))


def test_directories_and_links_as_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (".", "./", "/"):
        assert writes(Kind("folder", (FOLDER,))).read(text).path == Path(text)
    Path("x.html").mkdir()
    with pytest.raises(ConfigurationError, match="is a directory"):
        check_outputs((writes(PAGE).read("x.html"),))
    Path("q.svg").symlink_to("p.png")
    with pytest.raises(ConfigurationError, match="named twice"):
        check_outputs(tuple(map(writes(PICTURE).read, ("p.png", "q.svg"))))


# The command line


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
    words = ["-m", "benchmarks", "startup", "--launcher", str(slow), "--ranks", "1"]
    with subprocess.Popen(
        # An order in which no torchrun comes first, which would be a real one.
        [sys.executable, *words, "--seed", "5"],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as benchmark:
        until(note.exists, "the first run")
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(30) == 130
    pid = int(note.read_text().split()[0])
    # Killed it is at once; whoever inherits it may take a moment to read its status.
    until(lambda: not is_alive(pid), "the end of the run")


# Real runs


@pytest.mark.long
@pytest.mark.by_default("mpich")
@pytest.mark.mpi
def test_a_launcher_runs_the_contenders(either_launcher):
    library = either_launcher.libmpi
    variables = {"MPI4PY_LIBMPI": str(library)} if library else {}
    mpirun = launchers.find_mpirun(str(either_launcher.mpirun), variables)
    for contender in list_contenders(2, mpirun):
        if contender.kind == "mpiddp":
            run = processes.run(contender.program, 60)
            assert 0 < run.stamp_seconds < run.seconds


@pytest.mark.long
@pytest.mark.mpi
def test_startup_measures_prints_and_writes(tmp_path):
    drawing = tmp_path / "startup.svg"
    arguments = documents.read_command("python -m benchmarks startup")
    # Variables of an outer launch must not reach the ranks.
    printed, found = record_benchmark(
        tmp_path / "startup.jsonl", "startup", *arguments, "--targets", "--output", str(drawing),
        PMIX_RANK="7",
    )  # fmt: skip
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
