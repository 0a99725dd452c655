"""The doctor in real jobs: its report, and the faults that one machine can have."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import copies
import launchers
from doctors import CHECKS, NO_TORCH, PATCHED, examine
from facts import messages

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hidden-aws-0c0ffee", "WANDB_API_KEY": "hidden-wandb-0c0ffee",
    "NCCL_FOO_TOKEN": "hidden-nccl-0c0ffee", "OMPI_MCA_foo_password": "hidden-mca-0c0ffee",
}  # fmt: skip
ROOT = launchers.ROOT


def write_wrapper(folder: Path, *lines: str) -> Path:
    """A stand-in for python that does ``lines`` of shell first; ``$rank`` is the rank."""
    begin, end = 'rank="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"', f'exec "{sys.executable}" "$@"'
    return copies.write_program(folder / "python-wrapper", "\n".join([begin, *lines, end]))


@pytest.mark.by_default("openmpi")
def test_a_good_launch(either_launcher, tmp_path):
    env = {**SECRETS, "NCCL_DEBUG": "WARN"}
    reading = examine(either_launcher, 2, "--output", "report.json", cwd=tmp_path, env=env)
    assert tuple(line.check for line in reading.lines) == CHECKS
    assert reading.bad() == ({"cores": "warn"} if len(os.sched_getaffinity(0)) < 2 else {})
    for check in ("links", "clocks"):
        assert reading.line(check).text == "one node" and reading.line(check).status == "skip"
    assert "2 ranks on 1 node" in reading.line("ranks").text
    assert "right on 2 ranks with gloo" in reading.line("all-reduce").text
    # Only what the launcher itself says may be on stderr.
    assert messages(reading.result) == [] and "Traceback" not in reading.result.stderr
    # The directory of runs was made, and taken away again.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is True and report["exit_code"] == 0 and report["ranks"] == 2
    assert len(report["nodes"]) == 1
    for row, line in zip(report["findings"], reading.lines, strict=True):
        assert (row["check"], row["status"], row["code"]) == (line.check, line.status, 0)
        assert row["found"] in line.text and row["advice"] in line.text
        assert 0 <= row["seconds"] <= report["seconds"] + 0.001 < 300

    shown = reading.line("variables").text
    assert "NCCL_FOO_TOKEN" in shown and "NCCL_DEBUG=WARN" in shown
    everything = reading.result.output + (tmp_path / "report.json").read_text()
    assert "WANDB" not in everything and "AWS" not in everything
    assert not [name for name, value in SECRETS.items() if value in everything]
    assert "\033" not in reading.result.stdout


def test_one_process_on_a_machine_without_mpi(tmp_path):
    absent = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    reading = examine("alone", 1, cwd=tmp_path, exit_code=3, patch=NO_TORCH, env=absent)
    line = reading.line("MPI library")
    assert line.status == "fail" and "several cannot be started" in line.text
    assert "mpi4py found no MPI library" in line.text and "pip install" in line.text
    # The rest is examined all the same.
    assert reading.line("ranks").status == "pass"
    assert reading.line("kill on bad exit").status == "skip"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.by_default("openmpi")
def test_help_comes_once_and_needs_nothing(either_launcher, tmp_path):
    program = (
        "import sys, runpy\n"
        "sys.argv = ['doctor', '--help']\n"
        "try:\n"
        "    runpy.run_module('mpiddp.doctor', run_name='__main__')\n"
        "finally:\n"
        "    assert not {'torch', 'mpi4py.MPI'} & sys.modules.keys()\n"
    )
    result = launchers.run(either_launcher, 2, ["-c", program], cwd=tmp_path).expect(0)
    assert result.stdout.count("usage: python -m mpiddp.doctor") == 1
    assert "--output FILE" in result.stdout and "Traceback" not in result.stderr


@pytest.mark.mpi
def test_a_library_that_cannot_join(tmp_path):
    rows = launchers.table()
    wrong = {"MPI4PY_LIBMPI": str(rows["mpich"].libmpi)}
    reading = examine(
        rows["openmpi"], 2, "--output", "report.json", cwd=tmp_path, exit_code=3, env=wrong
    )
    first, rest = reading.lines
    assert (first.check, first.status) == ("MPI library", "fail")
    assert "every process would be rank 0 of 1" in first.text and "Start it with: " in first.text
    assert (rest.check, rest.status) == ("the rest", "skip")
    assert messages(reading.result) == []
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 3 and report["complete"] is True


@pytest.mark.mpi
def test_other_code_on_one_rank(tmp_path):
    copy = tmp_path / "copy"
    copies.copy(ROOT / "mpiddp", copy / "mpiddp", ignore=shutil.ignore_patterns("*.pyc"))
    with (copy / "mpiddp" / "errors.py").open("a") as source:
        source.write("# A line more.\n")
    wrapper = write_wrapper(tmp_path, f'[ "$rank" = 1 ] && export PYTHONPATH="{copy}:$PYTHONPATH"')
    options = {"python": wrapper, "patch": NO_TORCH}
    reading = examine("openmpi", 3, cwd=tmp_path, exit_code=3, **options)
    line = reading.line("code")
    assert line.status == "fail" and line.text.startswith("rank 1 on ")
    # Python, mpi4py and the version are the same, and not said twice.
    assert " has code " in line.text and line.text.count("mpiddp 0.") == 1
    assert reading.lines[-1].check == "the rest" and len(reading.lines) == 5


@pytest.mark.long
@pytest.mark.mpi
def test_torch_that_cannot_be_imported_on_one_rank(tmp_path):
    folder = tmp_path / "broken"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(
        "raise ImportError('libtorch: gone\\nand more')\n"
    )
    wrapper = write_wrapper(
        tmp_path, f'[ "$rank" = 1 ] && export PYTHONPATH="{folder}:$PYTHONPATH"'
    )
    reading = examine("openmpi", 3, cwd=tmp_path, exit_code=1, python=wrapper)
    line = reading.line("import torch")
    assert line.status == "fail" and line.text.startswith("rank 1 on ")
    assert ": ImportError: libtorch: gone. Give all nodes the same environment" in line.text
    assert reading.lines[-1].check == "the rest" and reading.lines[-2] == line
    assert messages(reading.result) == [] and "Traceback" not in reading.result.output


SHARED_GPU = f"""{NO_TORCH}
from mpiddp.launch.device import device
torch.cuda.device_count = lambda: 1
device.find_identity = lambda index: "GPU-A"
"""


@pytest.mark.mpi
def test_limits_cores_and_threads_and_two_ranks_on_one_gpu(tmp_path):
    core = min(os.sched_getaffinity(0))
    bind = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    options = {
        "python": write_wrapper(tmp_path, "ulimit -n 200", f'set -- -c "{bind}" "$@"'),
        "patch": SHARED_GPU,
        "env": {"OMP_NUM_THREADS": "3"},
    }
    reading = examine("mpich", 2, cwd=tmp_path, exit_code=3, **options)
    warned = dict.fromkeys(("cores", "threads", "open files"), "warn")
    assert reading.bad() == {**warned, "GPUs": "fail"}
    cores, threads, files = (reading.line(check).text for check in warned)
    assert f"ranks 0-1 have only core {core} between them" in cores and "--cpus-per-task" in cores
    assert "6 threads of 2 ranks on 1 cores" in threads and "unset OMP_NUM_THREADS" in threads
    assert "limited to 200" in files and "ulimit -n" in files
    text = reading.line("GPUs").text
    assert "ranks 0, 1 would use a GPU that another rank uses" in text
    assert "--ntasks-per-node=1" in text and reading.lines[-1].check == "the rest"


# GPUs, Slingshot's cards and NCCL's log are pretended, and Gloo does NCCL's part: the rest is real.
PRETENDED_GPUS = """
import functools
import pathlib
import torch
from mpiddp.doctor.examiner import examiner
from mpiddp.doctor.gpu import gpus
from mpiddp.launch.device import device
from mpiddp.launch.rendezvous import store
torch.cuda.device_count = lambda: 2
device.find_identity = lambda index: f"GPU-{index}"
device.select = lambda placement: placement
device.choose_backend = lambda *_: "nccl"
root = pathlib.Path(os.environ["TMPDIR"])
examiner.find_fabrics = functools.partial(examiner.find_fabrics, root=root)
def examine_gpu(rank, taken):
    assert taken.index == rank
    return gpus.Gpu(rank, "NVIDIA H200", "2.27.3", True, frozenset({10**6}), 6e14 / (1 + 2 * rank))
gpus.examine_gpu = examine_gpu
real = store.make_group
def make_group(store, world, backend, taken, timeout):
    assert backend == "nccl" and os.environ["NCCL_DEBUG"] == "INFO"
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
        log.write("NCCL version 2.27.3+cuda12.9\\n"
                  "n:1:1 [0] NCCL INFO Using network Socket\\n"
                  "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\\n")
    real(store, world, "gloo", torch.device("cpu"), timeout)
store.make_group = make_group
reduce = store.first_all_reduce
def first_all_reduce(*words):
    reduce(*words)
    (root / "reduced").touch()
store.first_all_reduce = first_all_reduce
"""


@pytest.mark.mpi
def test_gpus_that_are_pretended(tmp_path):
    for place in (
        "sys/class/cxi/cxi0",
        "sys/class/cxi/cxi1",
        "proc/driver/nvidia/gpus/0000:10:00.0",
    ):
        (tmp_path / place).mkdir(parents=True)
    env = {"TMPDIR": str(tmp_path), "FI_MR_CACHE_MONITOR": "memhooks"}
    reading = examine("mpich", 2, cwd=tmp_path, exit_code=1, patch=PRETENDED_GPUS, env=env)
    bad = reading.bad()
    bad.pop("locked memory", None)
    warned = dict.fromkeys(("fabric", "GPU place", "GPU speed"), "warn")
    assert bad == {**warned, "NCCL transport": "fail"}
    text = reading.line("fabric").text
    assert "Slingshot (cxi0, cxi1), NVIDIA: libnccl-net.so is nowhere in LD_LIBRARY_PATH; " in text
    assert "FI_MR_CACHE_MONITOR=memhooks: " in text and "not set: FI_CXI_DISABLE_HOST" in text
    assert reading.line("NCCL version").text == "NCCL 2.27.3: nothing known against it"
    assert "one for each of 2 ranks (2 UUIDs)" in reading.line("GPUs").text
    assert reading.line("GPU kinds").text == "NVIDIA H200, NCCL 2.27.3 for every rank"
    assert "rank 1 on " in reading.line("GPU speed").text
    assert "its GPU is near 1000000" in reading.line("GPU place").text
    assert "with nccl" in reading.line("all-reduce").text
    text = reading.line("NCCL transport").text
    assert (
        "NCCL 2.27.3+cuda12.9" in text
        and "Slingshot (cxi0, cxi1), NVIDIA (in its log: “Using network Socket”). " in text
    )
    assert 'NCCL_NET="AWS Libfabric"' in text and "aws-ofi-nccl" in text
    assert (tmp_path / "reduced").exists() and not list(tmp_path.glob("mpiddp-nccl-*"))


LATE = f"""{NO_TORCH}
import time
from mpiddp.doctor.node import software
if rank == 1:
    software.find_versions = lambda: time.sleep(1000)
"""


@pytest.mark.mpi
def test_a_stage_that_takes_too_long(tmp_path):
    program = PATCHED.format(patch=LATE)
    words = ["-c", program, "--timeout", "20", "--output", "report.json"]
    result = launchers.run("openmpi", 3, words, cwd=tmp_path).expect(4)
    (line,) = messages(result)
    assert "'code' within 20 s; waited for rank 1 on " in line
    assert "MPI library" in result.stdout and "Traceback" not in result.output
    # What was known until then has been written.
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is False and report["exit_code"] is None
    assert [row["check"] for row in report["findings"]] == list(CHECKS[:3])


RAISING = f"""{NO_TORCH}
from mpiddp.doctor.node import cores
def fail(bindings):
    raise ZeroDivisionError("in the doctor itself")
cores.judge_cores = fail
"""


@pytest.mark.mpi
def test_a_failure_of_the_doctor_itself(tmp_path):
    program = PATCHED.format(patch=RAISING)
    result = launchers.run("mpich", 2, ["-c", program], cwd=tmp_path).expect(1)
    assert result.stderr.count("ZeroDivisionError: in the doctor itself") == 1
    # Rank 0's own file is not left behind.
    assert list(tmp_path.iterdir()) == []
