"""What an error is called, and which exit code it has."""

from __future__ import annotations

import pytest

from mpiddp.errors import (
    ConfigurationError,
    LaunchError,
    MpiddpError,
    PeerLostError,
    UnreachableError,
)
from mpiddp.launch import report


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MpiddpError("x"), 1),
        (ConfigurationError("x"), 2),
        (LaunchError("x"), 3),
        (UnreachableError("x"), 4),
        (PeerLostError("x"), 6),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(None), 0),
        (SystemExit(0), 0),
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
    assert report.exit_code(error) == code


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        # What Gloo and the store said when a peer was killed.
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"), True),
        (
            RuntimeError(
                "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
                "operation to complete"
            ),
            True,
        ),
        # Anybody's error with the same words.
        (RuntimeError("Connection reset by peer"), False),
        (RuntimeError("timed out waiting for the licence server"), False),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("Connection closed by peer"), False),
    ],
    ids=repr,
)
def test_peer_loss(error, lost):
    assert report.is_peer_loss(error) is lost


def test_a_lost_connection_of_the_store_is_a_lost_peer():
    from torch.distributed import DistNetworkError

    assert report.is_peer_loss(DistNetworkError("whatever it says"))
