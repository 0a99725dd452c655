"""Copies of the checkout's files that can be written, programs of shell, and wheels."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

OWNER_WRITES = 0o200


def copy(source: Path, target: Path, **options: Any) -> Path:
    """Copy a file or a directory to ``target``, or a file into it; ``options`` are copytree's."""
    if source.is_dir():
        shutil.copytree(source, target, **options)
        paths = [target, *target.rglob("*")]
    else:
        target = target / source.name if target.is_dir() else target
        target.unlink(missing_ok=True)
        shutil.copy(source, target)
        paths = [target]
    for path in paths:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | OWNER_WRITES)
    return target


def write_program(path: Path, text: str, shell: str = "sh") -> Path:
    """A program of these lines of shell, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/{shell}\n{text}\n")
    path.chmod(0o755)
    return path


def make_mpirun(folder: Path, version: str, name: str = "mpirun") -> Path:
    """A program that only says this version."""
    return write_program(folder / name, f"cat <<'TEXT'\n{version}\nTEXT")


def make_wheel(folder: Path, name: str, version: str, **more: str) -> Path:
    """The smallest package of this name; ``more``: texts of other files in it."""
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **more,
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path
