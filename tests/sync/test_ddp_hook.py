"""DDP's buckets averaged by schedules: what plain DDP comes to, on every rank the same bits."""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import launchers
import mpiddp
import wrong_algorithms
from crews import Crew
from mistakes import hear
from mpiddp.collectives import MPI
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.tuning import Range, Tuning
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import names
from mpiddp.sync.ddp_hook import ScheduleHook, Synchronization, attach, register_comm_hook

STEPS = 6
BUCKET_MEGABYTES = 0.05


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 130), nn.Linear(130, 7))


def train(rank: int, synchronization: Synchronization | None) -> tuple[torch.Tensor, dict]:
    """The trained parameters, flat; and what is to be said of the buckets."""
    model = DistributedDataParallel(
        make_model(),
        bucket_cap_mb=BUCKET_MEGABYTES,
        gradient_as_bucket_view=synchronization is not None,
    )
    hook = attach(synchronization, model) if synchronization is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    samples = torch.Generator().manual_seed(rank)
    overlaps = set()
    for step in range(STEPS):
        if hook is not None and step == STEPS // 2:
            hook.overlap = not hook.overlap
        features = torch.randn(9, 40, generator=samples)
        labels = torch.randint(0, 7, (9,), generator=samples)
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        overlaps.add(None if hook is None else hook.overlap)
        optimizer.step()
    shared = {parameter.grad.is_shared() for parameter in model.parameters()}
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return flat, {"shared": sorted(shared), "overlaps": len(overlaps)}


def join_early(session: mpiddp.Session, ways: list[dict[str, Any]]) -> list[float]:
    """Rank 0 has one step, the others have all; how far each way leads from plain DDP."""
    rank = session.world.rank

    def train_uneven(way: dict[str, Any] | None) -> torch.Tensor:
        model = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MEGABYTES)
        if way is not None:
            assert register_comm_hook(model, **way) is model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = torch.Generator().manual_seed(rank)
        with model.join():
            for step in range(STEPS if rank > 0 else 1):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                model(torch.randn(9, 40, generator=samples)).square().mean().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    plain = train_uneven(None)
    return [float((train_uneven(way) - plain).abs().max()) for way in ways]


def refuse(session: mpiddp.Session) -> list[str]:
    model = DistributedDataParallel(make_model())
    alone, _ = torch.distributed.new_subgroups(1)
    calls: list[Callable[[], object]] = [
        lambda: register_comm_hook(model.module),  # type: ignore[arg-type]
        lambda: register_comm_hook(DistributedDataParallel(make_model(), process_group=alone)),
        lambda: register_comm_hook(model, "central"),
        lambda: register_comm_hook(model, wire_dtype="bfloat16"),  # type: ignore[arg-type]
        lambda: register_comm_hook(model, wire_dtype=torch.int32),
        lambda: register_comm_hook(register_comm_hook(model)),
        lambda: register_comm_hook(
            DistributedDataParallel(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
        ),
    ]
    with wrong_algorithms.registered():
        # The owners of its chunks are drawn on each rank.
        drawn = hear(lambda: register_comm_hook(DistributedDataParallel(make_model()), "drawn"))
    return [*map(hear, calls), drawn]


def compare(session: mpiddp.Session, ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train in each of ``ways``, arguments of a Synchronization; compare with plain DDP."""
    torch.set_num_threads(1)
    plain, _ = train(session.world.rank, None)
    reports = []
    for way in ways:
        name = way.get("wire_dtype")
        found, said = train(
            session.world.rank,
            Synchronization(**{**way, "wire_dtype": name and getattr(torch, name)}),
        )
        digest = session.gather(found.numpy().tobytes())
        difference = float((found - plain).abs().max() / plain.abs().max())
        reports.append({"same": len(set(digest)) == 1, "difference": difference, **said})
    return reports


ROUNDING = 2e-6
"""Of float32, added up in another order over some steps, relative to the largest parameter."""
NARROW = 2e-2
"""The same where gradients travel in bfloat16, which has 8 bits."""
WHOLE = [name for name in names() if name != "central"]
"""All algorithms that leave nobody out."""


@pytest.mark.parametrize(
    ("launcher", "size"),
    [("openmpi", 2), ("mpich", 3), pytest.param("impi", 3, marks=launchers.marks_of("impi"))],
)
def test_every_algorithm_comes_to_what_the_framework_comes_to(launcher, size, pool):
    ways = [{"algorithm": name} for name in ("auto", *WHOLE, "ring:segments=3")]
    ways += [{"algorithm": "ring", "transport": each} for each in ("mpi", "torch")]
    found = pool(launcher, size).call(compare, ways, timeout=120).values
    for rank, reports in enumerate(found):
        for way, report in zip(ways, reports, strict=True):
            assert report["same"], (rank, way)
            assert report["difference"] <= ROUNDING, (rank, way, report)
            # Half of the steps had overlap, the others had none.
            assert report["overlaps"] == 2
            # Where ranks work in each other's memory, the buckets lie there.
            in_memory = way.get("transport", "auto") == "auto"
            assert report["shared"] == [in_memory], (rank, way)


def test_gradients_travel_in_a_narrower_type(pool):
    ways = [
        {"algorithm": algorithm, "transport": transport, "wire_dtype": name}
        for algorithm, transport in (("auto", "auto"), ("ring", "mpi"))
        for name in ("bfloat16", "float16")
    ]
    for reports in pool("openmpi", 3).call(compare, ways).values:
        for way, report in zip(ways, reports, strict=True):
            assert report["same"], way
            # Something was rounded on the way, and not much.
            assert ROUNDING < report["difference"] <= NARROW, (way, report)


def test_one_line_in_an_ordinary_script_changes_nothing(pool):
    """Also if a rank has joined, which counts with zeros."""
    ways = [{}, {"overlap": True}, {"algorithm": "ring", "transport": "mpi"}]
    narrow = {"wire_dtype": torch.bfloat16}
    for *same, rounded in pool("openmpi", 2).call(join_early, [*ways, narrow]).values:
        # Two numbers are added in one order only, so that all bits are the same.
        assert same == [0.0] * 3
        assert 0 < rounded < 1e-3


def test_what_cannot_be_synchronized_is_refused_in_one_line(pool):
    for said in pool("openmpi", 2).call(refuse).values:
        module, ranks, algorithm, dtype, integer, twice, sparse, drawn = said
        assert module == "expected a model in DistributedDataParallel, found Sequential"
        assert "process group has 1 ranks, and the session 2" in ranks
        assert algorithm.startswith("central leaves out the buffers of 1 of 2 ranks")
        assert dtype == "wire_dtype: expected a torch type, found 'bfloat16'"
        assert "int32" in integer
        assert twice.startswith("the model takes no communication hook: ")
        assert sparse.startswith("parameter 0.weight: expected dense gradients, found an embeddi")
        # All messages would have the same lengths, and sums would be wrong in silence.
        assert drawn.startswith("the schedule of drawn must be the same on all ranks, but it d")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_alone_has_its_own_gradients_rounded_or_not(dtype):
    communicator, third = Crew([0]).communicators[0], torch.full((3,), 1 / 3)
    how = Synchronization("auto", wire_dtype=dtype, overlap=True)
    hook = ScheduleHook(how, communicator, on_gpu=False)
    found = hook.synchronize(None, SimpleNamespace(buffer=third.clone)).wait()
    assert torch.equal(found, third.to(dtype).float())


def test_a_transport_that_is_not_possible_is_refused_before_the_first_step():
    communicator = Crew([0, 0]).communicators[0]
    with pytest.raises(ConfigurationError, match="works on CPU memory, but the tensor is on a GPU"):
        ScheduleHook(Synchronization("ring", "mpi"), communicator, on_gpu=True)


@pytest.mark.parametrize(
    ("nodes", "options", "made"),
    [([0, 1], {}, {MPI}), ([0, 0], {}, set()), ([0, 0], {"transport": "mpi"}, {MPI})],
)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "GPU without NCCL"])
def test_what_carries_gradients_is_made_before_the_first_step(nodes, options, made, on_gpu):
    communicator = Crew(nodes, has_nccl=False).communicators[0]
    hook = ScheduleHook(Synchronization("ring", **options), communicator, on_gpu=on_gpu)
    assert set(communicator.planner._messengers) == made
    # A GPU's bucket stays where it is: its copy lies in shared memory.
    assert hook._shares == (not on_gpu and not options)


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0]])
def test_a_table_for_some_sizes_leaves_the_others_to_the_rule(nodes):
    """Buckets that it has no range for go as they would without it, and none makes a messenger."""
    table = {("all-reduce", "float32", "cpu"): (Range(0, 4096, "ring", MPI),)}
    communicator = Crew(nodes).communicators[0]
    planner = communicator.planner
    communicator.layout = planner.layout = replace(planner.layout, tuning=Tuning("", table))
    hook = ScheduleHook(Synchronization("auto"), communicator, on_gpu=False)
    assert set(planner._messengers) == {MPI}
    assert hook._shares == (communicator.node_memory is not None)


BUCKET = 4000
"""Bytes."""


@pytest.mark.parametrize(
    ("rooms", "refused", "expected"),
    [
        ([7 * BUCKET] * 3, None, [True] * 3),
        # Twice what each rank needs, but not what all of them need.
        ([6 * BUCKET] * 3, None, [False] * 3),
        ([7 * BUCKET, 6 * BUCKET, 7 * BUCKET], None, [True, False, True]),
        # Somebody else was quicker: torch gives rank 1 no memory.
        ([7 * BUCKET] * 3, 1, [True, False, True]),
    ],
)
def test_a_rank_shares_a_bucket_if_there_is_room_for_all(rooms, refused, expected, monkeypatch):
    """For a second bucket nothing is free any more."""
    ranks = len(rooms)
    here = threading.local()
    share = torch.Tensor.share_memory_

    def find_usage(path: str) -> SimpleNamespace:
        # Each bucket is tried once.
        return SimpleNamespace(free=next(here.rooms))

    def share_or_refuse(tensor: torch.Tensor) -> torch.Tensor:
        if here.rank == refused:
            raise RuntimeError("unable to allocate shared memory(shm)")
        return share(tensor)

    def part(rank: int, communicator: Communicator) -> list[bool]:
        here.rank, here.rooms = rank, iter([rooms[rank], 0])
        hook = ScheduleHook(Synchronization("auto"), communicator, on_gpu=False)
        found = []
        for number in range(2):
            bucket = torch.full((BUCKET // 4,), float(rank + number))
            for _ in range(3):
                hook._share(bucket)
            hook._average(bucket, hook._request)
            assert torch.equal(bucket, torch.full_like(bucket, (ranks - 1) / 2 + number))
            found.append(communicator.shared_memory.find(bucket.data_ptr(), BUCKET) is not None)
        return found

    monkeypatch.setattr("mpiddp.sync.ddp_hook.shutil.disk_usage", find_usage)
    monkeypatch.setattr(torch.Tensor, "share_memory_", share_or_refuse)
    assert Crew([0] * ranks).run(part) == [[shares, False] for shares in expected]
