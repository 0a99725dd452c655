"""The MPI library against the launcher and the GPUs, before MPI_Init."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import psutil._psutil_linux
import pytest

import launchers
from copies import write_program
from mpiddp import environment
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi import compatibility, intel_mpi
from mpiddp.process import cpus

OPEN_MPI_5 = (
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, "
    "repo rev: v5.0.11rc1, Sep 16, 2026\0"
)
OPEN_MPI_4 = (
    "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022\0"
)
MPICH = (
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n"
    "MPICH Device:       ch4:ucx ofi\n"
    "MPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker\n"
)
MPICH_PMIX = MPICH.replace("--with-pm=hydra:gforker", "--with-pmix=/opt/pmix --with-pm=no")
INTEL = "Intel(R) MPI Library 2021.19.0 for Linux* OS\n"
CRAY = (
    "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\n"
    "MPI BUILD INFO : Sun Feb 26 15:15 2023 (git hash aecd99f)\n"
)
MVAPICH = "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : Wed March 02 22:00:00 EST 2022\n"

VERSIONS = {
    "open mpi 5": OPEN_MPI_5, "open mpi 4": OPEN_MPI_4, "mpich": MPICH,
    "mpich with pmix": MPICH_PMIX, "intel": INTEL, "cray": CRAY, "mvapich": MVAPICH,
}  # fmt: skip


def launcher(key: str, name: str, managers: str = "", size: int | None = 4) -> Launcher:
    return Launcher(key, name, 0, () if size is None else (size,), frozenset(managers.split()))


LAUNCHERS = {
    "mpirun": launcher("openmpi", "Open MPI's mpirun", "pmix"),
    "mpiexec": launcher("hydra", "MPICH's mpiexec (Hydra)", "pmi"),
    "srun pmix": launcher("slurm", "srun", "pmix"), "srun pmi2": launcher("slurm", "srun", "pmi"),
    "srun none": launcher("slurm", "srun"), "flux": launcher("flux", "Flux", "pmi"),
    "pals": launcher("pals", "HPE PALS", "pmi"), "jsm": launcher("jsm", "IBM JSM (jsrun)"),
    "torchrun": launcher("torchrun", "torchrun"),
    "torchrun in a step": launcher("torchrun", "torchrun", "pmix"),
}  # fmt: skip

# Libraries that can't join what the launcher offers. JSM brings its own PMIx library: it is
# believed, and the size is compared once MPI is up. torchrun in a step of srun's passes on what
# srun offers.
REFUSED = {
    "mpirun": {"mpich"}, "mpiexec": {"open mpi 5", "open mpi 4"}, "srun pmix": {"mpich"},
    "srun pmi2": {"open mpi 5", "open mpi 4"},
    "srun none": {"open mpi 5", "open mpi 4", "mpich", "mpich with pmix", "intel"},
    "flux": {"open mpi 5", "open mpi 4"}, "pals": {"open mpi 5", "open mpi 4"}, "jsm": set(),
    "torchrun": {"open mpi 5", "open mpi 4", "mpich", "mpich with pmix", "intel"},
    "torchrun in a step": {"mpich"},
}  # fmt: skip

SLURM_21 = """\
MPI types are...
none
pmix_v3
cray_shasta
pmi2
pmix
"""
SLURM_22 = """\
MPI plugin types are...
\tnone
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4
"""


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """Where the loaded library is said to be: an empty prefix, and no srun on the path."""
    folder = tmp_path / "opt" / "mpi"
    (folder / "lib").mkdir(parents=True)
    monkeypatch.setattr(compatibility, "library_path", lambda: folder / "lib" / "libmpi.so.40")
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cpus, "count_cores", lambda: 4)
    return folder


def offer(tmp_path: Path, text: str, stream: int) -> None:
    """Put an ``srun`` on the path that answers ``--mpi=list``."""
    answer = (
        "import os, sys\n"
        f"assert sys.argv[1:] == ['--mpi=list']\nos.write({stream}, {text!r}.encode())\n"
    )
    # A path with spaces cannot stand behind "#!".
    words = shlex.join([sys.executable, "-S", "-c", answer])
    write_program(tmp_path / "path" / "srun", f'exec {words} "$@"')


@pytest.mark.parametrize("started_by", LAUNCHERS)
@pytest.mark.parametrize("library", VERSIONS)
def test_every_library_under_every_launcher(library, started_by, prefix):
    row, version = LAUNCHERS[started_by], VERSIONS[library]
    # One process needs no manager.
    compatibility.check_library(version, launcher(row.key, row.name, size=1))
    if library not in REFUSED[started_by]:
        compatibility.check_library(version, row)
        return
    with pytest.raises(LaunchError) as caught:
        compatibility.check_library(version, row)
    message = str(caught.value)
    assert f"{row.name} started 4 processes" in message
    assert compatibility.library_name(version) in message
    assert "every process would be rank 0 of 1" in message
    assert re.search(r"tart it with( the [\w.]+ of [^:]+)?: ", message) and "\n" not in message


ALL_IN_ONE = Launcher("slurm", "srun", 0, (4,), frozenset({"pmi"}), is_on_one_host=True)
NEEDED = {"FABRIC": "libm.so.6", "PMIX": ("no.so", "libm.so.6")}
MISSING = {"FABRIC": "no.so.1", "PMIX": ("no.so", "no.so.2")}


@pytest.mark.parametrize(
    ("library", "started_by", "missing", "found"),
    [
        ("intel", "srun pmi2", "", {"I_MPI_NODEMAP_ALGORITHM": "pmi_alltoall"}),
        ("intel", "srun pmix", "", {"I_MPI_PMI_LIBRARY": "libm.so.6"}),
        ("intel", "mpiexec", "", {}),
        ("mpich", "srun pmi2", "FABRIC", {}),
        ("intel", "mpiexec", "FABRIC", "Intel MPI needs no.so.1 between hosts"),
        ("intel", "one host", "FABRIC", {"I_MPI_NODEMAP_ALGORITHM": "pmi_alltoall"}),
        ("intel", "srun pmix", "PMIX", "needs no.so under srun --mpi=pmix, .* --mpi=pmi2"),
    ],
)
def test_what_intel_mpi_needs_is_found_or_named(library, started_by, missing, found, monkeypatch):
    for name in NEEDED:
        monkeypatch.setattr(intel_mpi, name, (MISSING if name == missing else NEEDED)[name])
    row = {**LAUNCHERS, "one host": ALL_IN_ONE}[started_by]
    look = partial(intel_mpi.find_settings, VERSIONS[library], Path("/no/lib/libmpi.so.12"), row)
    if isinstance(found, str):
        with pytest.raises(LaunchError, match=found):
            look()
        return
    assert look() == found
    for name in found:
        monkeypatch.setenv(name, "the user's")
    assert look() == {}


@pytest.mark.parametrize(
    ("library", "started_by", "security", "outside", "is_refused"),
    [
        ("open mpi 4", "mpirun", "native", 1000, True),
        ("intel", "srun pmix", "native", 1000, True),
        ("open mpi 5", "srun pmix", "munge,native", 1000, False),
        ("open mpi 5", "srun pmix", "native", 0, False),
        ("mpich", "srun pmi2", "native", 1000, False),
        ("intel", "mpiexec", "native", 1000, False),
    ],
)
def test_pmix_refuses_the_user_of_a_container(
    library, started_by, security, outside, is_refused, monkeypatch
):
    monkeypatch.setenv(environment.PMIX_SECURITY_MODE, security)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(compatibility, "find_outer_user", lambda user: outside)
    monkeypatch.setattr(compatibility, "find_own_namespaces", lambda launcher: {"user"})
    with pytest.raises(LaunchError, match="user 1000 as user 0") if is_refused else nullcontext():
        compatibility.check_user(VERSIONS[library], LAUNCHERS[started_by])


@pytest.mark.parametrize(
    ("library", "hosts", "walls", "is_refused"),
    [
        ("intel", "n[1-2]", {"pid"}, True),
        ("intel", "n[1-2]", (), False),
        ("intel", "n[1-4]", {"pid"}, False),
        ("mpich", "n[1-2]", {"pid"}, False),
    ],
)
def test_intel_mpi_needs_memory_that_ranks_share(library, hosts, walls, is_refused, monkeypatch):
    monkeypatch.setenv(environment.SLURM_STEP_NODES, hosts)
    monkeypatch.setattr(compatibility, "find_own_namespaces", lambda launcher: walls)
    with pytest.raises(LaunchError, match="a container each") if is_refused else nullcontext():
        compatibility.check_memory(VERSIONS[library], LAUNCHERS["srun pmi2"])


@pytest.mark.parametrize(
    ("library", "named", "node", "is_refused"),
    [
        ("open mpi 4", "node1", "node2", True),
        ("open mpi 4", "node1", "node1", False),
        ("open mpi 4", socket.gethostname(), "node2", False),
        ("open mpi 4", "node1", "", False),
        ("open mpi 5", "node1", "node2", False),
    ],
)
def test_open_mpi_4_believes_an_enclosing_step(library, named, node, is_refused, monkeypatch):
    monkeypatch.setenv(environment.PMIX_HOST, named)
    monkeypatch.setenv(environment.SLURM_NODE_NAME, node)
    with pytest.raises(LaunchError, match="env -u PMIX_HOSTNAME") if is_refused else nullcontext():
        compatibility.check_host(VERSIONS[library], LAUNCHERS["mpirun"])


def test_an_open_mpi_4_with_pmi_components_joins_pmi2(prefix):
    components = prefix / "lib" / "openmpi"
    components.mkdir()
    mpi_4 = LAUNCHERS["srun pmi2"]
    with pytest.raises(LaunchError):
        compatibility.check_library(OPEN_MPI_4, mpi_4)
    (components / "mca_pmix_s2.so").touch()
    compatibility.check_library(OPEN_MPI_4, mpi_4)
    with pytest.raises(LaunchError):
        compatibility.check_library(OPEN_MPI_5, mpi_4)


@pytest.mark.parametrize(
    ("listed", "stream", "version", "managers", "command"),
    [
        (SLURM_22, 1, OPEN_MPI_5, "pmi", "Start it with: srun --mpi=pmix python"),
        (SLURM_22, 2, MPICH, "pmix", "Start it with: srun --mpi=pmi2 python"),
        (SLURM_22, 1, INTEL, "", "Start it with: srun --mpi=pmi2 python"),
        (SLURM_21.replace("\npmix\n", "\n"), 1, OPEN_MPI_5, "", "with: srun --mpi=pmix_v3 python"),
        ("MPI plugin types are...\n\tnone\n\tpmi2\n", 1, OPEN_MPI_5, "pmi",
         "srun offers pmi2, and none fits: inside the allocation, start it with the mpirun of"),
        ("MPI plugin types are...\n\tnone\n", 1, MPICH, "",
         "srun offers nothing, and none fits: inside the allocation, start it with the mpiexec"),
        (SLURM_21, 1, CRAY, "", "Start it with: srun --mpi=cray_shasta python"),
    ],
)  # fmt: skip
def test_the_command_is_taken_from_what_srun_offers(
    listed, stream, version, managers, command, prefix, tmp_path
):
    offer(tmp_path, listed, stream)
    assert command in compatibility.alone_message(version, launcher("slurm", "srun", managers))


def test_an_srun_that_hangs_offers_nothing(prefix, monkeypatch):
    def hang(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    message = compatibility.alone_message(OPEN_MPI_5, LAUNCHERS["srun none"])
    assert "start it with the mpirun of Open MPI 5.0.11: mpirun -n 4 python" in message


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-m", "mpiddp.train", "--data", "digits"], "python -m mpiddp.train …"),
        (["-X", "dev", "-Wignore", "my train.py"], "python 'my train.py'"),
        # Code may have many lines, and a message has one.
        (["-c", "import mpiddp\nmpiddp.init()", "x"], "python -c …"),
    ],
)
def test_the_command_runs_the_same_program(words, shown, prefix, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", *words])
    assert compatibility.alone_message(MPICH, LAUNCHERS["mpirun"]).endswith(f"-n 4 {shown}")
    # Without an srun that answers, the mpirun beside the library is named.
    program = prefix / "bin" / "mpirun"
    program.parent.mkdir()
    for is_there, named in ((False, "the mpirun of Open MPI 5.0.11: mpirun"), (True, "PROGRAM")):
        if is_there:
            program.touch()
        message = compatibility.alone_message(OPEN_MPI_5, LAUNCHERS["srun none"])
        assert message.replace(f"with: {program}", "with PROGRAM").endswith(f"{named} -n 4 {shown}")


@pytest.mark.parametrize(
    ("user", "cores", "version", "started_by", "words"),
    [
        (0, 4, OPEN_MPI_5, "mpiexec", ": mpirun --allow-run-as-root -n 4 python"),
        (0, 4, MPICH, "mpirun", ": mpiexec -n 4 "),
        # More ranks than cores. Slurm's allocation has a slot for each task.
        (1000, 2, OPEN_MPI_5, "mpiexec", ": mpirun --map-by :OVERSUBSCRIBE -n 4 python"),
        (1000, 2, OPEN_MPI_4, "mpiexec", ": mpirun --oversubscribe -n 4 python"),
        (1000, 2, MPICH, "mpirun", ": mpiexec -n 4 "),
        (1000, 2, OPEN_MPI_5, "srun none", ": mpirun -n 4 python"),
    ],
)
def test_what_open_mpi_does_unasked_is_asked_for(
    user, cores, version, started_by, words, prefix, monkeypatch
):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(cpus, "count_cores", lambda: cores)
    assert words in compatibility.alone_message(version, LAUNCHERS[started_by])


# Cray MPICH's GPU transport layer

CHECK = """
import sys
from mpiddp.errors import LaunchError
from mpiddp.launch.mpi import compatibility, mpi
try:
    compatibility.check_gpu_support()
except LaunchError as error:
    said = str(error)
    try:
        mpi.load(None)
    except LaunchError as again:
        assert str(again) == said and "mpi4py.MPI" not in sys.modules
        sys.exit(f"refused: {said}")
"""
ASKED = {"MPICH_GPU_SUPPORT_ENABLED": "1", "CRAY_MPICH_VERSION": "8.1.25"}


def check(env: dict[str, str]) -> launchers.Result:
    return launchers.run("alone", 1, ["-c", CHECK], env=env)


def test_a_gpu_library_that_is_loaded_is_found_where_it_is_asked_for(tmp_path, monkeypatch):
    # A shared library of that name; any will do.
    library = shutil.copy(psutil._psutil_linux.__file__, tmp_path / "libmpi_gtl_cuda.so")
    check({**ASKED, "LD_PRELOAD": str(library)}).expect(0)
    check({**ASKED, "MPICH_GPU_SUPPORT_ENABLED": "0"}).expect(0)
    # Not a Cray: its MPICH doesn't know the variable.
    check({"MPICH_GPU_SUPPORT_ENABLED": "1"}).expect(0)
    # Something has loaded it, or it is not asked for.
    for value, mapped in (("1", [str(library)]), ("", [])):
        launchers.set_variables(monkeypatch, ASKED | {"MPICH_GPU_SUPPORT_ENABLED": value})
        monkeypatch.setattr(compatibility, "mapped_files", mapped.copy)
        compatibility.check_gpu_support()


@pytest.mark.parametrize(("linked", "code"), [(b"libmpi_gtl_hsa.so.0", 0), (b"libmpi.so.12", 1)])
def test_a_linked_gpu_library_is_found(linked, code, tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF\0" + linked + b"\0")
    path = f"{tmp_path}:{launchers.ROOT}"
    result = check({**ASKED, "PYTHONPATH": path}).expect(code)
    said = ("=1 asks Cray MPICH", "libmpi_gtl_hsa", "export MPICH_GPU_SUPPORT_ENABLED=0")
    assert all((part in result.stderr) == bool(code) for part in said)
    assert "Traceback" not in result.stderr
