"""InfiniBand devices, by the state of their ports."""

from __future__ import annotations

import pytest

from mpiddp.launch.network.infiniband import find_infiniband, has_peer_memory


def put(folder, name, *states):
    """A device as the kernel shows it (Documentation/ABI/stable/sysfs-class-infiniband)."""
    (folder / name / "ports").mkdir(parents=True)
    for number, state in enumerate(states, 1):
        (folder / name / "ports" / str(number)).mkdir()
        (folder / name / "ports" / str(number) / "state").write_text(f"{state}\n")


@pytest.mark.parametrize(
    ("states", "works"),
    [
        (("4: ACTIVE",), True),
        (("1: DOWN", "4: ACTIVE"), True),
        (("5: ACTIVE_DEFER",), True),
        (("1: DOWN", "1: DOWN"), False),
        # Plugged in, but no subnet manager has given it an address yet.
        (("2: INIT",), False),
        (("3: ARMED",), False),
        ((), False),
    ],
)
def test_a_device_needs_an_active_port(states, works, tmp_path):
    put(tmp_path, "mlx5_7", *states)
    assert find_infiniband(tmp_path) == (("mlx5_7",) if works else ())


def test_devices_are_named_once_and_in_order(tmp_path):
    put(tmp_path, "mlx5_1", "4: ACTIVE", "4: ACTIVE")
    put(tmp_path, "mlx5_0", "4: ACTIVE")
    put(tmp_path, "mlx5_2", "1: DOWN")
    assert find_infiniband(tmp_path) == ("mlx5_0", "mlx5_1")
    assert find_infiniband(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    ("path", "has"),
    [
        ("module/nvidia_peermem/version", True),
        # Of nv_peer_mem, which was there before.
        ("kernel/mm/memory_peers/nv_mem/version", True),
        ("kernel/mm/memory_peers/nv_mem_nc/version", True),
        ("module/nvidia/version", False),
    ],
)
def test_the_module_that_reads_gpu_memory(path, has, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("580.65\n")
    assert has_peer_memory(tmp_path) is has
