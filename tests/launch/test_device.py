"""Which GPU or cores belong to a rank, who shares, and which backend follows."""

import re
import struct
import types
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import gpu_trees
import launchers
from facts import messages
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch.device import device, nvml, visibility
from mpiddp.launch.device.choice import choose_gpus
from mpiddp.launch.device.device import Placement
from mpiddp.launch.mpi.world import World
from mpiddp.launch.rendezvous import store

ALL_CORES = frozenset(range(8))
WORLD = World(5, 8, 1, 4, 1, 2, "node2", "node1")


def place(rank, visible=0, index=None, identity=None, cores=ALL_CORES, card=None):
    return Placement(rank, tuple(range(visible)), index, identity, cores, card)


@pytest.mark.parametrize(
    ("devices", "visible", "ranks", "gpus"),
    [
        ("auto", 2, 3, (0, 1)),
        ("cpu", 2, 2, ()),
        ("cuda", 2, 2, (0, 1)),
        ("2,0", 4, 2, (2, 0)),
        # One rank with several GPUs, for nn.DataParallel.
        ("0, 2,3", 4, 1, (0, 2, 3)),
    ],
)
def test_gpus_are_chosen_by_the_option(devices, visible, ranks, gpus):
    world = replace(WORLD, local_size=ranks)
    assert choose_gpus(devices, visible, world, allow_sharing=False) == gpus
    # A short list is shared on purpose.
    assert choose_gpus("1", 2, world, allow_sharing=True) == (1,)


def test_more_ranks_than_gpus_count_on_from_the_first():
    assert [device.choose_index((0, 2), rank) for rank in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("devices", "visible", "words"),
    [
        ("cuda", 0, ["this rank sees no GPU", "--devices auto"]),
        ("0,4,5", 2, ["--devices 0,4,5", "there is no GPU 4 or 5", "sees 2 GPUs, counted from"]),
        ("1", 2, ["--devices 1 is 1 GPU for 2 ranks", "--allow-shared-gpu"]),
        ("0,0", 2, ["each GPU once"]),
        ([0, 1], 4, ["'0,2'", "found [0, 1]"]),
        (3, 4, ["'0,2'", "found 3"]),
    ],
)
def test_gpus_that_cannot_be_had(devices, visible, words):
    world = replace(WORLD, local_size=2)
    with pytest.raises(ConfigurationError) as caught:
        choose_gpus(devices, visible, world, allow_sharing=False)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("placements", "shared"),
    [
        ([place(0, 2, 0, "A"), place(1, 2, 1, "B"), place(2, 2, 0, "A")], [0, 2]),
        # Slurm gave each rank its own GPU, which is device 0 whatever its local rank.
        ([place(4, 1, 0, "A"), place(5, 1, 0, "B")], []),
        # Without UUIDs: who sees several sees the same ones, a single one is its own.
        ([place(0, 2, 0), place(1, 2, 1), place(2, 2, 0)], [0, 2]),
        ([place(0, 1, 0), place(1, 1, 0)], []),
        # A rank without a GPU shares with nobody.
        ([place(0, 1, 0, "A"), place(1)], []),
    ],
)
def test_find_shared(placements, shared):
    assert device.find_shared(placements) == frozenset(shared)


def test_describe_sharing_names_ranks_and_remedies():
    few = [place(4, 2, 0, "A"), place(5, 2, 1, "B"), place(6, 2, 0, "A")]
    text = device.describe_sharing("node3", few, frozenset({6, 4}))
    assert text.startswith("on node3, ranks 4, 6 would use a GPU that another rank uses: 3 ranks ")
    assert "--ntasks-per-node=2 --gpus-per-node=2" in text
    overlap = [place(0, 4, 1, "B"), place(1, 4, 1, "B")]
    text = device.describe_sharing("n", overlap, frozenset({0, 1}))
    assert "2 ranks that were given overlapping GPUs" in text


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ([place(0, 1, 0)], []),
        ([place(0, 2, 0), place(1, 2, 1)], []),
        ([place(0, 8, 0)], ["8 GPUs visible, 1 rank on this node", "--ntasks-per-node=8"]),
        ([place(i, 1, 0) for i in range(4)], ["--gpus-per-node=4 --gpu-bind=none"]),
        ([replace(place(i), unseen="torch sees none") for i in range(2)], ["torch sees none"]),
    ],
)
def test_find_remarks(placements, words):
    remarks = device.find_remarks("node3", placements)
    assert len(remarks) == (1 if words else 0)
    for word in words:
        assert word in remarks[0] and remarks[0].startswith("node3: ")


@pytest.mark.parametrize(
    ("masks", "shares"),
    [
        # More ranks than cores: one thread each.
        ([{0, 1}] * 4, [1] * 4),
        # Rank 0 has cores 0 and 1 to itself, and half of 2 and 3.
        ([{0, 1, 2, 3}, {2, 3}], [3, 1]),
        # Three thirds are one, not 0.999….
        ([{0, 1, 2}] * 3, [1, 1, 1]),
    ],
)
def test_share_cores(masks, shares):
    sets = [frozenset(mask) for mask in masks]
    assert [device.share_cores(sets, rank) for rank in range(len(sets))] == shares


MASKS = dict.fromkeys(
    (
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
        "ZE_FLAT_DEVICE_HIERARCHY", "SLURM_GPUS_ON_NODE", "GPU_DEVICE_ORDINAL",
    )
)  # fmt: skip
FRONTIER = [0xC1, 0xC6, 0xC9, 0xCE, 0xD1, 0xD6, 0xD9, 0xDE]
AURORA = [f"0000:{bus}:00.0" for bus in ("18", "42", "6c", "8a", "ac", "ce")]
MACHINES = {
    "cpus": lambda root: None,
    "4 of NVIDIA": lambda root: gpu_trees.add_nvidia(root, 4),
    "8 of AMD": lambda root: gpu_trees.add_amd(root, FRONTIER, sockets=4),
    "2 of 8 of AMD": lambda root: gpu_trees.add_amd(root, FRONTIER[:2], hidden=6),
    "2 of AMD in 4 partitions": lambda root: gpu_trees.add_amd(root, [5] * 4 + [6] * 4),
    "a screen of AMD": lambda root: gpu_trees.add_amd(root, [5], gpu_trees.VIDEO),
    "6 of Intel, i915": lambda root: gpu_trees.add_intel(root, AURORA, 2, "i915"),
    "2 of Intel, xe": lambda root: gpu_trees.add_intel(root, AURORA[:2], 1),
    "a screen of Intel": lambda root: gpu_trees.add_intel(
        root, ["0000:00:02.0"], 2, "i915", gpu_trees.VIDEO
    ),
    "a card and a screen of Intel": lambda root: gpu_trees.add_intel(
        root, ["0000:00:02.0", "0000:03:00.0"], 1, "xe", gpu_trees.VIDEO
    ),
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up machine's root, with a torch of this build, and these variables."""

    def make(name, build, variables):
        MACHINES[name](tmp_path)
        launchers.set_variables(monkeypatch, {**MASKS, **variables})
        for each in ("cuda", "hip", "xpu"):
            monkeypatch.setattr(torch.version, each, "13.0" if each == build else None)
        monkeypatch.setattr(visibility, "read_torch_build", lambda: build)
        monkeypatch.setattr(visibility, "_ask_driver", lambda: 0)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("name", "build", "variables", "count"),
    [
        ("cpus", "cuda", {}, 0),
        ("4 of NVIDIA", "cuda", {}, 4),
        ("4 of NVIDIA", "cuda", {"CUDA_VISIBLE_DEVICES": " 3 , 1 "}, 2),
        ("4 of NVIDIA", "cuda", {"CUDA_VISIBLE_DEVICES": "0,4,1"}, 1),
        ("4 of NVIDIA", "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b,-1,GPU-c"}, 2),
        ("4 of NVIDIA", "cuda", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        # As Slurm sets them if gres.conf does not name the maker.
        ("4 of NVIDIA", "", {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}, 1),
        ("8 of AMD", "", {}, 8),
        ("8 of AMD", "cuda", {}, 0),
        ("2 of 8 of AMD", "hip", {}, 2),
        ("2 of AMD in 4 partitions", "hip", {}, 8),
        ("8 of AMD", "hip", {"ROCR_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, 2),
        ("8 of AMD", "hip", {"HIP_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": ""}, 1),
        # HIP counts those that ROCR_VISIBLE_DEVICES shows.
        ("8 of AMD", "hip", {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, 0),
        # Perhaps nobody computes on it, but a torch for it says so.
        ("a screen of AMD", "", {}, 0),
        ("a screen of AMD", "hip", {}, 1),
        ("6 of Intel, i915", "xpu", {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 6),
        ("6 of Intel, i915", "xpu", {"ZE_AFFINITY_MASK": "0,11"}, 2),
        ("6 of Intel, i915", "xpu",
         {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0.0,0.1,3.1"}, 2),
        ("6 of Intel, i915", "", {"CUDA_VISIBLE_DEVICES": ""}, 12),
        ("2 of Intel, xe", "xpu", {}, 2),
        ("a screen of Intel", "xpu", {}, 1),
        ("a card and a screen of Intel", "xpu", {}, 1),
        ("a card and a screen of Intel", "", {}, 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_without_torch(machine, name, build, variables, count):
    assert visibility.count_gpus(machine(name, build, variables)) == count


@pytest.mark.parametrize(
    ("name", "build", "variables", "words"),
    [
        ("cpus", "", {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "2"}, ""),
        ("cpus", "", {"CUDA_VISIBLE_DEVICES": "0,1"}, "none of the 2 GPUs .* built for CPUs alone"),
        ("cpus", "", {"SLURM_GPUS_ON_NODE": "4"}, "none of the 4 GPUs .* built for CPUs alone"),
        ("cpus", "cuda", {"CUDA_VISIBLE_DEVICES": "0"}, "of the 1 GPU .*: The driver is too old$"),
        ("a screen of AMD", "", {}, ""),
        ("a screen of Intel", "cuda", {}, ""),
        ("4 of NVIDIA", "", {}, "4 NVIDIA GPUs .* for CPUs alone; install its CUDA build"),
        ("4 of NVIDIA", "cuda", {"CUDA_VISIBLE_DEVICES": ""}, ""),
        # A torch for CPUs alone, for another maker, and a driver that fails.
        ("8 of AMD", "cuda", {}, "8 AMD GPUs .* built for NVIDIA GPUs; install its ROCm build"),
        ("6 of Intel, i915", "hip", {}, "12 Intel GPUs .* for AMD GPUs; install its XPU build"),
        ("6 of Intel, i915", "xpu", {}, "12 Intel GPUs .* does not say why; xpu-smi may"),
        ("8 of AMD", "hip", {}, "8 AMD GPUs .*: The driver is too old$"),
        # Slurm sets the variables of all makers.
        ("8 of AMD", "", {"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}, "2 AMD"),
        # Hidden on purpose, or by a variable that was meant for another maker.
        ("8 of AMD", "hip", {"HIP_VISIBLE_DEVICES": ""}, ""),
        ("8 of AMD", "hip", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides 8 AMD GPUs"),
        ("8 of AMD", "hip", {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"},
         "^ROCR_VISIBLE_DEVICES=1 shows 1 AMD GPU, which CUDA_.*=1 counts from 0: there is no 1;"),
    ],
)  # fmt: skip
def test_gpus_that_torch_does_not_see_are_explained(
    machine, name, build, variables, words, monkeypatch
):
    def warn():
        warnings.warn("The driver is too old (Triggered internally at x.cpp:1.)", stacklevel=1)

    root = machine(name, build, variables)
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    found = visibility.explain_unseen(root)
    assert bool(found) == bool(words) and re.search(words, found), found


@pytest.fixture
def built_with(monkeypatch):
    """Pretend that this torch was built with the backend of its GPUs, or without."""

    def pretend(available, build="cuda"):
        for each in ("nccl", "xccl"):
            monkeypatch.setattr(f"torch.distributed.is_{each}_available", lambda: available)
        for each in ("cuda", "hip", "xpu"):
            monkeypatch.setattr(torch.version, each, "13.0" if each == build else None)

    return pretend


@pytest.mark.parametrize(
    ("requested", "refused", "lacking", "built", "backend"),
    [
        ("auto", False, None, True, "nccl"),
        ("auto", False, None, False, "gloo"),
        ("auto", True, None, True, "gloo"),
        ("auto", False, 1, True, "gloo"),
        ("gloo", True, None, True, "gloo"),
        ("nccl", False, None, True, "nccl"),
    ],
)
def test_choose_backend(requested, refused, lacking, built, backend, built_with):
    built_with(built)
    assert device.choose_backend(requested, refused, lacking) == backend


@pytest.mark.parametrize(
    ("build", "backend", "refuses"),
    [("", "nccl", True), ("hip", "nccl", True), ("xpu", "xccl", False)],
)
def test_each_maker_has_its_backend(build, backend, refuses, built_with):
    built_with(True, build)
    assert device.choose_backend("auto", False, None) == backend
    assert device.refuses_sharing() == refuses
    # Gloo has no calls for Intel's tensors, and --devices names the maker's own.
    if build == "xpu":
        with pytest.raises(ConfigurationError):
            device.check_mixture("rank 1", "rank 0")
        with pytest.raises(ConfigurationError, match="is for Intel GPUs: --devices xpu"):
            device.find_placement(WORLD, "cuda", may_initialize=False, allow_sharing=False)
    else:
        device.check_mixture("rank 1", "rank 0")


@pytest.mark.parametrize(
    ("requested", "refused", "lacking", "built", "kind", "words"),
    [
        ("nccl", False, 3, True, ConfigurationError, ["rank 3", "--backend gloo"]),
        ("nccl", True, None, True, LaunchError, ["share a GPU", "NCCL_MULTI_RANK_GPU_ENABLE=1"]),
        ("nccl", False, None, False, ConfigurationError, ["without NCCL"]),
        ("mpi", False, None, True, ConfigurationError, ["built without MPI", "--sync auto"]),
        ("ucc", False, None, True, ConfigurationError, ["'ucc'", "auto, nccl, xccl, gloo or mpi"]),
    ],
)
def test_backends_that_cannot_work(requested, refused, lacking, built, kind, words, built_with):
    built_with(built)
    with pytest.raises(kind) as caught:
        device.choose_backend(requested, refused, lacking)
    assert all(word in str(caught.value) for word in words)


def settle(world, placements, allow_sharing):
    """As start-up does, once every rank of the node has told its placement."""
    node = SimpleNamespace(allgather=lambda _: placements) if world.size > 1 else None
    mine = placements[world.local_rank]
    return device.assign(world, device.compare(world, node, mine, allow_sharing=allow_sharing))


def test_sharing_is_refused_unless_it_is_wanted():
    placements = [place(4 + i, 2, i % 2, "AB"[i % 2], frozenset({i})) for i in range(4)]
    with pytest.raises(LaunchError, match="on node2, ranks 4, 5, 6, 7"):
        settle(WORLD, placements, False)
    assignment = settle(WORLD, placements, True)
    assert (assignment.index, assignment.crowded, assignment.threads) == (1, True, 1)

    alone = World(0, 1, 0, 1, 0, 1, "node1", "node1")
    assignment = settle(alone, [place(0, 2, 0, "A")], False)
    assert (assignment.index, assignment.crowded, assignment.threads) == (0, False, 8)
    assert "2 GPUs visible, 1 rank" in assignment.remarks[0]
    assert str(device.name_device(settle(WORLD, [place(4), place(5)], False))) == "cpu"


# What a session makes of GPUs: the driver is faked, so that the way to the error is real.

# NVML tells nothing; CUDA does, once a device is set.
FAKE_CUDA = """
import os, sys, types
import torch, mpiddp
from mpiddp.launch.device import device
set_devices = []
torch.cuda.device_count = lambda: 1
device.nvml.list_uuids = lambda: []
torch.cuda.set_device = set_devices.append
def tell(index):
    assert set_devices == [index]
    return types.SimpleNamespace(
        name="NVIDIA H200", uuid="A", pci_domain_id=0, pci_bus_id=193, pci_device_id=0
    )
torch.cuda.get_device_properties = tell
torch.distributed.is_nccl_available = lambda: True
with mpiddp.init(timeout=90) as session:
    print(session.backend, session.device)
"""


@pytest.mark.mpi
def test_two_ranks_on_one_gpu_end_before_nccl():
    result = launchers.run("mpich", 2, ["-c", FAKE_CUDA]).expect(3)
    lines = messages(result)
    assert len(lines) == 1 and "ranks 0, 1 would use a GPU that another rank uses" in lines[0]
    assert "2 ranks for 1 visible GPU" in lines[0] and "--allow-shared-gpu" in lines[0]
    assert "Traceback" not in result.output


# Intel's GPUs, and a torch for them: what is called of torch is pretended, and so is its backend.
FAKE_XPU = """
import types
import torch, mpiddp
from mpiddp.launch.rendezvous import store
torch.version.cuda, torch.version.xpu = None, "20250302"
xpu = torch.xpu
xpu.device_count, xpu.is_initialized, set_devices = lambda: 2, lambda: True, []
xpu.set_device = set_devices.append
xpu.get_device_properties = lambda index: types.SimpleNamespace(uuid=f"d20ebf0c-{index}")
xpu.get_device_name = lambda device: "Intel(R) Data Center GPU Max 1550"
torch.distributed.is_xccl_available = lambda: True
real = store.make_group
def make_group(found, world, backend, device, timeout):
    assert (backend, str(device), set_devices) == ("xccl", f"xpu:{world.rank}", [world.rank])
    real(found, world, "gloo", device, timeout)
store.make_group = make_group
with mpiddp.init(timeout=90) as session:
    print(session.backend, session.device, session.gpus)
"""


@pytest.mark.mpi
def test_ranks_compute_on_intels_gpus():
    result = launchers.run("mpich", 2, ["-c", FAKE_XPU]).expect(0)
    assert sorted(result.stdout.splitlines()) == ["xccl xpu:0 (0, 1)", "xccl xpu:1 (0, 1)"]
    assert "GPU Intel(R) Data Center GPU Max 1550" in result.stderr


# Rank 0 sees four GPUs, rank 1 none.
MIXED = """
import os, sys
import torch, mpiddp
from mpiddp.launch.device import device
torch.cuda.device_count = lambda: 0 if os.environ["PMI_RANK"] == "1" else 4
device.nvml.list_uuids = lambda: [f"GPU-{number}" for number in range(4)]
device.select = lambda placement: placement
with mpiddp.init(timeout=30) as session:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print(session.world.rank, session.backend, session.device, session.gpus, total.item())
"""


@pytest.mark.mpi
def test_cpus_and_gpus_in_one_job_are_connected_by_gloo():
    result = launchers.run("mpich", 2, ["-c", MIXED]).expect(0)
    rows = sorted(result.stdout.splitlines())
    assert rows == ["0 gloo cuda:0 (0, 1, 2, 3) 2.0", "1 gloo cpu () 2.0"]
    assert re.search(r"note: rank 1 on \S+ has no GPU, rank 0 on \S+ has one: Gloo", result.stderr)


# torch counts what CUDA_VISIBLE_DEVICES shows; of a script's process nothing else is asked.
LISTED_SCRIPT = """
import os, sys, torch
def count():
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return 4 if shown is None else len(list(filter(None, shown.split(","))))
torch.cuda.device_count = count
sys.argv = ["mpiddp", "--devices", sys.argv[1], "-m", "shown"]
from mpiddp.launch.script.script import main
main()
"""


@pytest.mark.parametrize(
    ("visible", "devices", "shown"), [("GPU-a,5,GPU-c", "2,0", "GPU-c,GPU-a"), ("4,5", "cpu", "")]
)
def test_a_script_sees_the_gpus_that_are_listed(visible, devices, shown, tmp_path):
    (tmp_path / "shown.py").write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    words, env = ["-c", LISTED_SCRIPT, devices], {"CUDA_VISIBLE_DEVICES": visible}
    result = launchers.run("alone", 1, words, cwd=tmp_path, env=env)
    assert result.expect(0).stdout == f"{shown}\n"


def test_torchs_own_mpi_is_taken_where_torch_has_it(monkeypatch):
    """The ranks are MPI's: torch warns of any that it is told."""
    calls = []
    monkeypatch.setattr("torch.distributed.is_mpi_available", lambda: True)
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda *args, **more: calls.append((args, more))
    )
    backend = device.choose_backend("mpi", False, None)
    store.make_group(None, WORLD, backend, None, 20.0)
    assert calls == [(("mpi",), {"timeout": timedelta(seconds=20)})]


def make_nvml(closed):
    """NVML as ctypes would load it, with three GPUs; ``closed`` grows when it is shut down."""

    def count(number):
        number._obj.value = 3
        return 0

    def find(number, handle):
        handle._obj.value = number.value + 1
        return 0

    def tell(handle, buffer, length):
        buffer.value = f"GPU-{handle.value - 1}".encode()
        return 0

    def find_by_uuid(uuid, handle):
        number = uuid.decode().removeprefix("GPU-")
        handle._obj.value = int(number) + 1 if number in ("0", "1", "2") else 0
        return number not in ("0", "1", "2")

    def tell_bus(handle, bus):
        # As a driver would fill in nvmlPciInfo_t (nvml.h): domain, bus and device after 16 bytes.
        numbers = (16, 0x80 + handle.value - 1, 2)
        struct.pack_into("3I", bus._obj, 16, *numbers)
        return 0

    return types.SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByUUID=find_by_uuid,
        nvmlDeviceGetPciInfo_v3=tell_bus, nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=find, nvmlDeviceGetUUID=tell,
        nvmlShutdown=lambda: closed.append(True),
    )  # fmt: skip


ALL = "GPU-0, GPU-1, GPU-2"


@pytest.mark.parametrize(
    ("visible", "order", "index", "identity"),
    [
        (None, "PCI_BUS_ID", 2, "GPU-2"),
        (None, "PCI_BUS_ID", 3, None),
        ("2,0", "PCI_BUS_ID", 1, "GPU-0"),
        # CUDA begins with the fastest: its number 2 need not be NVML's.
        ("2,0", "FASTEST_FIRST", 1, f"0 of {ALL}"),
        # More than are visible, though the driver knows more.
        ("0", None, 1, None),
        ("GPU-a1b2,MIG-c3", None, 1, "MIG-c3"),
        # A UUID's beginning, as CUDA takes it.
        ("GPU-1", None, 0, "GPU-1"),
        ("GPU", None, 0, "GPU"),
    ],
)
def test_a_gpu_is_known_by_its_uuid(visible, order, index, identity, monkeypatch):
    variables = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    launchers.set_variables(monkeypatch, variables)
    closed: list[bool] = []
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: make_nvml(closed))
    assert device.find_identity(index) == identity
    asked = (visible, index) not in [("0", 1), ("GPU-a1b2,MIG-c3", 1)]
    assert len(closed) == asked
    # A slice of a GPU has none.
    numbers = [number for number in "102" if identity and identity.startswith(f"GPU-{number}")]
    numbers += [identity[0]] if identity and " of " in identity else []
    assert device.find_bus_of(identity) == (f"0010:8{numbers[0]}:02.0" if numbers else None)


def test_a_beginning_is_completed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932,GPU-41")
    monkeypatch.setattr(nvml, "list_uuids", lambda: ["GPU-41255406", "GPU-8932f937"])
    assert [device.find_identity(index) for index in range(2)] == ["GPU-8932f937", "GPU-41255406"]


def test_slices_are_counted_without_cuda_where_a_script_may_fork(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")

    def count():
        raise AssertionError("torch initialises CUDA to count slices")

    monkeypatch.setattr("torch.cuda.device_count", count)
    for is_built in (True, False):
        monkeypatch.setattr("torch.backends.cuda.is_built", lambda is_built=is_built: is_built)
        assert device.count_visible(may_initialize=False) == is_built
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert device.count_visible(may_initialize=True) == 2


@pytest.mark.parametrize(
    ("build", "variables", "shown"),
    [
        ("cuda", {"HIP_VISIBLE_DEVICES": "5,6,7"}, {"CUDA_VISIBLE_DEVICES": "2,0"}),
        ("hip", {"CUDA_VISIBLE_DEVICES": "5,6,7"}, {"CUDA_VISIBLE_DEVICES": "7,5"}),
        # AMD's runtime reads no other one then.
        ("hip", {"HIP_VISIBLE_DEVICES": "5, 6, 7"}, {"HIP_VISIBLE_DEVICES": "7,5"}),
        # HIP counts what that shows, and torch takes no other variable beside it.
        ("hip", {"ROCR_VISIBLE_DEVICES": "5,6,7"}, {"HIP_VISIBLE_DEVICES": "2,0"}),
        ("xpu", {}, {"ZE_AFFINITY_MASK": "2,0"}),
        # Several tiles of one card are one device.
        ("xpu", {"ZE_AFFINITY_MASK": "0.0,0.1,1,2.1"}, {"ZE_AFFINITY_MASK": "2.1,0.0,0.1"}),
    ],
)
def test_a_script_is_shown_its_gpus_by_the_variable_that_counts(machine, build, variables, shown):
    machine("cpus", build, variables)
    assert device.name_visible((2, 0)) == shown


CARD = {"pci_domain_id": 0, "pci_bus_id": 193, "pci_device_id": 0}


@pytest.fixture
def ask_cuda(monkeypatch):
    """What ``select`` finds, where CUDA tells these properties and the variable holds that."""

    def ask(placement, visible, build, **properties):
        launchers.set_variables(monkeypatch, {"CUDA_VISIBLE_DEVICES": visible})
        for each in ("cuda", "hip", "xpu"):
            monkeypatch.setattr(torch.version, each, "7.2" if each == (build or "cuda") else None)
        for module in (torch.cuda, torch.xpu):
            monkeypatch.setattr(module, "set_device", lambda index: None)
            monkeypatch.setattr(
                module, "get_device_properties", lambda index: SimpleNamespace(**properties)
            )
        return device.select(placement)

    return ask


@pytest.mark.parametrize(
    ("one", "other", "shares", "crowded"),
    [
        # uuid and PCI address, CUDA_VISIBLE_DEVICES, build of torch
        (("A", CARD, "0", None), ("A", CARD, "GPU-a", None), True, True),
        (("A", CARD, None, None), ("B", CARD | {"pci_bus_id": 1}, None, None), False, False),
        # Slices: CUDA gives the whole GPU's UUID, or each slice its own.
        (("A", CARD, "MIG-1", None), ("A", CARD, "MIG-2", None), False, True),
        (("A", CARD, "MIG-1", None), ("A", CARD, "MIG-1", None), True, True),
        # A torch that tells no PCI addresses, or no UUIDs.
        (("A", {}, None, None), ("A", {}, None, None), True, True),
        ((None, CARD, None, None), (None, CARD, None, None), True, True),
        # ROCm, where there is no NVML.
        (("A", CARD, None, "hip"), ("A", CARD, None, "hip"), True, True),
        # Intel's, of which torch tells no addresses: a tile has a UUID of its own.
        (("A-0", {}, None, "xpu"), ("A-1", {}, None, "xpu"), False, False),
    ],
)
def test_cuda_says_who_shares(ask_cuda, one, other, shares, crowded):
    placements = [
        ask_cuda(place(rank, 1, 0), visible, build, uuid=uuid, **card)
        for rank, (uuid, card, visible, build) in enumerate((one, other))
    ]
    assert device.find_shared(placements) == frozenset({0, 1} if shares else ())
    assert device.find_crowded(placements) == frozenset({0, 1} if crowded else ())


def test_partitions_of_an_amd_gpu_are_gpus_of_their_own(ask_cuda):
    seen = [ask_cuda(place(rank, 8, rank), None, "hip", uuid="A", **CARD) for rank in range(2)]
    assert not device.find_crowded(seen)
    # Each rank sees one, as ROCR_VISIBLE_DEVICES says; the kernel's list tells them apart.
    names = [f"0000:c1:00.0 node {number}" for number in (2, 3)]
    alone = [place(rank, 1, 0, name) for rank, name in enumerate(names)]
    assert not device.find_crowded(
        [ask_cuda(each, None, "hip", uuid="A", **CARD) for each in alone]
    )


@pytest.mark.parametrize(
    ("name", "build", "variables", "index", "identity"),
    [
        ("8 of AMD", "hip", {"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "1"}, 0,
         "0000:de:00.0"),
        ("2 of AMD in 4 partitions", "hip", {}, 5, "0000:06:00.0 node 6"),
        ("6 of Intel, i915", "xpu", {}, 3, "0000:42:00.0 tile 1"),
        ("6 of Intel, i915", "xpu", {"ZE_AFFINITY_MASK": "11"}, 0, "0000:ce:00.0 tile 1"),
        ("2 of Intel, xe", "xpu", {}, 1, "0000:42:00.0"),
        ("2 of Intel, xe", "xpu", {}, 2, None),
    ],
)  # fmt: skip
def test_the_kernel_tells_the_gpus_of_other_makers_apart(
    machine, name, build, variables, index, identity, monkeypatch
):
    root = machine(name, build, variables)
    monkeypatch.setattr(device, "list_visible", partial(visibility.list_visible, root=root))
    assert device.find_identity(index) == identity
    assert device.find_bus_of(identity) == (identity and identity.split()[0])


def test_the_bus_as_the_system_writes_it():
    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert device.find_bus(told) == "0000:c1:00.0"
    assert device.find_bus(SimpleNamespace(pci_bus_id=0xC1)) is None


@pytest.mark.parametrize(("wanted", "remarks"), [(None, 1), ("1", 0)])
def test_slices_of_one_gpu_are_pointed_out(monkeypatch, wanted, remarks):
    launchers.set_variables(monkeypatch, {"NCCL_MULTI_RANK_GPU_ENABLE": wanted})
    monkeypatch.setattr("mpiddp.launch.device.nccl.find_version", lambda: (2, 30, 7))
    slices = [place(rank, 2, rank, f"MIG-{rank}", card="c1") for rank in range(2)]
    found = device.find_remarks("node3", slices)
    assert len(found) == remarks
    assert all("ranks 0, 1 use one GPU or slices of one" in remark for remark in found)
