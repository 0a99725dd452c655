"""The packages that ranks need, looked for without importing them, before anything is started."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence

from mpiddp.errors import ConfigurationError
from mpiddp.torch_internals import read_version_file

NEEDED = ("torch", "numpy", "psutil")
NEEDED_TO_TRAIN = (*NEEDED, "msgspec", "tqdm", "xxhash")
OLDEST_TORCH = (2, 10)
"""As in `setup.cfg`; a site's own 2.10.0a0 will do."""


def check_packages(names: Sequence[str] = NEEDED) -> None:
    """Raise ConfigurationError if one of these packages is missing, or torch is too old."""
    install = f"{sys.executable} -m pip install"
    missing = [name for name in names if name not in sys.modules and not _find_folder(name)]
    if missing:
        is_or_are = "is" if len(missing) == 1 else "are"
        raise ConfigurationError(
            f"{', '.join(missing)} {is_or_are} not installed in {sys.prefix}: activate the "
            f"environment that has mpiddp, or run: {install} {' '.join(missing)}"
        )
    version = _read_torch_version()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers and numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ConfigurationError(
            f"torch {version} in {sys.prefix} is too old: mpiddp needs {oldest} or newer; run: "
            f"{install} 'torch>={oldest}'"
        )


def _find_folder(name: str) -> str:
    """Where a package lies; empty if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return os.path.dirname(spec.origin or "") or name if spec is not None else ""


def _read_torch_version() -> str:
    """From its file, since an import takes seconds; empty if it does not say."""
    if (module := sys.modules.get("torch")) is not None:
        return str(getattr(module, "__version__", ""))
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", read_version_file(), re.MULTILINE)
    return found[1] if found else ""
