"""What tests of ranks share."""

import pytest

from mpiddp.remote import call


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a busy machine may be stopped for longer than a caller waits for it."""
    for name in ("FINISH_SECONDS", "STOP_SECONDS", "LOST_SECONDS"):
        monkeypatch.setattr(call, name, 60.0)
