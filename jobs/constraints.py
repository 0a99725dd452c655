"""Which versions pip may choose, for ``environment.sh``; needs nothing but pip.

    constraints.py active|venv SETUP_CFG CONSTRAINTS   constraints for pip, to stdout
                                       … build    the build of torch that is wanted, and its
                                                  packages; nothing if none is missing
    constraints.py extras SETUP_CFG EXTRA…        those of the extras that can be installed
    constraints.py files SETUP_CFG EXTRA…         "file PATH" of each package needed

torch, torchvision, mpi4py and numpy stay as they are if they are installed: in an active
environment in any version, in a .venv if ``setup.cfg`` allows it, because somebody chose that
build. All others have the versions of ``constraints.txt``, except that an active environment
keeps whatever it has. To a torch that somebody has built, no torchvision is added: none fits it,
and pip would go back to the oldest, which fits any.
"""

from __future__ import annotations

import configparser
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import Version

KEPT = ("torch", "torchvision", "mpi4py", "numpy")
PAIRS = {"torch": "torchvision", "torchvision": "torch"}
"""Packages of which each release fits exactly one release of the other."""


BUILDS = re.compile(r"auto|cpu|cu\d+|rocm[\d.]+|xpu")
"""Of torch, in its own index."""


def read_requirements(setup_cfg: str, extras: tuple[str, ...] = ()) -> list[Requirement]:
    """The run-time requirements of ``setup.cfg``, and those of the extras."""
    parser = configparser.ConfigParser()
    parser.read(setup_cfg, encoding="utf-8")
    texts = [parser["options"]["install_requires"]]
    texts += [parser["options.extras_require"][extra] for extra in extras]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def find_kept(kind: str, requirements: list[Requirement]) -> dict[str, str]:
    """The packages that stay as they are, with their versions."""
    allowed = {canonicalize_name(item.name): item.specifier for item in requirements}
    kept = {}
    for name in KEPT:
        version = installed(name)
        if version and (kind == "active" or allowed[name].contains(version, prereleases=True)):
            kept[name] = version
    return kept


def constrain(kind: str, requirements: list[Requirement], tested: list[Requirement]) -> list[str]:
    """The constraints, as lines for pip."""
    kept = find_kept(kind, requirements)
    lines = [f"{name}=={version}" for name, version in kept.items()]
    for item in tested:
        name = canonicalize_name(item.name)
        partner = PAIRS.get(name, "")
        fits = partner not in kept or _is(kept[partner], partner, tested)
        if name not in kept and fits and not (kind == "active" and installed(name)):
            lines.append(str(item))
    return lines


def find_build(kept: dict[str, str], constraints: list[str]) -> list[str]:
    """The name of a build of torch (``auto`` is one that fits this machine), and requirements.

    Empty if nothing of torch and torchvision is missing, or if what is there is of no such build:
    PyPI's own, of which pip finds the other, or somebody's own.
    """
    build = "auto"
    for name, partner in PAIRS.items():
        if name in kept and partner in kept:
            return []
        if name in kept:
            build = Version(kept[name]).local or ""
    lines = {Requirement(line).name: line for line in constraints}
    if not BUILDS.fullmatch(build):
        return []
    return [build, *(lines.get(name, name) for name in PAIRS)]


def choose_extras(extras: list[str], torch: str | None, torchvision: str | None) -> list[str]:
    """The extras without that of torchvision, if none fits the torch that is there."""
    if torch is None or torchvision is not None:
        return extras
    found = Version(torch)
    is_built = found.local is not None and not BUILDS.fullmatch(found.local)
    return [each for each in extras if each != "vision" or not (is_built or found.is_prerelease)]


def _is(version: str, name: str, tested: list[Requirement]) -> bool:
    public = Version(version).public
    return any(item.specifier.contains(public) for item in tested if item.name == name)


def list_files(names: list[str]) -> list[str]:
    """For each package a path that is there as long as that version is."""
    # There is no public way to ask for the metadata's path.
    paths = [getattr(distribution(name), "_path", None) for name in names]
    return [f"file {Path(path).resolve()}" for path in paths if path]


def main(arguments: list[str]) -> None:
    kind, setup_cfg, *rest = arguments
    if kind == "extras":
        for extra in choose_extras(rest, installed("torch"), installed("torchvision")):
            print(extra)
        return
    if kind == "files":
        names = [item.name for item in read_requirements(setup_cfg, tuple(rest))]
        print("\n".join(list_files(["mpiddp", *names])))
        return
    text = Path(rest[0]).read_text(encoding="utf-8")
    texts = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    tested = [Requirement(line) for line in texts]
    requirements = read_requirements(setup_cfg, ("vision",))
    lines = constrain(kind, requirements, tested)
    if rest[1:] == ["build"]:
        lines = find_build(find_kept(kind, requirements), lines)
    for line in lines:
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
