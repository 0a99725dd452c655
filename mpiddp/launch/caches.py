"""Where compilers keep what they have compiled, if the user's home is on a shared file system.

Many ranks that write to one directory of a file server wait for its locks, and may read what
another has written half. So each node gets a directory of its own, which later jobs find there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpiddp.environment import CACHE_CHOICES, CACHES, HOME
from mpiddp.files import is_local
from mpiddp.process.job_directory import make_private

FOLDER = "caches"


def choose(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to set: what nobody has chosen, if the home is not this machine's own.

    Empty if there is no local directory for temporary files, or if it is not this user's alone.
    """
    home = variables.get(HOME)
    unset = [
        name for name in CACHES if variables.keys().isdisjoint((name, *CACHE_CHOICES.get(name, ())))
    ]
    if not home or not unset or is_local(Path(home)):
        return {}
    import tempfile  # A local home does without.

    for place in (tempfile.gettempdir(), "/tmp"):
        folder = Path(place, f"mpiddp-{os.getuid()}", FOLDER)
        if is_local(Path(place)):
            try:
                make_private(folder)
            except OSError:
                return {}
            return {name: str(folder / CACHES[name]) for name in unset}
    return {}


def find_folder(variables: Mapping[str, str] = os.environ) -> str:
    """The node's directory that `choose` has chosen; empty for none."""
    ending = f"mpiddp-{os.getuid()}/{FOLDER}"
    folders = (os.path.dirname(variables.get(name, "")) for name in CACHES)
    return next((folder for folder in folders if folder.endswith(ending)), "")
