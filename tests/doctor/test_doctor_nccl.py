"""What NCCL's own log says, in the forms that it has had over the years."""

import re
from pathlib import Path

import pytest

from doctors import read_recorded
from mpiddp.doctor.gpu import nccl_log
from mpiddp.doctor.gpu.nccl_log import Transport
from mpiddp.launch.fabrics import NodeFabrics, read_table

PLUGINS = {each.fabrics + each.vendors: each for each in read_table().plugins}


def make_node(*devices, fabric="InfiniBand", vendor="NVIDIA"):
    fabrics = {fabric: devices} if devices else {}
    return NodeFabrics(fabrics, (vendor,), PLUGINS.get((fabric, vendor)))


SLINGSHOT_CARDS = make_node("cxi0", "cxi1", fabric="Slingshot")
AMD_CARDS = make_node("hsn0", fabric="Slingshot", vendor="AMD")
EFA_CARD = make_node("rdmap0s6", fabric="EFA")
MLX = make_node("mlx5_0")
# Written here, after the formats in NCCL's sources (src/transport/) and in its plugins; what was
# really recorded is tested at the end.
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
POINTER = f"{HEAD}Channel 02/0 : 0[0] -> 1[1] via P2P/direct pointer\n"
WITHOUT = INFINIBAND.replace("/GDRDMA", "")
# One node: nothing goes over the network, but NCCL has looked at its cards.
ABLE = f"""\
{POINTER}{HEAD}NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
{HEAD}NET/IB : GPU Direct RDMA Enabled for HCA 1 'mlx5_1'
"""
UNABLE = ABLE.replace("Enabled", "Disabled")
DISTANT = f"{POINTER}{HEAD}NET/IB : GPU Direct RDMA Disabled for GPU 0 / HCA 3 (distance 5 > 4)"
HOST_MEMORY = f"{HEAD}Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct\n"
# RCCL's log has NCCL's lines.
RCCL = f"""\
RCCL version : 2.22.3-develop:d380693+
{HEAD}NET/Plugin: Could not find: librccl-net.so. Using internal net plugin.
{HEAD}NET/IB : No device found.
{HEAD}NET/Socket : Using [0]hsn0:10.0.0.1<0> [1]hsn1:10.0.0.2<0>
{HEAD}Using network Socket
"""


@pytest.mark.parametrize(
    ("text", "infiniband", "nodes", "peers", "status", "words"),
    [
        (INFINIBAND, ("mlx5_0",), 2, True, "pass", "network IB with GPUDirect RDMA"),
        (WITHOUT, ("mlx5_0",), 2, True, "warn", "mlx5_0 without GPUDirect RDMA"),
        (UNABLE, ("mlx5_0", "mlx5_1"), 1, True, "warn", "mlx5_0, mlx5_1 without GPUDirect RDMA"),
        (ABLE, ("mlx5_0", "mlx5_1"), 1, True, "pass", "channels by P2P"),
        # Of a card of this GPU's that is far away; it has others.
        (DISTANT, ("mlx5_0",), 1, True, "pass", "by P2P"),
        (LIBFABRIC, (), 2, True, "pass", "network AWS Libfabric"),
        (SOCKETS, (), 2, True, "pass", "network Socket"),
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
    node = make_node(*infiniband)
    finding = nccl_log.judge_transport(nccl_log.read_log(text), node, nodes, peers, False)
    assert finding.status == status and words in finding.found
    assert finding.code == (1 if status == "fail" else 0)


# A plugin whose libfabric has no way to the cards, in the words of two versions of it
# (src/nccl_ofi_net.cpp).
OVER_TCP = LIBFABRIC.replace(
    "Provider is efa (found 4 nics)", "provider is tcp, fabric is 10.2.0.0/16"
)
OLD_OVER_TCP = SLINGSHOT.replace("is cxi (found 4 nics)", "is tcp (found 1 nics)")


@pytest.mark.parametrize(
    ("text", "node", "nodes", "status"),
    [
        (RCCL, AMD_CARDS, 2, "fail"),
        (SOCKETS, SLINGSHOT_CARDS, 2, "fail"),
        (SOCKETS, EFA_CARD, 2, "fail"),
        (SLINGSHOT, SLINGSHOT_CARDS, 2, "pass"),
        (LIBFABRIC, EFA_CARD, 2, "pass"),
        (f"{HEAD}Using network Socket\n{POINTER}", SLINGSHOT_CARDS, 1, "pass"),
        (OVER_TCP, EFA_CARD, 2, "fail"),
        (OLD_OVER_TCP, SLINGSHOT_CARDS, 2, "fail"),
        (OLD_OVER_TCP, SLINGSHOT_CARDS, 1, "pass"),
        # There is nothing better.
        (OLD_OVER_TCP, NodeFabrics(vendors=("NVIDIA",)), 2, "pass"),
    ],
)
def test_tcp_beside_a_card_that_needs_a_plugin(text, node, nodes, status):
    finding = nccl_log.judge_transport(nccl_log.read_log(text), node, nodes, True, False)
    assert finding.status == status and ("NCCL 2.22.3, " in finding.found) == (text is RCCL)
    if status == "pass":
        return
    assert f"though there is {node.name} (in its log: “" in finding.found
    if "is tcp" in text:
        assert "by libfabric's provider tcp" in finding.found and "FI_PROVIDER" in finding.advice
        assert re.search(
            r"“NET/OFI Selected [Pp]rovider is tcp.*”, “Using network AWS", finding.found
        )
        return
    assert "“Using network Socket”" in finding.found
    assert 'NCCL_NET="AWS Libfabric"' in finding.advice
    assert node.plugin.advice in finding.advice


@pytest.mark.parametrize(
    ("has_module", "words"),
    [(False, ["nvidia-peermem", "DMA-BUF"]), (True, ["NCCL_NET_GDR_LEVEL=PHB", "topo -m"])],
)
def test_the_advice_on_gpudirect_depends_on_the_kernel(has_module, words):
    merged = nccl_log.merge_transports([Transport(), *map(nccl_log.read_log, (INFINIBAND, UNABLE))])
    assert (merged.version, merged.network, merged.direct) == ("2.27.3+cuda12.9", "IB", True)
    assert merged.kinds == {"NET/IB", "P2P"}
    transport = nccl_log.merge_transports([Transport(), nccl_log.read_log(UNABLE)])
    finding = nccl_log.judge_transport(transport, make_node("mlx5_0"), 1, True, has_module)
    assert finding.status == "warn" and all(word in finding.advice for word in words)


def test_a_recording_is_read_and_removed():
    recording = nccl_log.Recording()
    path = Path(recording.variables["NCCL_DEBUG_FILE"])
    assert recording.variables["NCCL_DEBUG"] == "INFO"
    path.write_text(INFINIBAND)
    assert recording.finish() == nccl_log.read_log(INFINIBAND)
    assert not path.parent.exists()
    # NCCL may have written nothing at all.
    assert nccl_log.Recording().finish() == Transport()


# Of each recorded log: version, network, kinds of channels, and whether GPUDirect RDMA is used.
LOGS = {
    "nccl_efa": ("2.10.3+cuda11.3", "AWS Libfabric", set(), False),
    "nccl_efa_channels": ("", "", {"NET/AWS Libfabric", "P2P"}, True),
    "nccl_infiniband": ("", "", {"NET/IB"}, True),
    "nccl_infiniband_2_4": ("2.4.7+cuda10.0", "", set(), False),
    "nccl_infiniband_p2p": ("", "", {"NET/IB", "P2P"}, False),
    "nccl_libfabric": ("", "Libfabric", set(), False),
    "nccl_no_provider": ("2.28.9+cuda13.0", "", set(), False), "nccl_nvls": ("", "", set(), False),
    "nccl_plugin_nvlink": ("", "", {"NET/IBext_v8", "P2P"}, False),
    "nccl_ring_2_5": ("", "", {"P2P"}, False),
    "nccl_slingshot": ("", "AWS Libfabric", set(), False),
    "nccl_socket_alone": ("", "Socket", set(), False),
    "nccl_sockets": ("", "", {"NET/Socket", "P2P"}, False),
    "nccl_sockets_shm": ("", "", {"NET/Socket", "SHM"}, False),
    "rccl_slingshot_sockets": ("", "", {"NET/Socket", "P2P"}, False),
    "rccl_sockets": ("2.21.5", "Socket", set(), False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_recorded_logs_are_read(name):
    """Excerpts of real logs that people have published; of Slingshot no log with channels."""
    version, network, kinds, direct = LOGS[name]
    found = nccl_log.read_log(read_recorded(name))
    assert (found.version, found.network, found.direct) == (version, network, direct)
    assert found.kinds == kinds


@pytest.mark.parametrize(
    ("name", "node", "status", "words"),
    [
        ("nccl_infiniband_p2p", MLX, "warn", "by NET/IB and P2P: mlx5_0 without GPUDirect"),
        ("nccl_plugin_nvlink", MLX, "warn", "channels by NET/IBext_v8 and P2P: mlx5_0 without"),
        # These nodes had InfiniBand, which is why their owners asked.
        ("nccl_sockets", MLX, "fail", "by TCP sockets, though there is InfiniBand (mlx5_0)"),
        # NCCL 2.4 lists its sockets even where it uses InfiniBand.
        ("nccl_infiniband_2_4", MLX, "skip", "no channels"),
        ("nccl_slingshot", SLINGSHOT_CARDS, "skip", "network AWS Libfabric"),
        (
            "rccl_slingshot_sockets", AMD_CARDS, "fail",
            "there is Slingshot (hsn0), AMD (in its log: “NET/Plugin : No plugin found (librccl",
        ),
        (
            "rccl_sockets", AMD_CARDS, "fail",
            "loading librccl-net.so”, “Failed to open libibverbs.so[.1]”, “Using network Socket”)",
        ),
    ],
)  # fmt: skip
def test_what_is_made_of_recorded_logs(name, node, status, words):
    transport = nccl_log.read_log(read_recorded(name))
    finding = nccl_log.judge_transport(transport, node, 2, True, False)
    assert finding.status == status and words in finding.found


def test_a_plugin_without_a_provider_says_so():
    found = nccl_log.read_log(read_recorded("nccl_no_provider"))
    assert found.evidence == ("NET/OFI No eligible providers were found",)
