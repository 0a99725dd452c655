"""Where compilers' caches go, and what is said of a slow import."""

from __future__ import annotations

import os
import tempfile

from mpiddp.environment import CACHES
from mpiddp.launch import caches, summary


def test_caches_leave_a_shared_home_unless_somebody_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert caches.choose({"HOME": str(tmp_path)}) == caches.choose({}) == {}
    # /proc is on no disk of this machine.
    chosen = caches.choose({"HOME": "/proc", "TRITON_CACHE_DIR": "/mine"})
    folder = tmp_path / f"mpiddp-{os.getuid()}" / "caches"
    assert chosen.keys() == CACHES.keys() - {"TRITON_CACHE_DIR"}
    assert chosen["CUDA_CACHE_PATH"] == f"{folder}/cuda"
    # Below this torch places Triton's cache, too.
    below = caches.choose({"HOME": "/proc", "TORCHINDUCTOR_CACHE_DIR": "/mine"})
    assert below.keys() == chosen.keys() - {"TORCHINDUCTOR_CACHE_DIR"}
    assert caches.find_folder({**chosen, "TRITON_CACHE_DIR": "/mine"}) == str(folder)
    assert caches.find_folder(dict.fromkeys(CACHES, "/mine/x")) == ""
    # What others can write to is not used.
    folder.parent.chmod(0o777)
    assert caches.choose({"HOME": "/proc"}) == {}


def test_a_slow_import_is_told():
    assert summary.describe_late_import(19.0, 3, 8) == []
    assert "import torch took 43 s on rank 3: " in summary.describe_late_import(43.2, 3, 8)[0]
