"""``init_process_group()`` of a script, wherever it lets its ranks meet."""

import contextlib
import multiprocessing
import os
import secrets
import socket
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import launchers
from facts import messages
from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.mpi.world import World
from mpiddp.launch.rendezvous.init_methods import ScriptGroups
from mpiddp.launch.rendezvous.store import Meeting, make_store
from mpiddp.process.sockets import ports
from mpiddp.torch_internals import wrap_rendezvous

HERE = "127.0.0.1"
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
SECONDS = timedelta(seconds=60)


@contextlib.contextmanager
def answered(session: Any) -> Iterator[None]:
    """torch asks a new ScriptGroups meanwhile, as it does once a rank has been started."""
    world, meeting = session.world, session.meeting
    place = {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port), AGENT: "True"}
    os.environ.update(place, RANK=str(world.rank), WORLD_SIZE=str(world.size))
    secret = session.broadcast(secrets.token_hex())
    groups = ScriptGroups(
        world, meeting, lambda: make_store(meeting, world, None, 60, secret), SECONDS.seconds
    )
    undo = wrap_rendezvous(groups.wrap)
    try:
        yield
    finally:
        undo()
        session.any(False)


def meet(url: str, rank: int = -1, size: int = -1) -> list[str]:
    """What the ranks of a group tell each other in its store: their process ids, by rank."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous(url, rank, size, timeout=SECONDS))
    store.set(f"process/{rank}", str(os.getpid()))
    found = [store.get(f"process/{each}").decode() for each in range(size)]
    # The server, which may be rank 0's, goes with the store.
    if store.add("ended", 1) == size:
        store.set("all ended", "")
    if rank == 0:
        store.wait(["all ended"], SECONDS)
    return found


def meet_wherever(session: Any) -> list[list[str]]:
    rank, size = session.world.rank, session.world.size
    with answered(session):
        found = [meet("env://"), meet("env://", rank, size)]
        os.environ.update(MASTER_ADDR="192.0.2.1", MASTER_PORT="12355")
        found.append(meet("env://"))
        # Nobody is there, and no such directory; numbers that are not given are MPI's.
        for url in ("tcp://192.0.2.1:29500", "file:///nonexistent/shared"):
            found += [meet(url, rank, size), meet(url)]
        return found


def test_all_ranks_meet_wherever_they_are_sent(pool):
    result = pool("openmpi", 3).call(meet_wherever)
    processes = result.values[0][0]
    assert len(set(processes)) == 3 and result.values == [[processes] * 7] * 3
    (line,) = result.stderr[0].splitlines()
    assert line.startswith("mpiddp: init_process_group() names 192.0.2.1:12355; the ranks meet at ")
    assert result.stderr[1:] == ["", ""]


def meet_backwards(session: Any) -> tuple[list[str], int]:
    with answered(session):
        return meet("tcp://192.0.2.1:1", 2 - session.world.rank, 3), os.getpid()


def test_numbers_that_contradict_mpi_are_said_once(pool):
    result = pool("openmpi", 3).call(meet_backwards)
    processes = [str(process) for _, process in result.values]
    assert [found for found, _ in result.values] == [processes[::-1]] * 3
    lines = [line for line in result.output.splitlines() if "other numbers than MPI's" in line]
    assert len(lines) == 1 and " in init_process_group()" in lines[0]


def meet_alike(session: Any) -> str:
    from torch.distributed.rendezvous import rendezvous

    with answered(session):
        try:
            next(rendezvous("env://", 0, session.world.size, timeout=SECONDS))
        except ConfigurationError as error:
            return str(error)
        return ""


def test_ranks_that_take_one_number_are_refused(pool):
    result = pool("openmpi", 3).call(meet_alike)
    refused = {rank: text for rank, text in enumerate(result.values) if text}
    assert len(refused) == 2
    (holder,) = {0, 1, 2} - refused.keys()
    for rank, text in refused.items():
        assert text.startswith(f"init_process_group() gets rank 0 here and on rank {holder} on ")
        assert text.endswith(f"RANK has it, {rank} here")


def meet_apart(session: Any, port: int) -> list[list[str]]:
    """Two of three ranks at an address of theirs, which rank 0 opens, and at the job's."""
    with answered(session):
        rank = session.world.rank
        urls = (f"tcp://{HERE}:{port}", "env://")
        return [meet(url, rank, 2) for url in urls] if rank < 2 else []


def test_a_part_of_the_ranks_meets_where_it_says(pool):
    with ports.reserve(HERE) as holder:
        result = pool("openmpi", 3).call(meet_apart, holder.getsockname()[1])
    processes = result.values[0][0]
    assert len(set(processes)) == 2 and result.values == [[processes] * 2] * 2 + [[]]
    assert result.output.count("init_process_group() is for 2 ranks in rank ") == 1


def open_own(session: Any, port: int) -> str:
    from torch.distributed import TCPStore

    world = session.world
    with answered(session):
        store = TCPStore(HERE, port, world.size, world.rank == 0, SECONDS)
        store.add("came", 1)
        session.any(False)
        return str(store.add("came", 0))


def test_a_store_of_the_scripts_own(pool):
    with ports.reserve(HERE) as holder:
        assert pool("openmpi", 3).call(open_own, holder.getsockname()[1]).values == ["3"] * 3


# In one process

ALONE = World(0, 2, 0, 2, 0, 1, "node1", "node1")


def make_groups(seconds: float = 60) -> ScriptGroups:
    from torch.distributed import HashStore

    store = HashStore()
    return ScriptGroups(ALONE, Meeting(HERE, 4, "lo", ""), lambda: store, seconds)


def test_who_waits_for_others_than_the_ranks_waits_for_the_timeout(monkeypatch, capfd):
    """As a server whose clients do not come."""
    from torch.distributed import DistNetworkError
    from torch.distributed.rendezvous import rendezvous

    monkeypatch.setenv(AGENT, "True")
    undo = wrap_rendezvous(make_groups(2).wrap)
    try:
        with ports.reserve(HERE) as holder:
            place = f"{HERE}:{holder.getsockname()[1]}"
            asked = rendezvous(f"tcp://{place}", 0, 3, timeout=timedelta(seconds=900))
            with pytest.raises(UnreachableError) as caught:
                next(asked)
        # What fails at once is torch's own.
        with socket.create_server((HERE, 0)) as server:
            place_in_use = f"tcp://{HERE}:{server.getsockname()[1]}"
            with pytest.raises(DistNetworkError, match="EADDRINUSE"):
                next(rendezvous(place_in_use, 0, 3, timeout=SECONDS))
    finally:
        undo()
    text = f"init_process_group() with rank 0 of 3 did not meet the others at {place}: "
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith(" (MPI has started 2 ranks)")
    assert (
        "is for 3 ranks in rank 0, and MPI has started 2: they meet at " in capfd.readouterr().err
    )
    assert os.environ[AGENT] == "True"


def show(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """A handler that yields what torch's would see."""
    yield (url, os.environ.get(AGENT), options.get("timeout")), 0, 0


URL = "tcp://elsewhere:1?rank=0&world_size=2"


def test_a_script_that_opens_the_server_itself_is_left_alone(monkeypatch):
    monkeypatch.setenv(AGENT, "False")
    answer = make_groups().wrap(show)
    hour = timedelta(hours=1)
    assert next(answer(URL, timeout=hour)) == ((URL, "False", hour), 0, 0)


def test_a_forked_child_is_no_rank(monkeypatch):
    """Though its group has as many processes as there are ranks."""
    monkeypatch.setenv(AGENT, "True")
    answer = make_groups().wrap(show)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    soon = timedelta(seconds=5)
    asked: list[Any] = [{}, {"timeout": soon}]
    child = context.Process(
        target=lambda: sender.send([next(answer(URL, **each))[0] for each in asked])
    )
    child.start()
    try:
        assert receiver.poll(60)
        assert receiver.recv() == [(URL, "False", SECONDS), (URL, "False", soon)]
    finally:
        child.join(60)


# As jobs

DOCUMENT = """
    import os, torch, torch.distributed as dist

    def setup(rank, world_size, master_addr, master_port):
        os.environ["MASTER_ADDR"] = master_addr
        os.environ["MASTER_PORT"] = master_port
        dist.init_process_group("gloo", rank=rank, world_size=world_size)

    def main():
        rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        setup(rank, world_size, "192.168.20.15", "29500")
        total = torch.tensor([float(os.environ["SLURM_LOCALID"])])
        dist.all_reduce(total)
        print(f"rank {rank} of {world_size}: {total.item()}")
        dist.destroy_process_group()

    main()
"""


@pytest.mark.by_default("openmpi")
def test_a_program_that_names_its_master_runs_as_it_stands(either_launcher, tmp_path):
    (tmp_path / "py_exe.py").write_text(textwrap.dedent(DOCUMENT))
    words = ["-m", "mpiddp", "--timeout", "60", "py_exe.py"]
    result = launchers.run(either_launcher, 2, words, cwd=tmp_path).expect(0)
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2: 1.0", "rank 1 of 2: 1.0"]
    started, line = messages(result)
    assert started == "mpiddp: started" and " names 192.168.20.15:29500; the ranks " in line


SPAWNS = """
    import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

    def work(index, first, size, port):
        if port:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
        dist.init_process_group("gloo", rank=first + index, world_size=size)
        total = torch.tensor([2.0 ** (first + index)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        # One write: several processes have this standard output.
        sys.stdout.write(f"{first + index} of {size} at {port}: {total.item()}\\n")

    if __name__ == "__main__":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        mp.spawn(work, (rank, size, ""), nprocs=1)
        if rank == 0:
            mp.spawn(work, (0, 2, sys.argv[1]), nprocs=2)
"""


@pytest.mark.mpi
def test_processes_that_ranks_spawn_make_groups_of_their_own(tmp_path):
    """Across the ranks, at the address that they inherit, and in one rank at another."""
    (tmp_path / "spawns.py").write_text(textwrap.dedent(SPAWNS))
    with ports.reserve(HERE) as holder:
        port = holder.getsockname()[1]
        words = ["-m", "mpiddp", "spawns.py", str(port)]
        result = launchers.run("openmpi", 2, words, cwd=tmp_path, timeout=180)
    expected = {f"{rank} of 2 at {place}: 3.0" for rank in (0, 1) for place in ("", port)}
    assert set(result.expect(0).stdout.splitlines()) == expected
