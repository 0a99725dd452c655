"""Parameter servers: in step they are an all-reduce; else nobody gets further than allowed."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import launchers
import served
from mpiddp.errors import ConfigurationError
from mpiddp.sync.parameter_server import serving
from mpiddp.sync.parameter_server.flat_parameters import FlatModel
from mpiddp.sync.parameter_server.server import Server, UpdateRule
from mpiddp.sync.parameter_server.serving import assign_roles, describe_roles
from pool import Pool

STEPS = 20
ROUNDING = 1e-6
"""By the largest parameter: contributions are added in another order."""
DEADLINE = 6.0
"""Seconds after which a silent rank is taken to be lost; more than a busy machine stops one."""


def in_step(servers: int, placement: str) -> dict[str, Any]:
    return {"steps": STEPS, "servers": servers, "placement": placement, "bound": 0}


IN_STEP = {
    ("openmpi", 2): [
        in_step(1, "colocated"),
        # A type that NumPy lacks.
        {**in_step(1, "dedicated"), "dtype": "bfloat16"},
        in_step(2, "colocated"),
    ],
    ("mpich", 3): [
        in_step(1, "dedicated"),
        in_step(2, "colocated"),
        # Each message has tens of parts, the last one shorter.
        {**in_step(3, "colocated"), "longest": 100},
    ],
}
IN_STEP["impi", 2] = IN_STEP["openmpi", 2]
"""By launcher and number of ranks."""


def train(
    pool: Pool, ways: list[dict[str, Any]], folder: Path | None = None
) -> list[list[dict[str, Any]]]:
    """For each way what every rank says of it."""
    found = pool.call(served.run, ways, timeout=120, cwd=folder).values
    return [list(reports) for reports in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("launcher", "size"),
    [pytest.param(*each, marks=launchers.marks_of(each[0])) for each in IN_STEP],
)
def test_in_step_servers_come_to_what_one_process_and_the_framework_come_to(launcher, size, pool):
    ways = IN_STEP[launcher, size]
    for way, reports in zip(ways, train(pool(launcher, size), ways), strict=True):
        for report in reports:
            assert report["same"], way
            # Contributions are added in the order of ranks; the optimiser rounds some numbers by
            # where in its tensor they stand, and shards cut tensors.
            assert report["difference"] <= (0 if way["servers"] == 1 else ROUNDING), way
            assert set(report["staleness"]) <= {"0"}, way
            assert report.get("from_framework", 0) <= ROUNDING, way
        assert ("from_framework" in reports[0]) is (way["placement"] == "colocated")


@pytest.mark.mpi
def test_nobody_gets_further_ahead_than_allowed(pool, tmp_path):
    ways = [
        {
            "steps": STEPS,
            "servers": 2,
            "placement": "colocated",
            "bound": bound,
            # The other one could do all of its steps meanwhile, and does them if it may.
            "delay": 0.005,
            "sleeper": 0,
            "sleep": 0.5,
            "awaits": bound is None,
        }
        for bound in (1, 3, None)
    ]
    for way, reports in zip(ways, train(pool("openmpi", 2), ways, tmp_path), strict=True):
        late: Counter[int] = Counter()
        for report in reports:
            assert report["same"], way
            late.update({int(updates): times for updates, times in report["staleness"].items()})
        workers, bound = 2, way["bound"]
        assert late.total() == way["servers"] * workers * STEPS, way
        assert max(late) > 0, way
        # From the weights of a step to its gradient each other worker makes at most so many steps:
        # as many as it was behind, its own step, and as many as it may then be ahead.
        assert max(late) > 7 if bound is None else max(late) <= (workers - 1) * (2 * bound + 1), way


@pytest.mark.mpi
def test_an_epoch_may_take_longer_than_a_collective_call(pool):
    # The dedicated server, and with a large bound the other worker, have nothing to do for 6.5 s.
    way = {"steps": STEPS, "servers": 1, "placement": "dedicated", "deadline": 6.0}
    slow = {**way, "sleeper": 0, "sleep": 0.65, "sleeps": 10}
    ways = [{**slow, "bound": bound} for bound in (0, 100)]
    # A gradient that comes during a long update is not missing after it.
    ways.append({**way, "sleeper": 0, "sleep": 0.1, "bound": None, "is_busy": True})
    for reports in train(pool("openmpi", 3), ways):
        assert all(report["same"] for report in reports)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("role", "bound"), [pytest.param("worker", None, marks=pytest.mark.long), ("server", 0)]
)
def test_a_worker_or_server_that_is_lost_ends_the_job(role, bound, tmp_path):
    # The last rank serves.
    ranks = 3 if role == "worker" else 2
    way = {
        "steps": 10**6, "servers": 1, "placement": "dedicated", "bound": bound,
        "victim": 1, "how": "is stopped", "deadline": DEADLINE,
    }  # fmt: skip
    program = [launchers.PROGRAMS / "served.py", json.dumps([way])]
    result = launchers.run("openmpi", ranks, program, cwd=tmp_path)
    seconds = time.time() - float((tmp_path / "failed").read_text())
    assert "Traceback" not in result.output, str(result)
    result.expect(6)
    assert seconds >= DEADLINE / 2
    said = {
        "worker": r"parameter server 0 has heard nothing of rank 1 on \S+ for 6 s",
        "server": r"waited for the weights of the parameter server that is rank 1 on \S+, for 8 s",
    }
    assert re.search(said[role], result.stderr), str(result)


DID_NOT_COME = (
    r"all workers have finished an epoch, and one of rank \d on \S+, rank \d on \S+ "
    rf"did not come within {served.SOON} s"
)


@pytest.mark.mpi
@pytest.mark.parametrize("victim", [1, 2], ids=["a worker", "a server"])
def test_who_owes_nothing_and_does_not_come_is_missed(victim, pool, tmp_path):
    way = {"steps": 2, "servers": 1, "placement": "dedicated", "bound": 0, "victim": victim}
    (reports,) = train(pool("openmpi", 3), [way], tmp_path)
    said = [report["said"] for rank, report in enumerate(reports) if rank != victim]
    assert all(re.fullmatch(f"PeerLostError: {DID_NOT_COME}", each) for each in said)


def test_the_next_gradient_of_a_worker_that_got_weights_is_due():
    wire = SimpleNamespace(timeout=0.0, names=[""] * 2)
    rule = UpdateRule(lambda each: torch.optim.SGD(each, 0.01), lambda _: 0.01, 0)
    server = Server(wire, 1, range(2), torch.ones(8), [8], rule)
    server._listen = server._send = lambda *_: None
    server._answer(1)
    assert server._deadlines.find_lost() == [1]


OPTIMIZERS = {
    "sgd": lambda each: torch.optim.SGD(each, 0.01, 0.9, nesterov=True, fused=True),
    "decay": lambda each: torch.optim.SGD(each, 0.01, weight_decay=0.1, fused=True),
    "adamw": lambda each: torch.optim.AdamW(each, 0.01, weight_decay=0.0, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bound", [2, None])
def test_a_pass_over_the_data_moves_weights_as_far_without_steps_in_common(kind, bound):
    workers, steps = 4, 20

    def train_with(bound: int | None) -> float:
        """How far equal gradients move a weight."""
        wire = SimpleNamespace(timeout=9.0, names=[""] * workers)
        server = Server(
            wire,
            1,
            range(workers),
            torch.ones(8),
            [8],
            UpdateRule(OPTIMIZERS[kind], lambda _: 0.01, bound),
        )
        server._answer = lambda place: None
        for _ in range(steps):
            for place in range(workers):
                server._gradients[place].fill_(0.0 if kind == "decay" else 0.01)
                server._take(place)
        return float(1 - server._weights[0])

    # Momentum takes longer to build up where updates are fewer.
    assert train_with(bound) == pytest.approx(train_with(0), rel=0.4 if kind == "sgd" else 0.02)


@pytest.mark.parametrize(
    ("size", "servers", "dedicated", "expected"),
    [
        (4, 1, False, ((3,), (0, 1, 2, 3))),
        (4, 1, True, ((3,), (0, 1, 2))),
        (4, 3, True, ((1, 2, 3), (0,))),
        (1, 1, False, ((0,), (0,))),
        (2, 2, True, "2 dedicated servers leave no worker on 2 ranks: .* colocated"),
        (2, 3, False, "3 servers need as many ranks, found 2: .* fewer --servers"),
    ],
)
def test_the_last_ranks_serve(size, servers, dedicated, expected):
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            assign_roles(size, servers, dedicated=dedicated)
        return
    found = assign_roles(size, servers, dedicated=dedicated)
    assert (found.servers, found.workers) == expected
    said = describe_roles(found, 3)
    assert said.startswith(f"{servers} {'dedicated' if dedicated else 'colocated'} parameter serv")


def test_a_flat_model_is_the_model():
    torch.manual_seed(1)
    module, other = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    other.load_state_dict(module.state_dict())
    module[0].bias.requires_grad_(False)
    flat = FlatModel(module)
    features = torch.randn(5, 3)
    for each in (module, other):
        each(features).square().sum().backward()
    parts = [other[0].weight, other[2].weight, other[2].bias]
    flat.collect_gradients()
    assert torch.equal(flat.parameters, torch.cat([part.detach().flatten() for part in parts]))
    assert torch.equal(flat.gradients, torch.cat([part.grad.flatten() for part in parts]))
    flat.parameters.zero_()
    assert torch.equal(module(features), module[2].bias.expand(5, 2))
    flat.let_go_of_gradients()
    assert all(part.grad is None for part in module.parameters())
    # The first layer has no part in this.
    module[2](torch.ones(1, 4)).sum().backward()
    flat.collect_gradients()
    assert torch.equal(flat.gradients, torch.tensor([0.0] * 12 + [1.0] * 10))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
def test_shards_cover_all_parameters_alike_and_are_cut_at_their_borders(count):
    flat = FlatModel(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    shards = flat.shards(count)
    lengths = [shard.stop - shard.start for shard in shards]
    assert (shards[0].start, shards[-1].stop, sum(lengths)) == (0, 39, 39)
    assert max(lengths) - min(lengths) <= 1
    pieces = [flat.pieces(shard) for shard in shards]
    assert [sum(each) for each in pieces] == lengths
    borders = list(itertools.accumulate(itertools.chain(*pieces)))
    # 20 weights and 4 biases, then 12 and 3.
    assert borders == sorted({20, 24, 36, 39, *(shard.stop for shard in shards)})


def test_more_servers_than_parameters_are_refused(monkeypatch):
    session = SimpleNamespace(comm=object(), duplicate=lambda: object())
    monkeypatch.setattr(serving, "check_threads", lambda: None)
    module, shared_out = nn.Linear(1, 2), assign_roles(5, 5, dedicated=False)
    with pytest.raises(ConfigurationError, match="5 servers share 4 parameters: use fewer"):
        serving.Serving(session, shared_out, module, UpdateRule(None, None, 0), None)
