"""Whether all ranks run the same programs, and how long the largest of them takes to load."""

from __future__ import annotations

import hashlib
import importlib
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mpiddp
from mpiddp.doctor.examiner.findings import Finding, failed, join_some, passed, skipped, warned
from mpiddp.errors import LaunchError
from mpiddp.launch.torch_import import PATIENCE_SECONDS
from mpiddp.wording import read_message

CODE = "code"
TORCH_VERSION = "torch version"
IMPORT_TORCH = "import torch"
TORCHVISION = "torchvision"

ADVICE = (
    "Give all nodes the same environment: one on a shared file system, or a new copy on each node"
)
DIGEST_LENGTH = 12
"""Characters of the digest that are shown and compared."""


def digest_code(root: Path | None = None) -> str:
    """SHA-256 over mpiddp's own source files, by name: the same code, the same digest."""
    root = Path(mpiddp.__file__).parent if root is None else root
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGEST_LENGTH]


def find_versions() -> tuple[str, ...]:
    """What this rank runs, before torch is there. Plain text: ranks whose mpiddp differs may not
    know each other's classes."""
    try:
        mpi4py = version("mpi4py")
    except PackageNotFoundError:
        mpi4py = "none"
    return (
        f"Python {platform.python_version()}",
        f"mpi4py {mpi4py}",
        f"mpiddp {mpiddp.__version__}",
        f"code {digest_code()}",
    )


def judge_versions(
    check: str, rows: Sequence[tuple[str, ...]], name: Callable[[int], str]
) -> Finding:
    """Compare what the ranks run; ``name`` turns a rank into ``rank 3 on node002``.

    Those that differ from most are named, with what they have.
    """
    usual = Counter(rows).most_common(1)[0][0]
    odd = [rank for rank, row in enumerate(rows) if row != usual]
    if not odd:
        return passed(check, ", ".join(usual))
    parts = []
    for rank in odd:
        has = [own for own in rows[rank] if own not in usual]
        parts.append(f"{name(rank)} has {', '.join(has) or 'less'}")
    return failed(
        check,
        f"{join_some(parts)}; the others have {', '.join(usual)}",
        ADVICE,
        LaunchError.exit_code,
    )


def find_torchvision() -> tuple[str, str]:
    """The version, empty if there is none; and why a script cannot import it beside this torch."""
    try:
        found = version(TORCHVISION)
    except PackageNotFoundError:
        return "", ""
    try:
        importlib.import_module(TORCHVISION)
    except Exception as error:  # A library that does not fit may raise anything.
        return found, f"{type(error).__name__}: {read_message(error)}".partition("\n")[0]
    return found, ""


def judge_torchvision(found: str, problem: str) -> Finding:
    if not found:
        return skipped(TORCHVISION, "not installed; its models and data sets need it")
    if not problem:
        return passed(TORCHVISION, found)
    return warned(
        TORCHVISION,
        f"torchvision {found} cannot be imported beside this torch ({problem})",
        "Install the release and the build that fit torch, from the index that torch comes from "
        "(pip install torchvision --index-url …). The trainer does without its operators",
    )


def judge_import(seconds: float, where: str, size: int) -> Finding:
    slowest = f" (slowest: {where})" if size > 1 else ""
    found = f"{seconds:.1f} s{slowest}"
    if seconds <= PATIENCE_SECONDS:
        return passed(IMPORT_TORCH, found)
    return warned(
        IMPORT_TORCH,
        f"{found}, more than {PATIENCE_SECONDS:g} s",
        "Many ranks load thousands of files from a shared file system: stage the environment to "
        "node-local disk (pack it, sbcast, unpack), or use a container image",
    )
