"""What one host is like: run there by its own Python, which reads this file from standard input.

It needs the standard library alone. The question is a JSON object in ``sys.argv[1]``, the answer
one on the last line of standard output.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import sys
import tempfile
import threading
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


def find_all_addresses(names: list[str], seconds: float) -> dict[str, list[str]]:
    """Of each name, one after the other, as many as are found in time.

    A name server that gets many questions at once may drop some, and each is waited for.
    """
    found: dict[str, list[str]] = {}

    def find() -> None:
        for name in names:
            found[name] = find_addresses(name)

    # A look-up cannot be interrupted; the thread does not keep this process from ending.
    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    thread.join(seconds)
    return dict(found)


def is_own(addresses: list[str]) -> bool:
    """Whether all addresses of a name are this machine's."""
    return bool(addresses) and all(map(_is_bound_here, addresses))


def _is_bound_here(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as found:
            found.bind((address, 0))
    except OSError:
        return False
    return True


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
    """By the host's own mpiddp; 0 without one, and then the host cannot take part."""
    try:
        from mpiddp.launch.device import visibility
    except ImportError:
        return 0
    return visibility.count_gpus()


def find_obstacle(names: list[str]) -> str:
    """Why an MPI's daemon could not have a directory with a file here; empty if it can.

    ``names``: of the variables that say where.
    """
    place = next((os.environ[name] for name in names if os.environ.get(name)), "/tmp")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="mpiddp-", dir=place) as folder,
            open(f"{folder}/file", "wb") as file,
        ):
            file.write(bytes(4096))
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def remove_leftovers() -> None:
    """Of killed jobs: a daemon of Open MPI's with the number of an earlier one does not start."""
    with contextlib.suppress(Exception):  # This machine may lack mpiddp, or have another one.
        from mpiddp.launch.launcher import leftovers

        leftovers.remove()


def answer(question: dict[str, Any]) -> dict[str, Any]:
    remove_leftovers()
    spec = importlib.util.find_spec("mpiddp")
    packages = ("torch", "mpi4py", "numpy")
    addresses = find_all_addresses(question["names"], question["seconds"])
    return {
        "machine": name_machine(),
        "here": [name for name, found in addresses.items() if is_own(found)],
        "cores": len(os.sched_getaffinity(0)),
        "gpus": count_gpus(),
        "obstacle": find_obstacle(question["temporary"]),
        "has IPv4": has_ipv4(),
        "same": {
            "Python": platform.python_version(),
            "mpiddp": digest(os.path.dirname(spec.origin)) if spec and spec.origin else None,
            **{name: find_release(name) for name in packages},
            **{path: digest(path) for path in question["files"]},
        },
        "addresses": addresses,
        "unreached": {name: reach(name, question["seconds"]) for name in question["peers"]},
    }


if __name__ == "__main__":
    os.write(1, json.dumps(answer(json.loads(sys.argv[1]))).encode() + b"\n")
