"""What tests of training in this process share."""

from collections.abc import Iterator

import pytest
import torch

from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.options import Options
from mpiddp.launch.session import Session
from mpiddp.launch.startup import start


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Several threads for a small model only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def session(one_thread: None) -> Iterator[Session]:
    """A session of one rank, without MPI."""
    with start(Options(backend="gloo", allow_shared_gpu=True), FailureHandler()) as session:
        torch.set_num_threads(1)  # A session of one rank takes all cores.
        yield session
