"""Memory that other processes can map: found by address, gone with its tensor, within limits."""

import builtins
import contextlib
import gc
import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import launchers
import mpiddp
from mpiddp.collectives.transport import shared_memory as module
from mpiddp.collectives.transport.shared_memory import MOST_FOREIGN, SegmentAddress, SharedMemory
from mpiddp.errors import ConfigurationError
from mpiddp.process import memory_limits
from mpiddp.process.memory_limits import ControlGroup, find_groups, find_shortage
from pool import Pool

MEGABYTE = 1 << 20
PLENTY = 1 << 45
UNLIMITED = "9223372036854771712"
RANKS = 2
LIMIT = 1200 * MEGABYTE
"""Of the group; ranks have some 250 MB each before they ask for anything."""
SHARE = LIMIT // RANKS
"""Bytes for which there is room once or twice: something is in use before."""
SHARED_MEMORY = 16 * MEGABYTE
"""Of the small node."""


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """What was made before these tests is not looked at by each of their many collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def count_descriptors() -> int:
    gc.collect()  # What earlier tests have left to the collector.
    return len(os.listdir("/proc/self/fd"))


def find(shared_memory: SharedMemory, tensor: torch.Tensor) -> SegmentAddress | None:
    return shared_memory.find(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def make_segment(shared_memory: SharedMemory, size: int) -> torch.Tensor:
    """Bytes in a segment of their own."""
    return torch.frombuffer(shared_memory.allocate(size), dtype=torch.uint8)


FULL = "cannot be had: Cannot allocate memory"
SHORT = "are more than is free: the machine has 1 B left"


@pytest.mark.parametrize(
    ("place", "name", "said"),
    [(os, "memfd_create", FULL), (os, "posix_fallocate", FULL), (module, "find_shortage", SHORT)],
)
def test_where_there_is_no_memory_nothing_is_left_behind(place, name, said, monkeypatch):
    effect = OSError(12, "Cannot allocate memory") if place is os else None
    fail = mock.Mock(side_effect=effect, return_value="the machine has 1 B left")
    monkeypatch.setattr(place, name, fail)
    before = count_descriptors()
    with pytest.raises(ConfigurationError) as found:
        SharedMemory().empty((25,), torch.float64)
    assert str(found.value) == f"200 bytes of shared memory {said}"
    assert count_descriptors() == before


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.booleans()), min_size=1, max_size=60))
def test_tensors_that_share_a_segment_do_not_overlap(rows):
    shared_memory = SharedMemory()
    kept: dict[int, torch.Tensor] = {}
    for number, (size, is_kept) in enumerate(rows, start=1):
        tensor = shared_memory.empty((size,), torch.uint8)
        assert not tensor.any() and tensor.data_ptr() % 64 == 0
        assert find(shared_memory, tensor) is not None
        tensor.fill_(number)
        if is_kept:
            kept[number] = tensor
        del tensor
    while kept:
        number, tensor = kept.popitem()
        assert (tensor == number).all()
        del tensor
    assert shared_memory.own == ()


def test_many_tensors_take_few_descriptors():
    shared_memory = SharedMemory()
    before = count_descriptors()
    sizes = [4, 1 << 10, 100_000, 1 << 20]
    tensors = [shared_memory.empty((size,), torch.uint8) for _ in range(100) for size in sizes]
    assert len({tensor.data_ptr() for tensor in tensors}) == 400
    # Two for each segment; eight ranks would have seven more for each.
    assert count_descriptors() - before <= 2 * 50
    del tensors
    assert count_descriptors() == before


@settings(max_examples=20)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=8), st.data())
def test_each_of_many_segments_is_found_from_its_first_byte_to_its_last(sizes, data):
    shared_memory = SharedMemory()
    tensors = [make_segment(shared_memory, size) for size in sizes]
    dropped = data.draw(st.sets(st.integers(0, len(sizes) - 1)), "dropped")
    for index in dropped:
        tensors[index] = None
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            start, size = tensor.data_ptr(), sizes[index]
            begin = data.draw(st.integers(0, size - 1), "begin")
            place = find(shared_memory, tensor[begin:])
            assert (place.number, place.offset) == (index + 1, begin)
            # From the first byte to the last.
            for outside in ((start, size + 1), (start - 1, 2), (start + size, 1)):
                found = shared_memory.find(*outside)
                assert found is None or found.number != index + 1
    assert find(shared_memory, torch.zeros(100)) is None
    starts = sorted(each.data_ptr() for each in tensors if each is not None)
    for left, right in itertools.pairwise(starts):
        # What begins in one and ends in another is in none.
        assert shared_memory.find(left, right - left + 1) is None


def test_a_segment_goes_with_the_last_tensor_that_uses_it(monkeypatch):
    shared_memory, truncate, seen = SharedMemory(), os.ftruncate, []

    def look_and_truncate(*arguments: int) -> None:
        # It is forgotten while nobody else can have its addresses.
        is_mapped = f"\n{address:x}-" in Path("/proc/self/maps").read_text()
        seen.append((shared_memory.find(address, 4), is_mapped))
        truncate(*arguments)

    monkeypatch.setattr(os, "ftruncate", look_and_truncate)
    before = count_descriptors()
    tensor = shared_memory.empty((1 << 16,), torch.float32)
    part = tensor.view(256, 256)[3]
    place = find(shared_memory, tensor)
    again = os.open(f"/proc/self/fd/{place.descriptor}", os.O_RDWR)
    try:
        assert os.fstat(again).st_blocks > 0
        address = tensor.data_ptr()
        del tensor
        assert find(shared_memory, part).number == 1 and seen == []
        del part
        assert seen == [(None, True)]
        # Others may have it mapped still, but its pages are gone.
        assert os.fstat(again).st_size == 0 and os.fstat(again).st_blocks == 0
    finally:
        os.close(again)
    assert count_descriptors() == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_with_what_it_has_inherited(monkeypatch):
    shared_memory, reserve = SharedMemory(), module._reserve
    is_reserving, is_forked = threading.Event(), threading.Event()

    def reserve_slowly(*arguments: int) -> None:
        if threading.current_thread() is thread:
            is_reserving.set()
            is_forked.wait(0.5)
        reserve(*arguments)

    monkeypatch.setattr(module, "_reserve", reserve_slowly)
    kept = []
    thread = threading.Thread(target=lambda: kept.append(shared_memory.empty((8,), torch.float32)))
    tensor = shared_memory.empty((1 << 16,), torch.float32)
    before = count_descriptors()
    array = tensor.fill_(3).numpy()
    inherited = find(shared_memory, tensor).number + 1
    read, write = os.pipe()
    # While a segment is made in another thread, the fork waits: the child has no such thread.
    thread.start()
    assert is_reserving.wait(60)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os.read(read, 1)
        # Neither takes what the other may have taken meanwhile.
        is_new = find(shared_memory, shared_memory.empty((8,), torch.float32)).number > inherited
        os._exit(0 if (array == 3).all() and is_new else 1)
    is_forked.set()
    thread.join()
    later = shared_memory.empty((8,), torch.float32)
    assert find(shared_memory, later).number > inherited
    del tensor, array, later, kept[:]
    os.write(write, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(read)
    os.close(write)
    assert count_descriptors() < before


@pytest.mark.parametrize("name", ["sorted", "address_of"])
def test_the_collector_may_come_while_a_segment_is_made_or_freed(name, monkeypatch):
    # It may run whenever an object is made, and free segments that hang in cycles.
    original = getattr(builtins, name, None) or getattr(module, name)

    def collect_first(*arguments):
        # Consumed before, as by whoever iterates while the collector comes.
        arguments = [list(each) if isinstance(each, Iterator) else each for each in arguments]
        gc.collect()
        return original(*arguments)

    shared_memory, addresses = SharedMemory(), set()
    monkeypatch.setattr(module, name, collect_first, raising=False)
    for _ in range(5):
        tensor = shared_memory.empty((10,), torch.float32)
        addresses.add(tensor.data_ptr())
        cycle = [tensor]
        cycle.append(cycle)
        del tensor, cycle
        shared_memory.empty((10,), torch.float32)
    gc.collect()
    assert not any(shared_memory.find(address, 40) for address in addresses)


def test_mappings_that_are_no_more_used_are_let_go():
    owner, peer = SharedMemory(), SharedMemory()
    tensors = [make_segment(owner, 32) for _ in range(MOST_FOREIGN + 3)]
    before = count_descriptors()
    mapped = [peer.map_foreign(os.getpid(), find(owner, tensor)) for tensor in tensors]
    assert peer.map_foreign(os.getpid(), find(owner, tensors[-1])) is mapped[-1]
    assert peer.map_foreign(os.getpid(), find(owner, tensors[0])) is not mapped[0]
    assert len(peer._foreign) == MOST_FOREIGN
    del mapped, peer
    assert count_descriptors() == before


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    """A machine with so much memory that only groups matter; no group is remembered."""
    found = SimpleNamespace(available=PLENTY)
    monkeypatch.setattr(memory_limits.psutil, "virtual_memory", lambda: found)
    find_groups.cache_clear()
    yield
    find_groups.cache_clear()


def make_group(folder: Path, is_old: bool, limit: int | str, used: int, **caches: int) -> None:
    """The files of a control group."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit_file, used_file = names if is_old else ("memory.max", "memory.current")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    prefix = "total_" if is_old else ""
    # In version 1 those without the prefix are the group's own, without its children's.
    lines = [f"{name} 7" for name in caches] if is_old else ["anon 7"]
    lines += [f"{prefix}{name} {size}" for name, size in caches.items()]
    (folder / "memory.stat").write_text("\n".join(lines) + "\n")


def make_process(parent: Path, cgroup: str, mountinfo: str) -> Path:
    """What /proc says of a process."""
    folder = parent / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


@pytest.mark.parametrize("is_old", [True, False], ids=["version 1", "version 2"])
def test_every_limit_counts_up_to_the_topmost_group(is_old, tmp_path, monkeypatch):
    mount = tmp_path / "a mount"
    point = str(mount).replace(" ", "\\040")
    if is_old:
        cgroup = "5:cpu,cpuacct:/other\n4:memory:/slurm/job_7/step_0\n0::/elsewhere\n"
        end = "- cgroup cgroup rw,memory"
        other = f"31 24 0:30 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        nothing = UNLIMITED
    else:
        cgroup = "0::/slurm/job_7/step_0\n"
        end, other, nothing = "- cgroup2 cgroup2 rw,nsdelegate", "", "max"
    info = f"25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n{other}"
    info += f"32 24 0:31 / {point} rw shared:9 {end}\n"
    process = make_process(tmp_path, cgroup, info)
    job = mount / "slurm" / "job_7"
    make_group(mount / "slurm", is_old, nothing, 5000)
    make_group(job, is_old, 1000, 700, inactive_file=150, active_file=50)
    make_group(job / "step_0", is_old, nothing, 600)
    groups = find_groups(process)
    assert [group.folder for group in groups] == [job / "step_0", job, mount / "slurm", mount]
    assert find_shortage_in(groups, 500) == ""
    assert find_shortage_in(groups, 501) == (
        f"the control group {job} allows 1000 B, of which 500 B are in use"
    )
    make_group(job / "step_0", is_old, 700, 600)
    assert find_shortage_in(groups, 100) == ""
    assert f"{job / 'step_0'} allows 700 B" in find_shortage_in(groups, 101)
    # Where there are no groups, the machine counts.
    assert find_groups(tmp_path) == ()
    monkeypatch.setattr(memory_limits, "find_groups", lambda: ())
    assert find_shortage(PLENTY) == ""
    assert find_shortage(PLENTY + 1) == "the machine has 32 TiB left"


def find_shortage_in(groups: tuple[ControlGroup, ...], size: int) -> str:
    return next(filter(None, (group.find_shortage(size) for group in groups)), "")


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        # Inside a container that has a control group namespace, or none.
        ("/", "/", "."),
        ("/docker/abc", "/docker/abc/inner", "inner"),
        # Outside of what can be seen here.
        ("/", "/../other", "."),
        ("/docker/abc", "/docker/def", "."),
    ],
)
def test_a_container_sees_its_own_groups(root, path, expected, tmp_path):
    mount = tmp_path / "cgroup"
    (mount / "inner").mkdir(parents=True)
    info = f"32 24 0:31 {root} {mount} ro - cgroup2 cgroup rw\n"
    process = make_process(tmp_path, f"0::{path}\n", info)
    folders = [group.folder for group in find_groups(process)]
    assert folders[0] == mount / expected and folders[-1] == mount


@contextlib.contextmanager
def limited(size: int) -> Iterator[Path]:
    """A control group of this machine that allows so many bytes; skips where there can be none."""
    parents = [group for group in find_groups() if os.access(group.folder, os.W_OK)]
    if not parents:
        pytest.skip("control groups are made by root, where they are mounted for writing")
    folder = parents[0].folder / f"mpiddp-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if parents[0].is_old else "memory.max"

    def remove() -> bool:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    try:
        folder.mkdir()
        (folder / name).write_text(str(size))
    except OSError as error:
        remove()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    try:
        yield folder
    finally:
        launchers.until(remove, f"{folder} to be unused")


@pytest.fixture(scope="module")
def small_node() -> Iterator[Pool]:
    """Ranks on a node with little shared memory, in a control group with a limit."""
    find_groups.cache_clear()
    row = launchers.table()["openmpi"]
    with limited(LIMIT) as folder:
        mount = f"mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm"
        enter = f'echo $$ > {folder}/cgroup.procs && {mount} && exec "$@"'
        wrapped = launchers.Launcher(
            "openmpi on a small node",
            Path(shutil.which("unshare") or "unshare"),
            row.libmpi,
            ("--mount", "sh", "-c", enter, "sh", str(row.mpirun), *row.flags),
            # Its own shared memory would not fit.
            {**row.environment, "OMPI_MCA_btl": "self,tcp"},
        )
        pool = Pool(wrapped, RANKS, {})
        yield pool
        pool.close()


def ask_together(session: mpiddp.Session) -> list[str]:
    """Why there is no memory, or nothing: for all of the group's, for a share, for a little."""
    answers, kept = [], []
    for wanted in (LIMIT, SHARE):
        mpiddp.barrier()
        try:
            kept.append(mpiddp.shared_empty(wanted, torch.uint8))
        except mpiddp.errors.ConfigurationError as error:
            answers.append(str(error))
        else:
            answers.append("")
    mpiddp.barrier()
    kept.clear()
    mpiddp.shared_empty(MEGABYTE)
    return answers


@pytest.mark.mpi
def test_ranks_beyond_their_groups_limit_are_told_and_not_killed(small_node):
    answers = small_node.call(ask_together).values
    for whole, _ in answers:
        assert re.fullmatch(
            rf"{LIMIT} bytes of shared memory are more than is free: the control group \S+ allows "
            r"1\.172 GiB, of which \S+ .iB are in use",
            whole,
        ), whole
    # Each had room for its share, all together had not.
    assert any(share for _, share in answers), answers
