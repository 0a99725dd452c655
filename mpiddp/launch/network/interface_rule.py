"""What the user, the environment or NCCL's configuration files say about interfaces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.hostnames import is_host


@dataclass(frozen=True)
class InterfaceRule:
    """Which interfaces may be used, in the terms of NCCL_SOCKET_IFNAME.

    NCCL's syntax is ``[^][=]name,name…``: ``^`` excludes, ``=`` compares whole names instead of
    prefixes (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    """

    names: tuple[str, ...]
    exact: bool = False
    exclude: bool = False
    source: str = "--interface"
    text: str = field(default="", compare=False)
    """As it was written."""

    @staticmethod
    def from_nccl(text: str, source: str) -> InterfaceRule:
        """Parse NCCL's syntax; ``name:port`` items lose their port."""
        written, exclude = text, text.startswith("^")
        text = text[exclude:]
        exact = text.startswith("=")
        names = (item.split(":")[0].strip() for item in text[exact:].split(","))
        return InterfaceRule(tuple(name for name in names if name), exact, exclude, source, written)

    def admits(self, name: str) -> bool:
        """Whether NCCL, given this rule, would consider the interface ``name``."""
        matches = any(
            name == wanted if self.exact else name.startswith(wanted) for wanted in self.names
        )
        return matches != self.exclude

    @property
    def nccl(self) -> str:
        """The value of NCCL_SOCKET_IFNAME that says the same."""
        return ("^" if self.exclude else "") + ("=" if self.exact else "") + ",".join(self.names)


def parse_interface_option(text: str, hostname: str) -> InterfaceRule | None:
    """Read ``--interface``: ``auto``, ``NAME[,NAME…]``, ``HOST=NAME,…`` or NCCL's syntax.

    HOST is a name or a shell pattern, see `is_host`. A host that no item names chooses by itself:
    None, like ``auto``.
    """
    text = text.strip()
    if text == "auto":
        return None
    if not text.strip("^=, "):
        raise ConfigurationError(
            f"--interface {text!r} names no interface: expected auto, NAME, HOST=NAME,… or "
            "NCCL's syntax (^docker,lo or =eth0)"
        )
    if text.startswith(("^", "=")):
        return InterfaceRule.from_nccl(text, "--interface")
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not any("=" in item for item in items):
        return InterfaceRule(tuple(items), exact=True, text=text)
    names = []
    for item in items:
        host, equals, name = item.partition("=")
        if not (host and equals and name):
            raise ConfigurationError(f"--interface: expected HOST=NAME, found {item!r} in {text!r}")
        if is_host(host, hostname):
            names.append(name)
    return InterfaceRule(tuple(names), exact=True, text=text) if names else None


def names_nobody(text: str, hostname: str) -> bool:
    """Whether ``--interface`` lists hosts, and this host is not among them."""
    return text.strip() != "auto" and parse_interface_option(text, hostname) is None


def find_rule(
    option: str, hostname: str, variables: Mapping[str, str] = os.environ
) -> InterfaceRule | None:
    """The rule in force on this host: the option's, else NCCL's own settings, else Gloo's."""
    rule = parse_interface_option(option, hostname)
    if rule is not None:
        return rule
    nccl = find_nccl_setting(environment.NCCL_SOCKET_IFNAME, variables)
    if nccl:
        return InterfaceRule.from_nccl(nccl, environment.NCCL_SOCKET_IFNAME)
    gloo = variables.get(environment.GLOO_SOCKET_IFNAME)
    if gloo:
        return InterfaceRule(
            tuple(gloo.split(",")), exact=True, source=environment.GLOO_SOCKET_IFNAME, text=gloo
        )
    return None


def find_nccl_setting(name: str, variables: Mapping[str, str] = os.environ) -> str | None:
    """What NCCL itself will take for a variable: the environment, else its configuration files.

    NCCL reads ``$NCCL_CONF_FILE`` or ``~/.nccl.conf``, then ``/etc/nccl.conf``; the first value
    found counts. None if there is none.
    """
    value = variables.get(name)
    if value:
        return value
    user_file = variables.get(environment.NCCL_CONF_FILE) or os.path.expanduser("~/.nccl.conf")
    for path in (Path(user_file), Path("/etc/nccl.conf")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            found, equals, value = line.partition("=")
            if equals and found.strip() == name:
                return value.strip()
    return None
