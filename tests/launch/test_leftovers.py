"""What a killed MPI leaves behind goes; what anybody uses, or may begin to use, stays."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

import launchers
from mpiddp.launch.launcher import leftovers

RANK = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def old(monkeypatch) -> None:
    """Files are old as soon as they are made."""
    monkeypatch.setattr(leftovers, "YOUNG_SECONDS", -1.0)


def list_sessions(scratch: Path) -> list[Path]:
    return [*scratch.glob("ompi.[0-9]*"), *scratch.glob("ompi.*/pid.*")]


def test_files_of_a_killed_job_go_once_no_rank_lives(recent_launcher, monkeypatch):
    def remove() -> None:
        # Only these are old: the memory has files of other tests, too.
        for each in (*segments, *list_sessions(scratch)):
            with contextlib.suppress(FileNotFoundError):
                os.utime(each, (0, 0))
        leftovers.remove()

    with launchers.start(recent_launcher, 2, ["-c", RANK]) as job:
        job.until(lambda: job.stdout().count("up\n") == 2, "ranks in MPI")
        ranks = job.ranks()
        scratch = Path(launchers.environ_of(ranks[0])["TMPDIR"])
        monkeypatch.setenv("TMPDIR", str(scratch))
        maps = Path("/proc", str(ranks[0]), "maps").read_text()
        segments = {*map(Path, re.findall(r"/dev/shm/\w*(?:segment|mpich_shm).*", maps))}
        sessions = list_sessions(scratch)
        # Intel MPI's segments have no name any more.
        assert bool(segments) == (recent_launcher.name != "impi")
        assert bool(sessions) == recent_launcher.name.startswith("openmpi")
        remove()
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        if sessions:  # The ranks of the others end with mpiexec.
            remove()
            assert job.ranks() == ranks
            assert [each for each in (*segments, *sessions) if not each.exists()] == []
        job.kill()
        end = time.monotonic() + 120
        while [each for each in (*segments, *list_sessions(scratch)) if each.exists()]:
            # The last files are closed a moment after a process has gone.
            assert time.monotonic() < end
            remove()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A temporary directory, and memory, in which nothing is yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(leftovers, "MEMORY", str(tmp_path))
    return tmp_path


def make_session(place: Path, process: int, host: str = os.uname().nodename) -> Path:
    path = place / f"ompi.{process}"
    (path / "1" / "0").mkdir(parents=True)
    for name in ("hwloc.sm", f"pmix.{host}.tool", "1/pmix-gds"):
        (path / name).touch()
    os.mkfifo(path / "1" / "fifo")
    return path


def test_what_is_open_is_in_use(place, old):
    segment, session = place / "sm_segment.host.0.1.0", make_session(place, 2**22 + 1)
    segment.touch()
    with segment.open("rb"), (session / "1" / "pmix-gds").open("rb"):
        leftovers.remove()
        assert segment.exists() and (session / "1" / "pmix-gds").exists()
    with mock.patch.object(os, "open", side_effect=PermissionError):
        leftovers.remove()
        assert segment.exists() and session.exists(), "what cannot be opened may be in use"
    leftovers.remove()
    assert list(place.iterdir()) == []


def test_what_is_young_or_not_known_stays(place):
    dead = 2**22 + 1
    names = [f"{kind}_segment.host.0.1.0" for kind in ("sm", "vader")]
    names += ["mpich_shm_1", "ucx_shm_posix_1", "segment"]
    kept = [place / names[-1], make_session(place, os.getpid())]
    kept.append(make_session(place, dead + 1, host="elsewhere"))
    lacking = make_session(place, dead + 2)
    (lacking / "hwloc.sm").unlink()
    gone = [*map(place.joinpath, names[:-1]), make_session(place, dead)]
    for name in names:
        (place / name).touch()
    (place / "sm_segment.link").symlink_to(kept[0])
    if os.geteuid() == 0:  # Another user's.
        kept.append(make_session(place, dead + 3))
        os.chown(kept[-1], 12345, 12345)
    leftovers.remove()
    assert all(path.exists() for path in (*kept, *gone))
    before = time.time() - 2 * leftovers.YOUNG_SECONDS
    for path in place.iterdir():
        os.utime(path, (before, before), follow_symlinks=False)
    leftovers.remove()
    assert set(place.iterdir()) == {*kept, lacking, place / "sm_segment.link"}


def test_what_is_as_young_as_a_job_that_has_ended_goes(place):
    older, younger = place / "sm_segment.host.0.1.0", place / "mpich_shm_1"
    for path in (older, younger):
        path.touch()
    began = time.time()
    os.utime(older, (began - 1, began - 1))
    os.utime(younger, (began + 1, began + 1))
    with younger.open("rb"):
        leftovers.remove(began)
        assert younger.exists()
    leftovers.remove(began)
    assert list(place.iterdir()) == [older]


def test_who_opens_a_file_while_it_is_looked_at_ends_nobody(place, old):
    """The kernel tells the holder of a lease that somebody opens the file."""
    segment = place / "sm_segment.host.0.1.0"
    opener = os.fork()
    if opener == 0:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            os.close(os.open(segment, os.O_RDWR | os.O_CREAT))
        os._exit(0)
    while os.waitpid(opener, os.WNOHANG) == (0, 0):
        leftovers.remove()
