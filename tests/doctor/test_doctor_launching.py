"""The launch itself: library, ranks and nodes, what happens to killed ranks."""

import json

import pytest

from copies import write_program
from doctors import read_recorded
from mpiddp.doctor.node import launching
from mpiddp.launch.launcher.launcher import Launcher, find_launcher
from mpiddp.launch.mpi.compatibility import library_name
from mpiddp.launch.mpi.world import Roster, World

SRUN = Launcher("slurm", "srun", 0, (4,), frozenset({"pmix"}))
MPIRUN = Launcher("openmpi", "Open MPI's mpirun", 0, (4,), frozenset({"pmix"}))


@pytest.mark.parametrize(
    ("version", "launcher", "status", "found"),
    [
        (None, None, "skip", "one process, which needs none"),
        ("Open MPI v5.0.8, package", SRUN, "pass", "Open MPI 5.0.8, started by srun (pmix)"),
        (
            "MPICH Version:\t4.2",
            None,
            "pass",
            "MPICH 4.2, started by no launcher that mpiddp knows",
        ),
    ],
)
def test_library(version, launcher, status, found):
    finding = launching.judge_library(version, launcher)
    assert (finding.status, finding.found) == (status, found)


def test_what_one_process_cannot_start(monkeypatch, tmp_path):
    finding = launching.judge_library(None, None, "no mpirun")
    assert (finding.status, finding.code) == ("fail", 3)
    assert finding.found.endswith("several cannot be started: no mpirun")
    assert launching.find_mpi({}) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = {"MPIDDP_MPIRUN": "/nowhere/mpirun"}
    assert "/nowhere/mpirun is not a program" in launching.find_mpi(missing)
    write_program(tmp_path / "srun", "exit 1")
    assert launching.find_mpi(missing) == ""


@pytest.mark.parametrize(
    ("asked", "problems", "status", "text"),
    [(2, "", "pass", "2 hosts reached over SSH, with the same "), (2, "no b", "fail", "no b")],
)
def test_hosts(asked, problems, status, text):
    finding = launching.judge_hosts(json.dumps({"asked": asked, "problems": problems}))
    assert finding.status == status and finding.text.startswith(text)
    assert finding.code == (2 if problems else 0)


def judge(roster, oddities=(), strangers=None):
    count = len(roster.hostnames)
    world = World(0, len(roster.nodes), 0, roster.local_sizes[0], 0, count, "n1", "n1")
    return launching.judge_ranks(world, roster, oddities, strangers or {})


def test_ranks_and_nodes():
    even = Roster(("n1", "n2"), (2, 2), (0, 0, 1, 1))
    assert judge(even).found == "4 ranks on 2 nodes (n[1-2]), 2 per node"
    uneven = Roster(("n1", "n2"), (3, 1), (0, 0, 0, 1))
    finding = judge(uneven)
    assert finding.status == "pass"
    assert finding.found == "4 ranks on 2 nodes (n[1-2]), 1 to 3 per node"


def test_what_is_odd_about_ranks_is_a_warning():
    roster = Roster(("n1",), (2,), (0, 0))
    finding = judge(roster, ["this is one process alone in an allocation of 4 tasks"])
    assert finding.status == "warn" and "alone in an allocation" in finding.found
    finding = judge(roster, strangers={"n1": ["box7"]})
    assert finding.status == "warn"
    assert "ranks on box7 share their memory with n1, but have another host name" in finding.found


@pytest.mark.parametrize(
    ("launcher", "setting", "variables", "status", "words"),
    [
        (None, None, {}, "skip", "no launcher"),
        (MPIRUN, None, {}, "pass", "mpirun ends the job when a rank is killed"),
        (SRUN, None, {"SLURM_KILL_BAD_EXIT": "1"}, "pass", "on (SLURM_KILL_BAD_EXIT)"),
        (SRUN, "1", {"SLURM_KILL_BAD_EXIT": "0"}, "warn", "SLURM_KILL_BAD_EXIT=0"),
        (SRUN, "1", {}, "pass", "Slurm's configuration"),
        (SRUN, "0", {}, "skip", "cannot be seen from a rank"),
        (SRUN, None, {}, "skip", "srun --kill-on-bad-exit=1"),
    ],
)
def test_kill_on_bad_exit(launcher, setting, variables, status, words):
    finding = launching.judge_kill_on_bad_exit(launcher, setting, variables)
    assert finding.status == status and words in finding.text


@pytest.mark.parametrize(
    ("program", "setting"),
    [
        ("echo 'KillWait                = 30 sec'; echo 'KillOnBadExit           = 1'", "1"),
        ("echo 'slurm_load_ctl_conf error' >&2; exit 1", None),
        ("exec sleep 1000", None),
        (None, None),
    ],
)
def test_slurm_is_asked_and_may_keep_silent(program, setting, tmp_path, monkeypatch):
    if program is not None:
        write_program(tmp_path / "scontrol", program)
        monkeypatch.setattr(launching, "SLURM_SECONDS", 0.2 if "sleep" in program else 60)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert launching.find_slurm_setting() == setting


@pytest.mark.parametrize("name", ["version_cray_perlmutter", "version_cray_julia"])
def test_a_cray_as_it_was_recorded(name):
    """PALS on a Cray, with what Cray's MPICH said of itself on other Crays.

    No whole environment of a rank that srun started with cray_shasta was found, only excerpts.
    """
    environment = read_recorded("environment_cray_pals").splitlines()
    launcher = find_launcher(dict(line.split("=", 1) for line in environment))
    assert (launcher.key, launcher.rank, launcher.sizes) == ("pals", 0, ())
    version = read_recorded(name)
    finding = launching.judge_library(version, launcher)
    assert finding.status == "pass" and finding.found.endswith(", started by HPE PALS")
    assert "CRAY MPICH version 8.1." in finding.found and library_name(version) in finding.found
    assert launching.judge_kill_on_bad_exit(launcher, None, {}).status == "pass"
