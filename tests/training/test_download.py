"""Data sets are fetched: from a server on this machine, in the real file format."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import data_files
from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import load
from mpiddp.training.data.download import fetch
from mpiddp.training.data.vision import import_torchvision
from mpiddp.training.options.config import Configuration


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each file was asked for; they are MNIST's, on the mirror that torchvision asks."""
    data_files.write_mnist(tmp_path / "original")
    served = tmp_path / "served"
    served.mkdir()
    resources = []
    for path in sorted((tmp_path / "original").rglob("*ubyte")):
        packed = gzip.compress(path.read_bytes())
        (served / f"{path.name}.gz").write_bytes(packed)
        resources.append((f"{path.name}.gz", hashlib.md5(packed).hexdigest()))
    found: Counter[str] = Counter()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(served))

        def do_GET(self) -> None:
            found[self.path] += 1
            super().do_GET()

        def log_message(self, *_: Any) -> None: ...

    import_torchvision()
    from torchvision.datasets import MNIST

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(MNIST, "resources", resources)
        yield found
        server.shutdown()


def test_a_data_set_is_fetched_once(requests: Counter[str], tmp_path: Path) -> None:
    # torchvision asks for a file twice: also to see whether it has moved.
    fetch("mnist", tmp_path / "other")
    once = Counter(requests)
    assert len(once) == 4
    target = tmp_path / "data"
    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(fetch, "mnist", target) for _ in range(4)]:
            call.result(timeout=60)
    fetch("mnist", target)
    assert requests - once == once
    assert {path.name for path in target.iterdir()} == {"MNIST", ".mnist.lock"}
    same = Configuration(data="mnist", data_dir=tmp_path / "original")
    assert load(Configuration(data="mnist", data_dir=target)).digest() == load(same).digest()


def test_what_was_fetched_in_part_has_no_name(requests, tmp_path, monkeypatch):
    target = tmp_path / "data"
    damaged = tmp_path / "served" / "train-images-idx3-ubyte.gz"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-9])
    with pytest.raises(ConfigurationError, match=r"download: cannot fetch mnist into .*train-im"):
        fetch("mnist", target)
    assert {path.name for path in target.iterdir()} == {".mnist.lock"}
    damaged.write_bytes(whole)
    # Of a process that was killed.
    (target / ".mnist-left" / "MNIST").mkdir(parents=True)
    fetch("mnist", target)
    assert {path.name for path in target.iterdir()} == {"MNIST", ".mnist.lock"}
