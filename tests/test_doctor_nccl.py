"""What NCCL's own log says, in the forms that it has had over the years."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.doctor import nccl
from mpiddp.doctor.nccl import Transport

# Written after the formats in NCCL's sources (src/transport/) and in its plugins.
HEAD = "n1:100:100 [0] NCCL INFO "
INFINIBAND = f"""\
n1:100:100 [0] NCCL INFO cudaDriverVersion 12080
NCCL version 2.27.3+cuda12.9
{HEAD}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>
{HEAD}Using network IB
{HEAD}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
{HEAD}Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
{HEAD}Channel 01/0 : 0[0] -> 15[7] [send] via NET/IB/1(0)/GDRDMA
"""
SOCKETS = f"""\
{HEAD}NCCL version 2.21.5+cuda12.4
{HEAD}NET/IB : No device found.
{HEAD}NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>
{HEAD}Using network Socket
{HEAD}Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
{HEAD}Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
LIBFABRIC = f"""\
{HEAD}NET/OFI Selected Provider is efa (found 4 nics)
{HEAD}Using network AWS Libfabric
NCCL version 2.12.7+cuda11.4
{HEAD}Channel 00/0 : 1[f5000] -> 0[35000] [send] via NET/AWS Libfabric/0/GDRDMA
"""
SLINGSHOT = f"""\
NCCL version 2.19.4+cuda12.2
{HEAD}NET/OFI Using aws-ofi-nccl 1.7.4
{HEAD}NET/OFI Selected Provider is cxi (found 4 nics)
{HEAD}Using network AWS Libfabric
{HEAD}Channel 00/0 : 3[c1000] -> 4[3000] [send] via NET/AWS Libfabric/2
"""
PLUGIN = f"""\
{HEAD}Using network IBext_v8
{HEAD}Channel 03/0 : 47[7] -> 39[7] [receive] via NET/IBext_v8/2
"""
HOST_MEMORY = f"{HEAD}Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct\n"
OLD = f"{HEAD}Ring 01 : 0[160] -> 1[160] [send] via NET/Socket/0\n"
POINTER = f"{HEAD}Channel 02/0 : 0[0] -> 1[1] via P2P/direct pointer\n"


@pytest.mark.parametrize(
    ("text", "version", "network", "channels", "direct"),
    [
        (INFINIBAND, "2.27.3+cuda12.9", "IB", {"NET/IB": 2, "P2P": 1}, True),
        (SOCKETS, "2.21.5+cuda12.4", "Socket", {"NET/Socket": 2}, False),
        (LIBFABRIC, "2.12.7+cuda11.4", "AWS Libfabric", {"NET/AWS Libfabric": 1}, True),
        (SLINGSHOT, "2.19.4+cuda12.2", "AWS Libfabric", {"NET/AWS Libfabric": 1}, False),
        (PLUGIN, "", "IBext_v8", {"NET/IBext_v8": 1}, False),
        (HOST_MEMORY, "", "", {"SHM": 1}, False),
        (OLD, "", "", {"NET/Socket": 1}, False),
        (POINTER, "", "", {"P2P": 1}, False),
        ("", "", "", {}, False),
    ],
)
def test_logs_are_read(text, version, network, channels, direct):
    found = nccl.read_log(text)
    assert (found.version, found.network, found.direct) == (version, network, direct)
    assert dict(found.channels) == channels


def test_devices_are_read():
    assert nccl.read_log(INFINIBAND).devices == (
        "NET/IB: [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>",
    )
    assert nccl.read_log(SOCKETS).devices == (
        "NET/Socket: [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>",
    )


@pytest.mark.parametrize(
    ("text", "infiniband", "nodes", "peers", "status", "words"),
    [
        (INFINIBAND, ("mlx5_0",), 2, True, "pass", "network IB with GPUDirect RDMA"),
        (LIBFABRIC, (), 2, True, "pass", "network AWS Libfabric"),
        (SLINGSHOT, (), 2, True, "pass", "channels by NET/AWS Libfabric"),
        (SOCKETS, (), 2, True, "pass", "network Socket"),
        (SOCKETS, ("mlx5_0", "mlx5_1"), 2, True, "fail", "though there is mlx5_0, mlx5_1"),
        # The channels are not in the log, but the network's name is enough.
        (f"{HEAD}Using network Socket", ("mlx5_0",), 2, True, "fail", "TCP sockets"),
        # One node needs no network, so nothing is wrong with its name.
        (f"{HEAD}Using network Socket\n{POINTER}", ("mlx5_0",), 1, True, "pass", "by P2P"),
        (SOCKETS, (), 1, True, "warn", "within one node by TCP sockets"),
        (HOST_MEMORY, (), 1, True, "warn", "through the host's memory"),
        (HOST_MEMORY, (), 1, False, "pass", "channels by SHM"),
        ("NCCL version 2.27.3", (), 1, False, "skip", "no channels"),
    ],
)
def test_what_is_made_of_it(text, infiniband, nodes, peers, status, words):
    finding = nccl.judge_transport(nccl.read_log(text), infiniband, nodes, peers)
    assert finding.status == status and words in finding.found
    assert finding.code == (1 if status == "fail" else 0)


def test_ranks_of_a_node_are_merged():
    merged = nccl.merge_transports([Transport(), nccl.read_log(INFINIBAND), nccl.read_log(POINTER)])
    assert (merged.version, merged.network, merged.direct) == ("2.27.3+cuda12.9", "IB", True)
    assert dict(merged.channels) == {"NET/IB": 2, "P2P": 2}


def test_a_recording_is_read_and_removed():
    recording = nccl.Recording()
    path = Path(recording.variables["NCCL_DEBUG_FILE"])
    assert recording.variables["NCCL_DEBUG"] == "INFO"
    path.write_text(INFINIBAND)
    assert recording.finish() == nccl.read_log(INFINIBAND)
    assert not path.parent.exists()
    # NCCL may have written nothing at all.
    assert nccl.Recording().finish() == Transport()
