"""What NVIDIA's management library (NVML) tells of GPUs, without initialising CUDA."""

from __future__ import annotations

import ctypes
from typing import Any

from mpiddp.launch.device.vendors import format_bus

UUID_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


def list_uuids() -> list[str]:
    """UUIDs of the GPUs that NVML sees, in the order of their PCI addresses; empty without NVML."""
    library = _open_nvml()
    if library is None:
        return []
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        uuids = [_read_uuid(library, number) for number in range(count.value)]
    finally:
        library.nvmlShutdown()
    # A list with gaps would count wrongly.
    return uuids if all(uuids) else []


class _Bus(ctypes.Structure):
    """nvmlPciInfo_t, of which the numbers are read."""

    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("rest", ctypes.c_uint * 2),
        ("text", ctypes.c_char * 32),
    )


def find_bus(uuid: str) -> str | None:
    """The PCI address of a GPU as the system writes it; None without NVML, or for a slice."""
    library = _open_nvml()
    if library is None:
        return None
    handle, bus = ctypes.c_void_p(), _Bus()
    try:
        failed = library.nvmlDeviceGetHandleByUUID(
            uuid.encode(), ctypes.byref(handle)
        ) or library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(bus))
    finally:
        library.nvmlShutdown()
    return None if failed else format_bus(bus.domain, bus.bus, bus.device)


def _open_nvml() -> Any:
    """NVML, to be shut down, or None if it is not there."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def _read_uuid(library: Any, number: int) -> str:
    """Empty if NVML does not tell."""
    handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
    failed = library.nvmlDeviceGetHandleByIndex_v2(
        ctypes.c_uint(number), ctypes.byref(handle)
    ) or library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(UUID_BYTES))
    return "" if failed else uuid.value.decode()
