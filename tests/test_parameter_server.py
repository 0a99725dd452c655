"""Parameter servers: in step they are an all-reduce; else nobody gets further than allowed."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter

import pytest
import torch
from torch import nn

import launchers
import ranks
from mpiddp.errors import ConfigurationError
from mpiddp.sync.flat import FlatModel
from mpiddp.sync.serving import assign_roles, describe_roles

STEPS = 20
ROUNDING = 1e-6
"""By the largest parameter: contributions are added in another order."""
DEADLINE = 3.0
"""Seconds after which a silent rank is taken to be lost."""


def train(launcher: str, size: int, *arguments: object) -> list[dict]:
    """Every rank's report."""
    row = launchers.table()[launcher]
    found, _ = ranks.collect(row, size, "served.py", *map(str, arguments), timeout=120)
    return found


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("launcher", "size", "servers", "placement"),
    [
        ("openmpi", 2, 1, "colocated"),
        ("openmpi", 3, 1, "dedicated"),
        ("mpich", 3, 2, "colocated"),
        ("openmpi", 4, 4, "colocated"),
        ("openmpi", 4, 2, "dedicated"),
    ],
)
def test_in_step_servers_come_to_what_one_process_comes_to(launcher, size, servers, placement):
    for report in train(launcher, size, STEPS, 0, servers, placement, 0):
        assert report["same"]
        # Contributions are added in the same order, whatever the part that a server holds.
        assert report["difference"] == 0
        assert set(report["staleness"]) <= {"0"}
        if placement == "colocated":
            assert report["from_framework"] <= ROUNDING


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("bound", [1, 3])
def test_bounded_servers_keep_the_bound_under_delays(bound):
    reports = train("openmpi", 4, STEPS, bound, 2, "dedicated", 0.02)
    late: Counter[int] = Counter()
    for report in reports:
        assert report["same"]
        late.update({int(updates): times for updates, times in report["staleness"].items()})
    assert late.total() == 2 * 2 * STEPS
    workers = reports[0]["workers"]
    assert 0 < max(late) <= (workers - 1) * (2 * bound + 1)


@pytest.mark.mpi
@pytest.mark.timeout(150)
def test_without_a_bound_workers_go_at_their_own_pace():
    reports = train("openmpi", 3, STEPS, "none", 1, "colocated", 0.01)
    (staleness,) = (report["staleness"] for report in reports if report["staleness"])
    assert sum(staleness.values()) == 3 * STEPS
    assert all(report["same"] for report in reports)


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("bound", ["0", "none"])
@pytest.mark.parametrize("how", ["is killed", "is stopped"])
@pytest.mark.parametrize(("who", "role"), [(1, "worker"), (2, "server")])
def test_a_worker_or_server_that_is_lost_ends_the_job(who, role, how, bound, tmp_path):
    row = launchers.table()["openmpi"]
    arguments = [10**6, bound, 1, "dedicated", 0, who, how, DEADLINE]
    program = [ranks.HERE / "served.py", *map(str, arguments)]
    result = launchers.run(row, 3, program, timeout=60, cwd=tmp_path)
    seconds = time.time() - float((tmp_path / "failed").read_text())
    assert "Traceback" not in result.output, str(result)
    if how == "is killed" and result.returncode != 6:
        # The launcher was quicker.
        assert result.returncode == 128 + signal.SIGKILL, str(result)
        return
    result.expect(6)
    assert DEADLINE * (how == "is stopped") <= seconds < 2 * DEADLINE + 10
    said = {
        "worker": r"parameter server 0 has heard nothing of rank 1 on \S+ for 3 s",
        "server": r"waited for the weights of the parameter server that is rank 2 on \S+, for 5 s",
    }
    assert re.search(said[role], result.stderr), str(result)


@pytest.mark.parametrize(
    ("size", "servers", "dedicated", "expected"),
    [
        (4, 1, False, ((3,), (0, 1, 2, 3))),
        (4, 1, True, ((3,), (0, 1, 2))),
        (4, 3, True, ((1, 2, 3), (0,))),
        (1, 1, False, ((0,), (0,))),
    ],
)
def test_the_last_ranks_serve(size, servers, dedicated, expected):
    roles = assign_roles(size, servers, dedicated=dedicated)
    assert (roles.servers, roles.workers) == expected


@pytest.mark.parametrize(
    ("size", "servers", "dedicated", "message"),
    [
        (2, 2, True, "2 dedicated servers leave no worker on 2 ranks: .* colocated"),
        (2, 5, True, "5 dedicated servers leave no worker"),
        (2, 3, False, "3 servers need as many ranks, found 2: .* fewer --servers"),
    ],
)
def test_too_few_ranks_are_refused(size, servers, dedicated, message):
    with pytest.raises(ConfigurationError, match=message):
        assign_roles(size, servers, dedicated=dedicated)


def test_roles_are_described():
    four = assign_roles(4, 1, dedicated=True)
    assert describe_roles(four, 0) == "1 dedicated parameter server, 3 workers in step"
    two = assign_roles(4, 2, dedicated=False)
    assert describe_roles(two, 3) == "2 colocated parameter servers, 4 workers up to 3 steps apart"
    assert describe_roles(two, None).endswith("4 workers at their own pace")


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
    assert torch.equal(flat.parameters, torch.cat([part.detach().flatten() for part in parts]))
    assert torch.equal(flat.gradients, torch.cat([part.grad.flatten() for part in parts]))
    flat.parameters.zero_()
    assert torch.equal(module(features), module[2].bias.expand(5, 2))
    flat.zero_gradients()
    assert not module[2].weight.grad.any()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
def test_shards_cover_all_parameters_once_and_are_alike(count):
    flat = FlatModel(nn.Linear(5, 4))
    shards = flat.shards(count)
    lengths = [shard.stop - shard.start for shard in shards]
    assert (shards[0].start, shards[-1].stop, sum(lengths)) == (0, 24, 24)
    assert max(lengths) - min(lengths) <= 1


def test_a_model_of_several_types_is_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigurationError, match=r"float32 on cpu, torch.float64 on cpu"):
        FlatModel(module)
