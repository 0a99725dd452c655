"""Which fabric this node has, and what its users ought to set: one table.

The table is ``fabrics.toml``, beside this file. A site's own file has the same form, and stands
before it. Nothing here imports torch or starts a program.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.device.vendors import ROOT, VENDORS
from mpiddp.launch.network.infiniband import has_active_port
from mpiddp.launch.network.interface_rule import find_nccl_setting
from mpiddp.options import toml
from mpiddp.options.checks import did_you_mean, quote

OWN = Path(__file__).with_suffix(".toml")
OPTION = "--site-defaults"
"""The option that names a site's file."""
TABLE, NOTHING = "table", "none"
"""In place of a site's file."""
LIBRARY_FOLDERS = ("usr/lib", "usr/lib64", "usr/local/lib", "usr/lib/*-linux-gnu")
CACHE = "etc/ld.so.cache"
"""Names of the libraries that the loader finds without LD_LIBRARY_PATH, each ending in a NUL."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A network between nodes."""

    name: str
    devices: tuple[str, ...]
    """Patterns of the devices' files, from the root of the file system. Of InfiniBand's kind, one
    needs an active port."""
    driver: str = ""
    """Pattern of the name of a device's driver; empty for any."""
    link_layer: str = ""
    """What a port must say of itself; empty for anything."""
    is_fallback: bool = False
    """Whether it counts only if the rows before have no device."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What NCCL or RCCL needs in order to use a fabric."""

    fabrics: tuple[str, ...]
    vendors: tuple[str, ...]
    """Names of `mpiddp.launch.device.vendors.VENDORS`."""
    files: tuple[str, ...]
    """Names of the library, one of which must be found."""
    advice: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An environment variable that ought to be set, or must not have some values."""

    variable: str
    value: str | None = None
    """None: the variable is to be left alone. ``{library}``: where the plugin is."""
    wrong: tuple[str, ...] = ()
    """Patterns of values that do harm, in lower case."""
    fabrics: tuple[str, ...] = ()
    """On one of these; empty: on any, and on none."""
    vendors: tuple[str, ...] = ()
    with_variables: tuple[str, ...] = ()
    """Only if one of these variables is set, or, of NAME=PATTERN, to such a value."""
    with_file: str = ""
    with_content: str = ""
    """Only if a file of the pattern ``with_file`` holds this; empty: if it is there."""
    without_file: str = ""
    """Pattern of a file that must not be there."""
    needs_plugin: bool = False
    needs_nodes: bool = False
    """Whether it is for jobs of several nodes."""
    is_for_launcher: bool = False
    """Whether the launcher reads it, so that it is too late in a rank."""
    why: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class BadVersion:
    """Versions of a library that are known to be bad."""

    library: str
    since: str = "0"
    before: str
    machine: str = ""
    """As ``uname -m`` says it; empty for any."""
    why: str
    source: str = ""

    def includes(self, version: str, machine: str) -> bool:
        """Whether a version such as ``2.29.2`` of this library is one of them."""
        if self.machine not in ("", machine):
            return False
        return _split(self.since) <= _split(version) < _split(self.before)


@dataclass(frozen=True, kw_only=True)
class FabricTable:
    """What a file says."""

    fabrics: tuple[Fabric, ...] = ()
    plugins: tuple[Plugin, ...] = ()
    settings: tuple[Setting, ...] = ()
    versions: tuple[BadVersion, ...] = ()


KINDS: Mapping[str, type[Any]] = {
    "fabrics": Fabric,
    "plugins": Plugin,
    "settings": Setting,
    "versions": BadVersion,
}
"""What the rows of a file are, by the name above them."""


@dataclass(frozen=True)
class NodeFabrics:
    """What a node has of what the table knows."""

    fabrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Devices by the name of their fabric."""
    vendors: tuple[str, ...] = ()
    plugin: Plugin | None = None
    """The one that NCCL or RCCL needs; None if it needs none."""
    library: Path | None = None
    """Where that is, as far as it is found."""
    settings: tuple[Setting, ...] = ()
    """Those that apply here, one for each variable."""

    @property
    def name(self) -> str:
        """``Slingshot (cxi0, cxi1), NVIDIA``."""
        parts = [f"{name} ({', '.join(found)})" for name, found in self.fabrics.items()]
        return ", ".join([*(parts or ["no fast network card"]), *self.vendors])

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(each for found in self.fabrics.values() for each in found)


@dataclass(frozen=True)
class FabricProblem:
    """What is wrong on a node: what was found, and what to do."""

    found: str
    advice: str


def read_table(site: str | None = None, what: str = OPTION) -> FabricTable:
    """The rows of a site's file, which ``what`` names, and then those of the table.

    Raises ConfigurationError, with the file, the field and what was expected.
    """
    own = toml.read_rows(OWN, KINDS, OPTION)
    if not site:
        return FabricTable(**own)
    rows = toml.read_rows(Path(site), KINDS, what)
    table = FabricTable(**{name: rows.get(name, ()) + own[name] for name in KINDS})
    for name, named in (("fabrics", table.fabrics), ("vendors", VENDORS)):
        known = {each.name for each in named}
        for kind in ("plugins", "settings"):
            for place, row in enumerate(rows.get(kind, ())):
                _check_names(f"{site}: {kind}[{place}].{name}", getattr(row, name), known)
    return table


def _check_names(where: str, names: Sequence[str], known: Collection[str]) -> None:
    for each in names:
        if each not in known:
            hint = did_you_mean(each, known) or f": {', '.join(sorted(known))}"
            raise ConfigurationError(f"{where}: {quote(each)} is not known{hint}")


def find_fabrics(
    table: FabricTable, variables: Mapping[str, str] = os.environ, root: Path = ROOT
) -> NodeFabrics:
    """Look at this node."""
    fabrics = _find_fabrics(table.fabrics, root)
    vendors = tuple(vendor.name for vendor in VENDORS if vendor.list_gpus(root))
    plugin = next((each for each in table.plugins if _fits_node(each, fabrics, vendors)), None)
    library = find_library(plugin.files, variables, root) if plugin is not None else None
    settings: dict[str, Setting] = {}
    for each in table.settings:
        wanted = each.with_variables
        fits = (
            _fits_node(each, fabrics, vendors)
            and (not wanted or any(_is_set(name, variables) for name in wanted))
            and (not each.with_file or _holds(root, each.with_file, each.with_content))
            and (not each.without_file or not any(root.glob(each.without_file)))
            and (not each.needs_plugin or library is not None)
        )
        if fits:
            settings.setdefault(each.variable, each)
    return NodeFabrics(fabrics, vendors, plugin, library, tuple(settings.values()))


def _is_set(text: str, variables: Mapping[str, str]) -> bool:
    name, _, pattern = text.partition("=")
    value = variables.get(name)
    return bool(value) and fnmatchcase(value or "", pattern or "*")


def _fits_node(row: Plugin | Setting, fabrics: Collection[str], vendors: Collection[str]) -> bool:
    wanted = ((row.fabrics, fabrics), (row.vendors, vendors))
    return all(not names or not set(names).isdisjoint(found) for names, found in wanted)


def _find_fabrics(rows: Sequence[Fabric], root: Path) -> dict[str, tuple[str, ...]]:
    """Devices by the name of their fabric."""
    found: dict[str, list[str]] = {}
    taken: set[Path] = set()
    for row in rows:
        if row.is_fallback and taken:
            continue
        for path in sorted(path for pattern in row.devices for path in root.glob(pattern)):
            if path not in taken and _fits(path, row):
                taken.add(path)
                found.setdefault(row.name, []).append(path.name)
    return {name: tuple(devices) for name, devices in found.items()}


def _fits(device: Path, row: Fabric) -> bool:
    if row.driver and not fnmatchcase((device / "device/driver").resolve().name, row.driver):
        return False
    if row.link_layer and not _holds(device, "ports/*/link_layer", row.link_layer):
        return False
    return not (device / "ports").is_dir() or has_active_port(device)


def _holds(folder: Path, pattern: str, content: str) -> bool:
    """Whether a file of that pattern is there, and has ``content``, if that is not empty."""
    for path in folder.glob(pattern):
        if not content:
            return True
        try:
            if path.read_text(errors="replace").strip() == content:
                return True
        except OSError:
            continue
    return False


def find_library(
    names: Sequence[str], variables: Mapping[str, str] = os.environ, root: Path = ROOT
) -> Path | None:
    """Where the loader would find a plugin, as far as that can be seen from outside.

    NCCL_NET_PLUGIN names a file, a path, or the last part of ``libnccl-net-….so``.
    """
    wanted = find_nccl_setting(environment.NCCL_NET_PLUGIN, variables) or ""
    if "/" in wanted:
        return Path(wanted) if (root / wanted.lstrip("/")).is_file() else None
    if wanted:
        names = (wanted, f"libnccl-net-{wanted}.so", f"librccl-net-{wanted}.so")
    listed = variables.get(environment.LIBRARY_PATH, "").split(":")
    folders = [Path(each) for each in listed if each.startswith("/")]
    folders += [
        Path("/", path.relative_to(root)) for each in LIBRARY_FOLDERS for path in root.glob(each)
    ]
    for folder in folders:
        for name in names:
            if (root / str(folder).lstrip("/") / name).is_file():
                return folder / name
    try:
        cache = (root / CACHE).read_bytes()
    except OSError:
        return None
    return next((Path(name) for name in names if f"/{name}\0".encode() in cache), None)


# What nobody has set, and what somebody has set wrongly


@dataclass(frozen=True)
class SiteDefaults:
    """What ``--site-defaults`` sets on this node."""

    node: NodeFabrics
    file: str
    """The site's; empty without."""
    everywhere: Mapping[str, str]
    """Before MPI and torch are loaded."""
    between_nodes: Mapping[str, str]
    """In a job of several nodes, before NCCL is."""

    def describe(self, *, has_nodes: bool) -> str:
        """``Slingshot (cxi0), NVIDIA: NCCL_CROSS_NIC=1 …``; ``has_nodes``: whether several."""
        chosen = {**self.everywhere, **(self.between_nodes if has_nodes else {})}
        file = f", {self.file}" if self.file else ""
        return f"{self.node.name}{file}: {_format(chosen) or 'nothing to set'}"


def find_site_defaults(
    option: str, variables: Mapping[str, str] = os.environ, root: Path = ROOT
) -> SiteDefaults | None:
    """What to set; None if nobody has asked for it. ``option``: that of ``--site-defaults``.

    Raises ConfigurationError for a site's file that cannot be used.
    """
    file, what = variables.get(environment.SITE, ""), environment.SITE
    if option == NOTHING or not (option or file):
        return None
    if option not in ("", TABLE):
        file, what = option, OPTION
    node = find_fabrics(read_table(file, what), variables, root)
    return SiteDefaults(
        node,
        file,
        everywhere=choose_variables(node, variables),
        between_nodes=choose_variables(node, variables, between_nodes=True),
    )


def choose_variables(
    node: NodeFabrics, variables: Mapping[str, str] = os.environ, *, between_nodes: bool = False
) -> dict[str, str]:
    """The settings that nobody has made, but for those that a rank comes too late for.

    ``between_nodes``: those of jobs of several nodes, in place of those of all jobs.
    """
    return {
        each.variable: each.value.replace("{library}", str(node.library))
        for each in node.settings
        if each.value is not None
        and not each.is_for_launcher
        and each.needs_nodes is between_nodes
        and _find_value(each.variable, variables) is None
    }


def find_problems(
    node: NodeFabrics, variables: Mapping[str, str] = os.environ, *, has_nodes: bool = True
) -> Iterator[FabricProblem]:
    """What the table misses on this node. ``has_nodes``: whether the job has several."""
    plugin = node.plugin
    if plugin is not None and node.library is None:
        yield FabricProblem(f"{plugin.files[0]} is nowhere in LD_LIBRARY_PATH", plugin.advice)
    for each in node.settings:
        value = _find_value(each.variable, variables)
        if value is not None and any(fnmatchcase(value.lower(), bad) for bad in each.wrong):
            right = f"set {_format({each.variable: each.value})}" if each.value else ""
            found = f"{each.variable}={value}: {each.why}"
            yield FabricProblem(found, right or f"unset {each.variable}")
        elif value is None and each.is_for_launcher:
            right = f"{each.variable}={each.value}"
            found = f"{right} is not set: {each.why}"
            yield FabricProblem(found, f"export {right} before the launch")
    chosen = choose_variables(node, variables)
    if has_nodes:
        chosen |= choose_variables(node, variables, between_nodes=True)
    if chosen:
        yield FabricProblem(f"not set: {_format(chosen)}", "--site-defaults sets that in the ranks")


def _format(variables: Mapping[str, str]) -> str:
    """``NAME=VALUE OTHER="TWO WORDS"``."""
    pairs = ((name, f'"{value}"' if " " in value else value) for name, value in variables.items())
    return " ".join(f"{name}={value}" for name, value in pairs)


def _find_value(name: str, variables: Mapping[str, str]) -> str | None:
    """As somebody has set it, to whatever; None if nobody has."""
    if name in variables or not name.startswith("NCCL_"):
        return variables.get(name)
    return find_nccl_setting(name, variables)


def _split(version: str) -> tuple[int, ...]:
    """``2.29.2+cuda12.9`` is (2, 29, 2)."""
    numbers = version.partition("+")[0].partition("-")[0].split(".")
    return tuple(int(each) for each in numbers if each.isdecimal())
