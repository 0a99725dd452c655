"""Machines: processes that hold a node's namespaces, and how to run something inside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from requirements import UNSHARE
from state import ClusterError, Machine, directory, local_directory, machine_directory

BOOT = Path(__file__).with_name("boot.sh")
BOOT_SECONDS = 5.0
KILL_SECONDS = 3.0


def find_init(machine: Machine) -> int | None:
    """The machine's first process, by this machine's numbering; None if it is not running."""
    try:
        pid, began = (machine_directory(machine) / "init").read_text().split()
    except (OSError, ValueError):
        return None
    # A number may have been given to another process since; its time of birth tells.
    return int(pid) if _birth(int(pid)) == began else None


def _birth(pid: int) -> str | None:
    """When a process began, in clock ticks since the kernel did; None for a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def boot(machine: Machine) -> None:
    """Start a machine's first process and wait until it is ready. Raises ClusterError."""
    folder = machine_directory(machine)
    with contextlib.suppress(FileNotFoundError):
        (folder / "init").unlink()
    # What the last life of this node left would confuse slurmd's next one.
    for name in ("spool", "pmix"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(mode=0o755)
    command = [*UNSHARE, "--kill-child", "bash", str(BOOT), machine.name, str(directory())]
    with (folder / "boot.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    end = time.monotonic() + BOOT_SECONDS
    while find_init(machine) is None:
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise ClusterError(
                f"{machine.name} did not start: {(folder / 'boot.log').read_text().strip()}"
            )
        time.sleep(0.01)


def kill(machines: Sequence[Machine]) -> None:
    """End machines and every process on them. Raises ClusterError if one does not go."""
    _kill([pid for pid in map(find_init, machines) if pid is not None])


def kill_all() -> None:
    """End every machine of the state directory, those of a start that broke off, too."""
    _kill([pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _boots(pid)])


def _boots(pid: int) -> bool:
    """Whether a process runs boot.sh for the state directory, or is the unshare before it.

    Anybody's boot.sh: another checkout's cluster ends as well.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return False
    if len(words) < 4 or words[-1] != os.fsencode(directory()):
        return False
    return words[-4] == b"bash" and words[-3].endswith(b"/" + os.fsencode(BOOT.name))


def _kill(dying: Sequence[int]) -> None:
    for pid in dying:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + KILL_SECONDS
    while any(_birth(pid) is not None for pid in dying):
        if time.monotonic() > end:
            raise ClusterError("processes of the cluster do not end, killed or not")
        time.sleep(0.01)


def enter(machine: Machine, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` on a machine. Raises ClusterError if it is down."""
    init = find_init(machine)
    if init is None:
        raise ClusterError(f"{machine.name} is not running; start it with: jobs/cluster/up")
    spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
    return ["nsenter", "--target", str(init), *spaces, "--", *command]


def run(machine: Machine, *command: str) -> str:
    """Run a program on a machine; returns what it prints. Raises ClusterError if it fails."""
    done = subprocess.run(enter(machine, command), capture_output=True, text=True, cwd="/")
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"on {machine.name}, {' '.join(command)} failed: {said}")
    return done.stdout


def start_munge(machine: Machine) -> None:
    """Start munged on a machine, unless it runs there."""
    local = local_directory()
    if is_alive(machine, "munged"):
        return
    for name in ("munge.socket", "munge.socket.lock", "munged.pid"):
        (machine_directory(machine) / name).unlink(missing_ok=True)
    run(
        machine,
        "munged",
        f"--key-file={directory()}/munge.key",
        f"--socket={local}/munge.socket",
        f"--pid-file={local}/munged.pid",
        f"--log-file={local}/munged.log",
        f"--seed-file={local}/munged.seed",
        "--num-threads=2",
    )


def start_daemon(machine: Machine, *command: str) -> None:
    """Start one of Slurm's daemons on a machine, unless it runs there."""
    if not is_alive(machine, command[0]):
        run(machine, "env", f"SLURM_CONF={directory()}/slurm.conf", *command)


def is_alive(machine: Machine, program: str) -> bool:
    """Whether ``program`` runs on a machine that runs."""
    if find_init(machine) is None:
        return False
    return subprocess.run(enter(machine, ["pidof", program]), capture_output=True).returncode == 0


def hang_up(machine: Machine, program: str) -> None:
    """Let a daemon read its configuration again."""
    subprocess.run(enter(machine, ["pkill", "--signal", "HUP", program]), capture_output=True)
