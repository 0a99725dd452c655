"""What the machine must have: Linux, root, a few packages, and a kernel that can make networks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from state import ClusterError

# Slurm's pmix plugin opens libpmix.so by this name, which only the development package has.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
PMIX_PACKAGE = "libpmix-dev"
SYSTEM_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
ATTEMPT = (
    "hostname h && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && "
    "ip link add b0 type bridge && ip link add v1 type veth peer name v2"
)
DEVICE = " && mknod /dev/shm/gpu c 1 3"
SHAPING = " && tc qdisc add dev v1 root tbf rate 1gbit burst 125kb latency 50ms"
UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork")


def check_root() -> None:
    """Raises ClusterError unless this is root on Linux."""
    if platform.system() != "Linux":
        raise ClusterError(f"the cluster is made of Linux namespaces; this is {platform.system()}")
    if os.geteuid() != 0:
        raise ClusterError("the cluster is made by root (namespaces, mounts): use sudo, or be root")
    # sudo and cron may leave the daemons' directories out.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_PATHS])


def find_missing() -> list[str]:
    """The packages, by Debian's names, that are not installed."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not has_pmix(Path("/usr"), has_slurm="slurmd" not in missing):
        missing.append(PMIX_PACKAGE)
    return list(dict.fromkeys(missing))


def has_pmix(usr: Path, *, has_slurm: bool) -> bool:
    """Whether the library is there that Slurm's pmix plugin opens, if Slurm has the plugin.

    Debian's Slurm, which is still to be installed if there is none, has it.
    """
    libraries = (usr / "lib", *(usr / "lib").glob("*-linux-gnu"), usr / "lib64")
    folders = [folder / sub for folder in libraries for sub in ("slurm", "slurm-wlm")]
    plugin = not has_slurm or any((folder / "mpi_pmix.so").exists() for folder in folders)
    places = (*libraries, usr / "local/lib")
    return not plugin or any((folder / "libpmix.so").exists() for folder in places)


def install(packages: Sequence[str]) -> None:
    """Install Debian's packages. Raises ClusterError."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    command += ["-o", "DPkg::Lock::Timeout=120"]
    for attempt in (command, ["apt-get", "update", "-q"], command):
        try:
            done = subprocess.run(attempt, env=environment, capture_output=True, text=True)
        except FileNotFoundError:
            raise ClusterError(f"no apt-get here; install by hand: {' '.join(packages)}") from None
        if attempt is command and done.returncode == 0:
            return
    raise ClusterError(f"apt-get could not install {' '.join(packages)}: {_last_line(done.stderr)}")


def check(*, may_install: bool, shaped: bool, with_gpus: bool) -> None:
    """Raises ClusterError, with what to do, unless a cluster can be made here."""
    check_root()
    missing = find_missing()
    if missing and may_install:
        install(missing)
        missing = find_missing()
    if missing:
        raise ClusterError(
            f"not installed: {', '.join(missing)}; run jobs/cluster/up --install, or: "
            f"apt-get install -y --no-install-recommends {' '.join(missing)}"
        )
    attempt = ATTEMPT + (SHAPING if shaped else "") + (DEVICE if with_gpus else "")
    done = subprocess.run([*UNSHARE, "sh", "-c", attempt], capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(
            "this kernel or container cannot make the namespaces, mounts, bridge, veth"
            f"{', tbf queue' if shaped else ''}{', device files' if with_gpus else ''} of a "
            f"cluster: {_last_line(done.stderr)}"
        )


def slurm_version() -> tuple[int, int]:
    """Slurm's major and minor version, as (22, 5)."""
    answer = subprocess.run(["slurmd", "-V"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", answer)
    if found is None:
        raise ClusterError(f"slurmd -V gave no version: {answer.strip()!r}")
    return int(found[1]), int(found[2])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


if __name__ == "__main__":
    # For tests/run.sh, which installs in its own way.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_PATHS])
    print(*find_missing())
