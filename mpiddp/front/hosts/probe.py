"""What one host is like: run there by its own Python, which reads this file from standard input.

It needs the standard library alone. The question is a JSON object in ``sys.argv[1]``, the answer
one on the last line of standard output.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import sys
from typing import Any


def find_release(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def digest(path: str) -> str | None:
    """Of a file, or of all Python files below a folder; None if it is not there."""
    found = hashlib.sha256()
    paths = [path]
    if os.path.isdir(path):
        walk = sorted(os.walk(path))
        paths = [os.path.join(top, n) for top, _, names in walk for n in sorted(names)]
        paths = [each for each in paths if each.endswith(".py")]
    try:
        for each in paths:
            with open(each, "rb") as file:
                found.update(file.read())
    except OSError:
        return None
    return found.hexdigest()[:16]


def find_addresses(name: str) -> list[str]:
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(row[4][0]).removeprefix("::ffff:") for row in rows})


def reach(name: str, seconds: float) -> str:
    """Why no packet of TCP comes back from a host; empty if one does, be it a refusal."""
    try:
        socket.create_connection((name, 22), timeout=seconds).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        return error.strerror or str(error) or "timed out"
    return ""


def has_ipv4() -> bool:
    """Whether there is a route over IPv4, besides loopback's: an interface with an address has one.

    True if the system does not say.
    """
    try:
        with open("/proc/net/route") as file:
            return len(file.readlines()) > 1
    except OSError:
        return True


def name_machine() -> str:
    """The same by whichever name the machine is reached."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read()}"


def count_gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def answer(question: dict[str, Any]) -> dict[str, Any]:
    spec = importlib.util.find_spec("mpiddp")
    packages = ("torch", "mpi4py", "numpy")
    return {
        "machine": name_machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": count_gpus(),
        "has IPv4": has_ipv4(),
        "same": {
            "Python": platform.python_version(),
            "mpiddp": digest(os.path.dirname(spec.origin)) if spec and spec.origin else None,
            **{name: find_release(name) for name in packages},
            **{path: digest(path) for path in question["files"]},
        },
        "addresses": {name: find_addresses(name) for name in question["peers"]},
        "unreached": {name: reach(name, question["seconds"]) for name in question["peers"]},
    }


if __name__ == "__main__":
    os.write(1, json.dumps(answer(json.loads(sys.argv[1]))).encode() + b"\n")
