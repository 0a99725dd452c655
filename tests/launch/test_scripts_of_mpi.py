"""Scripts that start MPI, end it, or start programs that do: as under a bare mpirun."""

import os
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

import launchers
from mpiddp.launch.mpi import mpi
from mpiddp.launch.script import silence

PREFIX = ["-m", "mpiddp", "--quiet"]

OWN = """
    import mpi4py
    mpi4py.rc(initialize=False, finalize=False)
    from mpi4py import MPI

    MPI.Init()
    assert MPI.Init_thread() == MPI.Query_thread() and MPI.Is_initialized()
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    assert MPI.COMM_WORLD.allreduce(1) == 2 and not MPI.Is_finalized()
    if MPI.COMM_WORLD.Get_rank() == 0:
        MPI.Finalize()
        assert MPI.Is_finalized()

    # torch's messages go on after MPI's.
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("sum", ones.item(), flush=True)
"""


def run(launcher, tmp_path, text, *words, ranks=2, **options):
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    arguments = [*PREFIX, "script.py", *words]
    return launchers.run(launcher, ranks, arguments, cwd=tmp_path, **options)


def test_a_script_may_start_and_end_mpi_itself(recent_launcher, tmp_path):
    """One of its ranks ends it, in the middle."""
    result = run(recent_launcher, tmp_path, OWN).expect(0)
    assert result.stdout.splitlines() == ["sum 2.0"] * 2
    assert "MPI_" not in result.stderr.upper() and "hint" not in result.stderr


@pytest.mark.parametrize(
    ("is_own", "is_left", "is_ended"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_mpi_is_ended_once_who_has_started_it_has_done_with_it(
    is_own, is_left, is_ended, monkeypatch
):
    ended = []
    monkeypatch.setattr(mpi, "finalize", ended.append)
    monkeypatch.setattr(mpi, "has_ended", lambda _: False)
    names = ("Init", "Init_thread", "Finalize", "Is_finalized")
    module = SimpleNamespace(**dict.fromkeys(names, lambda: False))
    before = dict(vars(module))
    kept = mpi.KeptMpi(module, is_own=is_own)
    if is_left:
        module.Finalize()
    assert module.Is_finalized() is is_left and not ended
    kept.close()
    assert ended == [module] * is_ended and vars(module) == before


LIBRARY = """
    import ctypes
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == 2
    ctypes.CDLL(MPI.__file__).MPI_Finalize()
    if __import__("os").environ["RANK"] == "1":
        raise ValueError("after MPI")
"""


@pytest.mark.mpi
def test_a_library_may_end_mpi_for_good(tmp_path):
    result = run("openmpi", tmp_path, LIBRARY).expect(1)
    assert "after MPI_FINALIZE" not in result.stderr
    assert result.stderr.count("ValueError: after MPI") == 1


STARTS = """
    import multiprocessing, subprocess, sys
    from mpi4py import MPI

    # A worker that is spawned comes here as well.
    RANK = MPI.COMM_WORLD.Get_rank() if "asks" in sys.argv or __name__ == "__main__" else None
    INNER = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1), flush=True)"

    def work():
        print("worker", RANK, flush=True)

    if __name__ == "__main__":
        # On all ranks, since MPI_Init waits for as many.
        worker = multiprocessing.get_context("spawn").Process(target=work)
        worker.start()
        worker.join()
        with open("inner.py", "w") as file:
            file.write(INNER)
        mpirun, python = sys.argv[1], sys.executable
        plain = [mpirun, "-n", "2", python]
        for start in (plain, [python, "-m", "mpiddp", "--launcher", mpirun, "-n", "2"]):
            if RANK == 0:
                said = subprocess.check_output([*start, "inner.py"], text=True, stdin=-3)
                print(said.split(), flush=True)
"""
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "asks", "workers"), [("openmpi", "asks", ["0", "1"]), ("mpich", "", ["None", "None"])]
)
def test_what_a_rank_starts_may_use_mpi(name, asks, workers, tmp_path):
    """Ranks of its own, and workers; Open MPI 5 takes these for the rank that has started them."""
    words = [str(launchers.find(name).mpirun), asks]
    result = run(name, tmp_path, STARTS, *words, env=ALLOWED).expect(0)
    lines = sorted(result.stdout.splitlines())
    assert lines == ["['2', '2']", "['2', '2']", *(f"worker {worker}" for worker in workers)]


# The hint


SILENT = """
    import torch

    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    print("done")
"""


@pytest.mark.mpi
def test_ranks_that_never_talked_are_told_so_once(tmp_path):
    result = run("openmpi", tmp_path, SILENT).expect(0)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("mpiddp: ")]
    assert line.startswith("mpiddp: hint: the 2 ranks never talked to each other")


@pytest.mark.parametrize(
    ("text", "knows"),
    [
        ("def main():\n    from mpi4py import MPI\n", True),
        ("import os\nprint(os.getenv('OMPI_COMM_WORLD_RANK'), os.getenv('SLURM_PROCID'))", True),
        ("import os, torch\ntorch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))\n", False),
    ],
)
def test_a_script_that_knows_its_rank_is_not_told(text, knows, tmp_path):
    module = ModuleType("part")
    module.__file__ = str(tmp_path / "part.py")
    (tmp_path / "part.py").write_text(text)
    assert silence._knows_ranks("part", module) is knows
    # What is installed is not the script's own; one that has MPI is enough.
    module.__file__ = os.path.join(sys.prefix, "gone.py")
    assert not silence._knows_ranks("part", module)
