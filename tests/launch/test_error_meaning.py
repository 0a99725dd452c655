"""What an error is called, and which exit code it has."""

from __future__ import annotations

import builtins
import tomllib

import pytest
import torch.distributed

import launchers
from mpiddp.errors import PeerLostError
from mpiddp.launch.failure import error_meaning, error_origin


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerLostError("x"), 6),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(5), 5),
        (SystemExit(-1), 255),
        (SystemExit(256), 0),
        (SystemExit("text"), 1),
        (SystemExit(True), 1),
    ],
    ids=repr,
)
def test_exit_codes(error, code):
    # Those of SystemExit are what Python itself leaves with.
    assert error_meaning.exit_code(error) == code


def read_recorded():
    path = launchers.ROOT / "tests" / "recorded" / "peer_loss.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["message"]


@pytest.mark.parametrize("row", read_recorded(), ids=lambda row: row["source"])
def test_peer_loss_in_recorded_messages(row):
    kind = getattr(builtins, row["kind"], None) or getattr(torch.distributed, row["kind"])
    assert error_origin.is_peer_loss(kind(row["text"])) is row["lost"]


def test_faults_of_a_machine(tmp_path):
    disk = OSError(28, "No space left on device", str(tmp_path / "it's full"))
    worker = RuntimeError(f"Caught OSError in DataLoader worker process 0.\n{disk}")
    cause = RuntimeError("training failed")
    cause.__cause__ = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel")
    for error in (disk, worker, cause, RuntimeError("Xid (PCI:0000:3b:00): 79, GPU has fallen")):
        assert error_origin.find_node_fault(error)
    elsewhere = OSError(28, "No space left on device", "/proc/full")
    hidden = RuntimeError("a cache is full")
    hidden.__context__, hidden.__suppress_context__ = disk, True
    # Xid 31 is an illegal address: the script's. So are a script's own words.
    of_script = [
        RuntimeError("NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault"),
        RuntimeError("HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in …"),
        RuntimeError("system not yet initialized"),
        KeyError("Xid: 3"),
        ValueError("not a label: 'the GPU has fallen off the bus'"),
    ]
    full = OSError(28, "No space left on device")
    for error in (elsewhere, full, hidden, RuntimeError("ECC"), *of_script):
        assert not error_origin.find_node_fault(error)
