"""A script in which the backend is used beside forks, restarts, and a rank that is killed.

torchrun --nproc-per-node 2 tests/torch_backend/failing.py HOW,…
python tests/torch_backend/failing.py HOW,… STORE
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import mpiddp.torch_backend  # noqa: F401 - registers the backend

COUNT = 100_000
WAIT = timedelta(seconds=60)


def sum_up() -> None:
    tensor = torch.full((COUNT,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    size = dist.get_world_size()
    assert torch.equal(tensor, torch.full_like(tensor, size * (size - 1) / 2))


def lose_a_rank() -> None:
    sum_up()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("first sum", "")
    else:
        store.get("first sum")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        sum_up()
    except dist.DistNetworkError as error:
        print(error, flush=True)


def load_data() -> None:
    """Forked workers of a data loader come and go while an asynchronous call is under way.

    A child that makes a call itself is refused, also if it was forked in the middle of one.
    """
    # A child that ends must not wait for Gloo's threads; after an asynchronous call none does.
    message = torch.ones(1)
    dist.send(message, 1) if dist.get_rank() == 0 else dist.recv(message, 0)
    if (child := os.fork()) == 0:
        sys.exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(0.2)
        if (child := os.fork()) == 0:
            try:
                sum_up()
            except dist.DistBackendError as error:
                os._exit(7 if "forked child" in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        work.wait()
    else:
        time.sleep(1)
        dist.all_reduce(torch.ones(1))
    for _ in range(2):
        data = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=2)
        total = torch.zeros(1)
        for (values,) in data:
            work = dist.all_reduce(torch.ones(COUNT), async_op=True)
            total += values.sum()
            work.wait()
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size() * 780
    print("loaded", flush=True)


def restart() -> None:
    """The first attempt ends with an error on one rank; torchrun starts all of them again."""
    sum_up()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
        sys.exit(1)
    try:
        sum_up()
        print("restarted", flush=True)
    except RuntimeError:
        time.sleep(60)


HOW = {"lost": lose_a_rank, "forks": load_data, "restart": restart}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        rank, store = 1 if os.fork() == 0 else 0, f"file://{sys.argv[2]}"
        dist.init_process_group("mpiddp", store, WAIT, 2, rank)
    else:
        dist.init_process_group("mpiddp", timeout=WAIT)
    for how in sys.argv[1].split(","):
        HOW[how]()
    dist.destroy_process_group()
