"""Parameter servers: in step they are an all-reduce; else nobody gets further than allowed."""

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
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import launchers
import served
from mpiddp.errors import ConfigurationError
from mpiddp.sync.parameter_server import serving
from mpiddp.sync.parameter_server.flat_parameters import FlatModel
from mpiddp.sync.parameter_server.server import Server, UpdateRule, load_optimizer_state
from mpiddp.sync.parameter_server.serving import assign_roles, describe_roles
from mpiddp.sync.parameter_server.staleness import Clock
from mpiddp.sync.parameter_server.worker_deadlines import WorkerDeadlines
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


def train(
    pool: Pool, ways: list[dict[str, Any]], folder: Path | None = None
) -> list[list[dict[str, Any]]]:
    found = pool.call(served.run, ways, timeout=120, cwd=folder).values
    return [list(reports) for reports in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("launcher", "size"),
    [pytest.param(*each, marks=launchers.marks_of(each[0])) for each in IN_STEP],
)
def test_in_step_servers_come_to_what_one_process_comes_to(launcher, size, pool):
    ways = IN_STEP[launcher, size]
    for way, reports in zip(ways, train(pool(launcher, size), ways), strict=True):
        for report in reports:
            assert report["same"], way
            # Contributions are added in the order of ranks; the optimiser rounds some numbers by
            # where in its tensor they stand, and shards cut tensors.
            assert report["difference"] <= (0 if way["servers"] == 1 else ROUNDING), way
            assert set(report["staleness"]) <= {"0"}, way


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
        "victim": 1, "is_stopped": True, "deadline": DEADLINE,
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


@pytest.mark.parametrize("victim", [1, 2], ids=["a worker", "a server"])
def test_who_owes_nothing_and_does_not_come_is_missed(victim, pool, tmp_path):
    way = {"steps": 2, "servers": 1, "placement": "dedicated", "bound": 0, "victim": victim}
    (reports,) = train(pool("openmpi", 3), [way], tmp_path)
    said = (
        "PeerLostError: all workers have finished an epoch, and one of "
        rf"rank \d on \S+, rank \d on \S+ did not come within {served.SOON} s"
    )
    for rank, report in enumerate(reports):
        assert rank == victim or re.fullmatch(said, report["said"]), report


def make_server(rule: UpdateRule, workers: int = 2, **wire: Any) -> Server:
    """Its eight weights are 1."""
    wire = SimpleNamespace(**{"timeout": 9.0, "names": [""] * workers, **wire})
    return Server(wire, 1, range(workers), torch.ones(8), [8], rule)


def test_the_next_gradient_of_a_worker_that_got_weights_is_due():
    sent: list[str] = []
    rule = UpdateRule(lambda each: torch.optim.SGD(each, 0.01), lambda _: 0.01, 0)
    server = make_server(
        rule, timeout=0.0, send=lambda *_: sent.append("new"), wait=lambda *_: sent.append("over")
    )
    server._listen = lambda _: None
    for _ in range(2):
        server._answer(1)
    assert server._deadlines.find_lost() == [1]
    # What was sent before is let go of; and weights that are being sent do not change.
    server._gradients = [torch.zeros(8)] * 2
    for place in range(2):
        server._take(place)
    assert sent == ["new", "over", "new", "over", "new", "new"]


def test_a_group_of_parameters_keeps_its_share_of_the_rate():
    def make(each):
        return torch.optim.SGD([{"params": each, "lr_share": 0.5}], 1.0)

    server = make_server(UpdateRule(make, lambda step: 0.1 * step, 0))
    server.update(torch.ones(8), 2)
    assert server._weights.tolist() == pytest.approx([1 - 0.5 * 0.2] * 8)


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
        server = make_server(UpdateRule(OPTIMIZERS[kind], lambda _: 0.01, bound), workers)
        server._answer = lambda place: None
        for _ in range(steps):
            for place in range(workers):
                server._gradients[place].fill_(0.0 if kind == "decay" else 0.01)
                server._take(place)
        return float(1 - server._weights[0])

    # Momentum takes longer to build up where updates are fewer.
    assert train_with(bound) == pytest.approx(train_with(0), rel=0.4 if kind == "sgd" else 0.02)


def test_shards_are_alike_and_their_pieces_are_cut_at_borders():
    flat = FlatModel(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    shards = flat.shards(8)
    lengths = [shard.stop - shard.start for shard in shards]
    assert (shards[0].start, shards[-1].stop, sum(lengths)) == (0, 39, 39)
    assert max(lengths) - min(lengths) <= 1
    borders = list(itertools.accumulate(itertools.chain(*map(flat.pieces, shards))))
    # 20 weights and 4 biases, then 12 and 3; one shard begins with the 12.
    assert borders == sorted({20, 24, 36, 39, *(shard.stop for shard in shards)})


@pytest.mark.parametrize(
    ("size", "servers", "dedicated", "expected"),
    [
        (4, 1, False, ((3,), (0, 1, 2, 3))),
        (4, 3, True, ((1, 2, 3), (0,))),
        (2, 2, True, "2 dedicated servers leave no worker on 2 ranks: .* or use --server-place"),
        (2, 3, True, "3 dedicated servers leave no worker on 2 ranks: .* use 2 --servers or fewer"),
        (2, 3, False, "3 servers need as many ranks, found 2: .* or fewer --servers"),
    ],
)
def test_the_last_ranks_serve(size, servers, dedicated, expected):
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            assign_roles(size, servers, dedicated=dedicated)
        return
    found = assign_roles(size, servers, dedicated=dedicated)
    assert (found.servers, found.workers) == expected
    said = "3 dedicated parameter servers, 1" if dedicated else "1 colocated parameter server, 4"
    paces = {0: "in step", 3: "up to 3 steps apart", None: "at their own pace"}
    for bound, pace in paces.items():
        assert re.fullmatch(f"{said} workers? {pace}", describe_roles(found, bound))


def test_more_servers_than_parameters_are_refused(monkeypatch):
    session = SimpleNamespace(comm=object(), duplicate=lambda: object())
    monkeypatch.setattr(serving, "check_threads", lambda: None)
    module, shared_out = nn.Linear(1, 2), assign_roles(5, 5, dedicated=False)
    with pytest.raises(ConfigurationError, match="5 servers share 4 parameters: use fewer"):
        serving.Serving(session, shared_out, module, UpdateRule(None, None, 0), None)


# The clock: nobody gets further ahead than allowed


BOUNDS = st.none() | st.integers(0, 4)


def run_clock(workers, bound, choices, steps):
    """Workers that compute take turns as ``choices`` says; yields the steps after each push."""
    clock = Clock(workers, bound)
    computing = set(range(workers))
    done = [0] * workers
    for choice in choices:
        ready = sorted(worker for worker in computing if done[worker] < steps)
        if not ready:
            return
        worker = ready[choice % len(ready)]
        computing.remove(worker)
        done[worker] += 1
        clock.push(worker)
        clock.update(worker)
        released = clock.release()
        computing.update(released)
        yield clock, done, computing


@given(st.integers(1, 5), BOUNDS, st.lists(st.integers(0, 100), max_size=80), st.integers(1, 12))
def test_who_computes_is_never_more_than_the_bound_ahead(workers, bound, choices, steps):
    for clock, done, computing in run_clock(workers, bound, choices, steps):
        assert (clock.updates, clock.slowest) == (sum(done), min(done))
        for worker in range(workers):
            within = bound is None or done[worker] - min(done) <= bound
            # Whoever may go on does so at once, and nobody else.
            assert (worker in computing) is within


@given(st.integers(2, 5), st.integers(0, 4), st.lists(st.integers(0, 100), max_size=80))
def test_staleness_is_bounded_by_what_the_others_can_push(workers, bound, choices):
    for clock, done, _ in run_clock(workers, bound, choices, 1000):
        # While one computes each other one can be bound behind it, and get bound + 1 ahead of it.
        assert max(clock.staleness) <= (workers - 1) * (2 * bound + 1)
        assert clock.staleness.total() == sum(done)


def test_staleness_is_what_others_did_meanwhile_and_in_step_there_is_none():
    clock = Clock(3, None)
    for worker in (0, 0, 0, 0, 2):
        clock.push(worker)
        clock.update(worker)
        assert clock.release() == [worker]
    assert clock.staleness == {0: 4, 4: 1}
    clock = Clock(3, 0)
    for worker in (2, 0):
        clock.push(worker)
        assert clock.release() == []
    clock.push(1)
    clock.update_together()
    assert (clock.release(), clock.staleness, clock.updates) == ([0, 1, 2], {0: 3}, 1)


@pytest.mark.parametrize(("bound", "updates"), [(0, 7), (2, 21), (None, 21)])
def test_who_goes_on_from_a_state_has_made_its_steps(bound, updates):
    clock = Clock(3, bound)
    clock.load_state({"steps": [7, 8, 9], "updates": 24, "staleness": {1: 4}}, 9)
    assert (clock.begun, clock.updates, clock.staleness) == (7, 24, {1: 4})
    # Of other workers: each made as many steps as the training.
    clock.load_state({"steps": [5, 9], "updates": 14, "staleness": {}}, 7)
    assert (clock.begun, clock.updates) == (7, updates)


# Who has been silent for too long


class Watch:
    """Passes while the watch looks, twice a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = WorkerDeadlines(3, 10, lambda: self.now)

    def pass_until(self, end: float) -> list[int]:
        """Whom the last look finds."""
        found = []
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            found = self.watch.find_lost()
        return found


def test_who_owes_a_gradient_and_is_silent_is_lost():
    clock = Watch()
    # Nobody is late before the first message, which makes the others due.
    assert clock.pass_until(1000) == []
    clock.watch.hear(1)
    assert clock.pass_until(1010) == []
    assert clock.pass_until(1010.1) == [0, 2]
    for worker in range(3):
        clock.watch.hear(worker)
    # Whoever waits for weights owes nothing until it has them.
    assert clock.pass_until(1100) == []
    clock.watch.expect(2)
    assert clock.pass_until(1110.5) == [2]
    # One that goes on does not hide the others.
    clock.watch.expect(0)
    assert clock.watch.find_lost() == [2]
    # Between epochs nobody is late.
    clock.watch.rest()
    assert clock.pass_until(2000) == []
    # Whoever has finished its epoch begins none.
    clock.watch.excuse(0)
    assert clock.pass_until(2100) == []
    clock.watch.hear(1)
    clock.watch.excuse(0)
    assert clock.pass_until(2111) == [2]


def test_time_in_which_nobody_could_look_does_not_count():
    clock = Watch()
    clock.watch.hear(0)
    clock.now = 1000
    assert clock.watch.find_lost() == []
    assert clock.pass_until(1008.5) == []
    assert clock.pass_until(1009.5) == [1, 2]


def test_parameters_without_a_gradient_have_zeros_and_frozen_ones_no_place() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].bias.requires_grad_(False)
    flat = FlatModel(module)
    # The first layer has no part in the second step.
    for part, width in ((module, 3), (module[1], 4)):
        flat.let_go_of_gradients()
        torch.autograd.backward(part(torch.ones(1, width)).sum())
        flat.collect_gradients()
    assert torch.equal(flat.gradients, torch.tensor([0.0] * 12 + [1.0] * 10))


def test_moments_are_loaded_from_a_checkpoint_and_options_stay() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    before = torch.optim.SGD([parameter], 0.1, 0.9, weight_decay=0.0, fused=True)
    before.step()
    after = torch.optim.SGD([parameter], 0.1, 0.5, weight_decay=0.2, foreach=True)
    load_optimizer_state(after, before.state_dict())
    assert torch.equal(after.state[parameter]["momentum_buffer"], parameter.grad)
    (group,) = after.param_groups
    assert [group[name] for name in ("momentum", "weight_decay", "fused")] == [0.5, 0.2, None]
    assert group["foreach"] is True
