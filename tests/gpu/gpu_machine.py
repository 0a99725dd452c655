"""What a machine with a GPU has, printed; its loopback interface is set up if it is down.

gpu_machine.py machine     files, programs, limits, versions; by the standard library alone
gpu_machine.py torch       what torch finds; the last line counts the GPUs
"""

import fcntl
import glob
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = "CUDA|NCCL|NVIDIA|LD_|PATH|HOME|TMP|LANG|OMP|PYTHON|TORCH|SLURM"
"""How the names of variables begin that are printed, but for secrets."""
COMMANDS = (
    "date; uname -a; id -un; nproc; free -g | head -2; cat /etc/os-release | head -2", "nvidia-smi",
    "nvidia-smi -q -d CLOCK,POWER,ECC | head -60", "ls -l /dev/nvidia* /proc/driver/nvidia/gpus",
    "ldconfig -p | grep -E 'nvidia-ml|libcuda[.]|libmpi'",
    "df -h / /tmp /dev/shm; ulimit -a | grep -E 'locked|open files|stack'",
    "ip -br address || cat /proc/net/dev",
    'getent hosts "$(hostname)" || echo "$(hostname) does not resolve"',
    "which gcc g++ nvcc mpirun mpiexec srun git pip",
    f"env | grep -E '^({SHOWN})' | grep -Ev '^[A-Z_]*(JWT|TOKEN|SECRET|PASSWORD|KEY)' | sort",
    f"{sys.executable} -m pip --disable-pip-version-check list",
    f"git -C {ROOT} log -1 --oneline; git -C {ROOT} status --short | head",
)  # fmt: skip
SECONDS = 10
# Linux: net/if.h, bits/ioctls.h.
GET_FLAGS, SET_FLAGS, IS_UP, REQUEST = 0x8913, 0x8914, 1, struct.Struct("16sh22x")


def main(subject: str) -> int:
    if subject == "torch":
        return show_torch()
    print(f"python {sys.executable} {sys.version}")
    for command in COMMANDS:
        print(f"$ {command}", flush=True)
        try:
            subprocess.run(["bash", "-c", command], stderr=subprocess.STDOUT, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            print(f"no end after {SECONDS} s")
    return set_up_loopback()


def set_up_loopback() -> int:
    """Ranks on one machine find each other over it, and MPI does not start without an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        answer = fcntl.ioctl(endpoint, GET_FLAGS, REQUEST.pack(b"lo", 0))
        _, flags = REQUEST.unpack(answer)
        if flags & IS_UP:
            return 0
        try:
            fcntl.ioctl(endpoint, SET_FLAGS, REQUEST.pack(b"lo", flags | IS_UP))
        except OSError as error:
            print(f"the interface lo is down, and stays so: {error}; as root: ip link set lo up")
            return 1
    print("the interface lo was down: it is up now")
    return 0


def show_torch() -> int:
    """The doctor tells more of what it finds."""
    begin = time.perf_counter()
    import torch

    print(f"import {time.perf_counter() - begin:.1f} s")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    count = torch.cuda.device_count()
    print(f"GPUs: {count}")
    files = glob.glob("/dev/nvidia[0-9]*")
    if files and not count and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        print(f"torch sees no GPU, but there is {files[0]}: its driver and torch do not fit")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
