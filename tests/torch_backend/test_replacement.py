"""--collectives mpiddp, the backend's name, and what a rank knows without the others."""

import contextlib
import importlib.util
import json
import textwrap
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed

import launchers
import mpiddp.torch_backend
from mpiddp import torch_internals
from mpiddp.collectives import TORCH
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.torch_backend import members, own_calls, replace_gloo
from mpiddp.torch_backend.call_queue import CallQueue
from mpiddp.torch_backend.gloo_calls import GlooCalls
from mpiddp.torch_backend.group import BACKEND_BASE, CpuBackend, Group
from mpiddp.torch_backend.members import Place
from mpiddp.torch_backend.tensors import find_reduction
from mpiddp.torch_internals import find_backend_config

SCRIPT = """
    import json
    import mpiddp
    import torch
    from datetime import timedelta
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mean = torch.full((3,), float(rank))
    distributed.all_reduce(mean, op=distributed.ReduceOp.AVG)
    part, source = torch.zeros(2), torch.arange(2.0 * size) + rank
    distributed.reduce_scatter(part, list(source.chunk(size)))
    odd = distributed.new_group([1])
    if rank == 1:
        distributed.all_reduce(torch.ones(1), group=odd)
    distributed.monitored_barrier(timeout=timedelta(seconds=60))
    names = [None] * size
    distributed.all_gather_object(names, type(distributed.group.WORLD).__module__)
    gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    distributed.gather(torch.ones(1), gathered)
    described = mpiddp.describe_collectives(distributed.group.WORLD)
    if rank == 0:
        found = [described["transports"][0], described["gloo"], distributed.get_backend()]
        print(json.dumps([mean.tolist(), part.tolist(), names, *found]))
    distributed.destroy_process_group()
"""


def run_front(*words):
    command, path = ["-m", "mpiddp", "-n", "2", "--quiet"], {"PYTHONPATH": str(launchers.ROOT)}
    return launchers.run_python(*command, *words, env=path, timeout=150).expect(0)


@pytest.mark.mpi
def test_an_unchanged_script_has_mpiddps_collectives(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = run_front("--collectives", "mpiddp", str(script))
    mean, part, names, transport, gloo, backend = json.loads(done.stdout)
    assert (mean, part) == ([0.5] * 3, [1.0, 3.0])
    assert names == ["mpiddp.torch_backend.group"] * 2
    assert (transport, gloo, backend) == ("shared-memory", ["gather"], "gloo")


def test_gloo_alone_is_replaced_and_comes_back(monkeypatch, capsys):
    config, beside = find_backend_config(), "gloo" if BACKEND_BASE is None else "mpiddp"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    restore = replace_gloo()
    try:
        assert config("gloo").device_backend_map["cpu"] == "mpiddp"
        assert set(config("nccl").device_backend_map.values()) == {"nccl"}
        found = config("cpu:gloo,cuda:nccl").device_backend_map
    finally:
        restore()
    assert config("gloo").device_backend_map["cpu"] == "gloo"
    assert found == {"cpu": beside, "cuda": "nccl"}
    assert ("keeps Gloo" in capsys.readouterr().err) == (beside == "gloo")


def test_a_group_with_another_backend_has_ours_as_a_part_of_it(monkeypatch):
    config, backend = find_backend_config(), mpiddp.torch_backend
    if BACKEND_BASE is None:
        found = config("cpu:mpiddp,cuda:gloo").get_device_backend_map()
        assert found == {"cpu": "mpiddp", "cuda": "gloo"}
        # As torch from 2.14 on.
        monkeypatch.setattr(config, "get_device_backend_map", config.get_device_backend_map)
        monkeypatch.setattr(distributed.Backend, "register_backend", mock.Mock())
        monkeypatch.setattr(backend, "BACKEND_BASE", object)
        monkeypatch.setattr(backend, "find_plugin", lambda name: None)
        backend.register()
    found = config("cpu:mpiddp,cuda:gloo").get_device_backend_map()
    assert found == {"cpu": "mpiddp_part", "cuda": "gloo"}
    assert config("mpiddp").get_device_backend_map() == {"cpu": "mpiddp"}
    # torch then asks the part for nothing that it has not got.
    assert not any(has for name, has in vars(CpuBackend).items() if "supports_" in name)


def test_gloo_uses_the_interfaces_that_the_environment_names(monkeypatch, tmp_path):
    store, seconds = distributed.FileStore(str(tmp_path / "store"), 1), timedelta(seconds=60)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch_internals.make_gloo(store, 0, 1, seconds).shutdown()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere")
    with pytest.raises(RuntimeError, match="nowhere"):
        torch_internals.make_gloo(store, 0, 1, seconds)


def test_gloo_begins_no_call_before_those_that_were_begun_earlier():
    calls, done = CallQueue("group", lambda: 3600.0), []

    def start():
        done.append("by Gloo")
        return distributed.Work()

    work = calls.make("first", partial(done.append, "first"), [], waits=False)
    calls.make("second", partial(done.append, "second"), [], waits=True, start=start)
    assert work.is_completed()
    left = calls.make("third", partial(done.append, "third"), [], waits=True, start=start)
    assert [each["number"] * each["is_complete"] for each in calls.list_calls()] == [1, 2, 0]
    del left
    assert calls.list_calls()[-1]["is_complete"]
    calls.make("fourth", partial(done.append, "fourth"), [], waits=False, start=start)
    calls.close()
    assert done == ["first", "second", "by Gloo", "fourth"]


def test_a_taken_name_is_refused(monkeypatch):
    backend = distributed.Backend
    taken = {**backend._plugins, "MPIDDP": backend._BackendPlugin(print, False)}
    monkeypatch.setattr(backend, "_plugins", taken)
    with pytest.raises(ConfigurationError, match="has another backend called 'mpiddp'"):
        mpiddp.torch_backend.register()


def test_ranks_on_the_nodes_of_a_cluster_send_over_mpi(slurm_cluster, tmp_path):
    script = Path(__file__).with_name("comparison.py")
    launcher = slurm_cluster.srun("--nodelist=node[1-2]", "--nodes=2", "--distribution=plane=2")
    result = launchers.run(launcher, 3, ["-m", "mpiddp", script], timeout=160, cwd=tmp_path)
    lines = [line for line in result.expect(0).stdout.splitlines() if line.startswith("[")]
    assert lines == ['["shared-memory+mpi"]'] * 3


SUM = find_reduction(distributed.ReduceOp.SUM)


def find_place(size, name="test"):
    """Of rank 0, whose peers never come."""
    return Place(distributed.HashStore(), 0, tuple(range(size)), timedelta(0), name)


@pytest.mark.parametrize(("cores", "delay"), [(1, own_calls.LATER), (2, own_calls.SOON)])
def test_a_call_is_begun_soon_if_each_rank_has_a_core_to_spare(monkeypatch, cores, delay):
    monkeypatch.setattr(own_calls, "count_cores", lambda: cores)
    own, tensor = own_calls.OwnCalls(find_place(1)), torch.ones(3)
    own.all_reduce([tensor], SUM)
    # A call like it is known then.
    known = [own.find_shortcut(each, SUM) for each in ([tensor], [tensor[1:]], tensor)]
    own.close()
    assert own.delay == delay and [*map(bool, known)] == [True, False, False]


def test_where_each_message_goes_through_gloo_it_makes_whole_calls(monkeypatch):
    own, tensor, gloo = own_calls.OwnCalls(find_place(2)), torch.ones(2, 3), mock.MagicMock()
    schedules = mock.MagicMock(is_checked=False, **{"layout.transports": [TORCH]})
    monkeypatch.setattr(own_calls, "make_group_communicator", lambda *_: schedules)
    monkeypatch.setattr(members, "make_gloo", lambda *_: gloo)
    # Known after the first call, in which the ranks meet.
    assert own.find_direct([tensor], SUM) is None
    own.all_reduce([tensor], SUM)
    assert gloo.allreduce.called and not schedules.run.called
    assert own.find_direct([tensor], SUM) is gloo
    scaled = find_reduction(distributed._make_nccl_premul_sum(2.0))
    assert own.find_direct([tensor], scaled) is own.find_direct([tensor.t()], SUM) is None
    # Who begins a call need not wait for it.
    calls = CallQueue("group", lambda: 3600.0)
    with contextlib.closing(calls):
        work = GlooCalls(find_place(2), calls, print).reduce_scatter([tensor], [[tensor] * 2], SUM)
        assert not work.is_completed()


def test_a_group_whose_first_call_failed_is_broken():
    own = own_calls.OwnCalls(find_place(2))
    assert not own.has_failed
    with pytest.raises(PeerLostError, match="waited for rank 1"):
        own.barrier()
    assert own.has_failed


@pytest.mark.parametrize(("all_ranks", "named"), [((), "Rank 1"), ((True,), "Ranks 1, 2")])
def test_a_monitored_barrier_names_the_first_missing_rank_or_all(all_ranks, named):
    with pytest.raises(RuntimeError, match=rf"{named} failed to pass"):
        Group(find_place(3)).monitored_barrier(0.001, *all_ranks)


def test_a_split_without_this_rank_is_refused():
    part = SimpleNamespace(_place=find_place(3))
    with pytest.raises(distributed.DistBackendError, match="without rank 0: split_group must"):
        CpuBackend.split(part, None, [1, 2], SimpleNamespace(group_name="half"))


def test_groups_that_are_made_at_the_same_time_have_tags_that_every_mpi_has():
    comm = mock.MagicMock()
    comm.Create_group().Get_attr.return_value = 32767
    for name in map(str, range(40)):
        members._list_messengers(find_place(2, name), comm, print, None, 1)["mpi"]()
    tags = {call.args[1] for call in comm.Create_group.call_args_list[1:]}
    whole = comm.Get_group()
    assert len(tags) == whole.Free.call_count == whole.Incl().Free.call_count == 40
    assert max(tags) <= 32767


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_other_libraries_train_alike(tmp_path, name):
    if importlib.util.find_spec({"lightning": "pytorch_lightning"}.get(name, name)) is None:
        pytest.skip(f"{name} is not installed")
    found = {}
    for collectives in ("framework", "mpiddp"):
        words = [launchers.PROGRAMS / "frameworks.py", name, tmp_path]
        done = run_front("--collectives", collectives, *map(str, words))
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("trained ")]
        _, kind, found[collectives] = line.split()
        assert ("mpiddp" in kind) == (collectives == "mpiddp")
    assert found["framework"] == found["mpiddp"]
