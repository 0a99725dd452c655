"""The ranks that MPI starts: mpiddp's synchronisations, made as its trainer makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch

import mpiddp
from benchmarks.measure.launching.worker_loop import SessionMember
from benchmarks.measure.training_step.loops import StepLoop, draw, make_slowdown
from benchmarks.measure.training_step.synchronisations import OWN_BASE, LoopSpec
from benchmarks.measure.training_step.traffic import add_up, list_pushes, list_transfers
from benchmarks.records.workloads import build
from mpiddp.collectives.bootstrap import ensure_communicator
from mpiddp.collectives.planner import CallRequest, select
from mpiddp.schedules.schedule import Collective
from mpiddp.sync.parameter_server.server import UpdateRule
from mpiddp.training.options.config import Configuration
from mpiddp.training.step.malloc import keep_freed_memory
from mpiddp.training.step.optimizer_step import LocalUpdate, make_optimizer
from mpiddp.training.wrapping import overlap
from mpiddp.training.wrapping.shared_model import (
    choose_synchronization,
    find_bound,
    find_roles,
    replicate,
    serve,
)


class MpiJob(SessionMember):
    def __init__(self, session: mpiddp.Session, fail: Callable[[BaseException], object]) -> None:
        """``fail`` is called with the error that ends a parameter server."""
        super().__init__(session)
        # Ranks that would share a GPU compute on the CPU, as the framework's do.
        self.device = session.device if session.backend == "nccl" else torch.device("cpu")
        if self.device.type == "cpu":
            keep_freed_memory()
        self.counts = session.world.local_rank == 0
        self._fail, self._nodes = fail, session.gather(session.world.node_rank)

    def greet(self) -> dict[str, Any]:
        return {"device": self.device.type, "nodes": self._nodes, **super().greet()}

    def prepare(self, spec: LoopSpec) -> StepLoop | None:
        contender, seed = spec.contender, spec.seed
        if contender == OWN_BASE:
            return self._work_alone(spec) if self.rank == 0 else None
        configuration = contender.configure(self.size, spec.batch_size, seed)
        roles = find_roles(configuration, self.size)
        workers = roles.workers if roles is not None else tuple(range(self.size))
        place = workers.index(self.rank) if self.rank in workers else None
        batch = draw(spec, self.device, place or 0)
        module = build(spec.workload, seed).to(self.device)
        slowdown = make_slowdown(spec, module, batch, place or 0, workers)
        if roles is not None:
            make = partial(make_optimizer, configuration)
            rule = UpdateRule(make, make_rate(configuration), find_bound(configuration))
            serving = serve(self._session, roles, module, rule, self._fail)
            return StepLoop(
                module, module, serving, workers, place, batch,
                updates_here=False, slowdown=slowdown, notes={"servers": roles.servers},
            )  # fmt: skip
        replica = replicate(module, self.device, configuration)
        configuration, pace = overlap.settle(configuration, replica, batch)
        update = make_local_update(configuration, module)
        notes = {"overlap": configuration.overlap, "pace": pace and vars(pace)}
        return StepLoop(
            replica.model, module, update, workers, place, batch,
            quiet=replica.model.no_sync, slowdown=slowdown, notes=notes,
        )  # fmt: skip

    def _work_alone(self, spec: LoopSpec) -> StepLoop:
        """One rank, without the others."""
        configuration = spec.contender.configure(1, spec.batch_size, spec.seed)
        module = build(spec.workload, spec.seed).to(self.device)
        update = make_local_update(configuration, module)
        return StepLoop(module, module, update, (0,), 0, draw(spec, self.device, 0))

    def describe(self, spec: LoopSpec, loop: StepLoop) -> dict[str, Any]:
        parameters = [each for each in loop.module.parameters() if each.requires_grad]
        count, item = sum(each.numel() for each in parameters), parameters[0].element_size()
        if spec.contender == OWN_BASE:
            return {"elements": count}
        if spec.contender.serves:
            messages = list_pushes(count, item, loop.notes["servers"], loop.workers)
            traffic = add_up(messages, self._nodes)
            return {**loop.notes, "elements": count, "traffic": traffic}
        configuration = spec.contender.configure(self.size, spec.batch_size, spec.seed)
        buckets, traffic = self._describe_buckets(configuration, parameters)
        return {**loop.notes, "elements": count, "buckets": buckets, "traffic": traffic}

    def _describe_buckets(
        self, configuration: Configuration, parameters: list[torch.nn.Parameter]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What is done with each of DDP's buckets, whose memory the gradients are views of."""
        storages = {
            each.grad.untyped_storage().data_ptr(): each.grad.untyped_storage().nbytes()
            for each in parameters
            if each.grad is not None
        }
        way = choose_synchronization(configuration)
        dtype = parameters[0].dtype
        sent = way.wire_dtype or dtype
        item = sent.itemsize
        request = CallRequest(Collective.ALL_REDUCE, way.algorithm, way.transport)
        layout, on_gpu = ensure_communicator().layout, parameters[0].is_cuda
        counts = [size // dtype.itemsize for size in storages.values()]
        found = [select(request, count * item, layout, sent, on_gpu=on_gpu) for count in counts]
        messages = chain.from_iterable(
            list_transfers(each.schedule, count, item)
            for each, count in zip(found, counts, strict=True)
        )
        buckets = [
            {"elements": n, "item": item, "algorithm": each.name, "transport": each.transport}
            for n, each in zip(counts, found, strict=True)
        ]
        return buckets, add_up(messages, layout.nodes)

    def probe(self, size: int, iterations: int) -> list[float]:
        from benchmarks.measure.collectives.ranks import probes, worker
        from benchmarks.measure.collectives.ranks.calls import CallSpec
        from benchmarks.records.contenders import LINK

        spec = CallSpec(LINK, bytes=size, type="uint8", iterations=iterations)
        prepared = probes.prepare_link(self._comm, self._session.world, spec)
        return [time * 1e-9 for time in worker.time_iterations(prepared, iterations)[1]]


def make_local_update(configuration: Configuration, module: torch.nn.Module) -> LocalUpdate:
    """As the trainer makes one on each rank."""
    optimizer = make_optimizer(configuration, list(module.parameters()))
    return LocalUpdate(module, optimizer, make_rate(configuration))


def make_rate(configuration: Configuration) -> Callable[[int], float]:
    """The same learning rate in every step."""
    peak = configuration.learning_rate
    assert peak is not None
    return lambda step: peak
