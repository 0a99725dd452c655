"""Fabrics, recognised in made-up trees; what is set, and what is missing."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest

import launchers
from mpiddp.errors import ConfigurationError
from mpiddp.launch import fabrics, summary
from mpiddp.launch.fabrics import find_fabrics, find_site_defaults, read_table
from mpiddp.launch.mpi.world import World
from mpiddp.launch.network.infiniband import find_infiniband, has_peer_memory

TABLE = read_table()
NVIDIA = {"proc/driver/nvidia/gpus/0000:10:00.0/information": ""}
AMD = {"sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 304\n"}
INTEL = {"sys/class/drm/card0/device/vendor": "0x8086\n"}
SLINGSHOT = {
    "sys/class/cxi/cxi1/device/properties/rdzv_get_en": "1\n",
    "sys/class/cxi/cxi0/device/properties/rdzv_get_en": "1\n",
    "sys/class/net/hsn0/mtu": "9000\n",
}
ALT_READ = {path: text.replace("1", "0") for path, text in SLINGSHOT.items()}
PLUGIN = {"opt/plugin/lib/libnccl-net.so": "", "opt/rccl/librccl-net.so": ""}
PATH = {"LD_LIBRARY_PATH": ":/nowhere:/opt/plugin/lib:relative"}


def verbs(name, state="4: ACTIVE", layer="InfiniBand", driver="mlx5_core"):
    """A card as the kernel shows it (Documentation/ABI/stable/sysfs-class-infiniband)."""
    port = f"sys/class/infiniband/{name}/ports/1"
    return {
        f"{port}/state": f"{state}\n",
        f"{port}/link_layer": f"{layer}\n",
        f"sys/class/infiniband/{name}/device/driver": f"-> sys/bus/pci/drivers/{driver}",
    }


@pytest.fixture
def grow(tmp_path):
    """Makes files below a root; a text that begins with an arrow is a link."""

    def write(*trees):
        for path, text in {name: text for tree in trees for name, text in tree.items()}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                target = tmp_path / text.removeprefix("-> ")
                target.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).symlink_to(target)
            else:
                (tmp_path / path).write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("trees", "fabric", "devices", "vendors"),
    [
        # A name that only begins like Slingshot's.
        (({"sys/class/net/hsr/mtu": ""},), None, (), ()),
        ((SLINGSHOT, NVIDIA), "Slingshot", ("cxi0", "cxi1"), ("NVIDIA",)),
        (({"sys/class/net/hsi0/mtu": ""}, AMD), "Slingshot", ("hsi0",), ("AMD",)),
        # The first Slingshot, whose cards NCCL uses itself.
        (
            ({"sys/class/net/hsn0/mtu": ""}, verbs("mlx5_0", layer="Ethernet")),
            "RoCE", ("mlx5_0",), (),
        ),
        ((verbs("mlx5_1"), verbs("mlx5_0")), "InfiniBand", ("mlx5_0", "mlx5_1"), ()),
        ((verbs("mlx5_0", "1: DOWN"),), None, (), ()),
        ((verbs("bnxt_re0", layer="Ethernet", driver="bnxt_en"),), "RoCE", ("bnxt_re0",), ()),
        # What AWS's card says of its link.
        ((verbs("rdmap0s6", layer="Unspecified", driver="efa"),), "EFA", ("rdmap0s6",), ()),
        # It calls itself InfiniBand, and is another fabric.
        ((verbs("hfi1_0", driver="hfi1"),), "Omni-Path", ("hfi1_0",), ()),
        # A screen's card of another maker.
        (({"sys/class/drm/card0/device/vendor": "0x1a03"},), None, (), ()),
    ],
)  # fmt: skip
def test_what_a_node_has(trees, fabric, devices, vendors, grow):
    node = find_fabrics(TABLE, {}, grow(*trees))
    assert node.fabrics == ({fabric: devices} if fabric else {})
    assert node.vendors == vendors


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (PATH, "/opt/plugin/lib/libnccl-net.so"),
        ({}, None),
        ({"NCCL_NET_PLUGIN": "/opt/rccl/librccl-net.so"}, "/opt/rccl/librccl-net.so"),
        ({"NCCL_NET_PLUGIN": "/opt/rccl/none.so", **PATH}, None),
        # NCCL then looks for libnccl-net-ofi.so alone.
        ({"NCCL_NET_PLUGIN": "ofi", **PATH}, None),
    ],
)
def test_where_a_plugin_is(variables, found, grow):
    root = grow(SLINGSHOT, NVIDIA, PLUGIN)
    library = find_fabrics(TABLE, variables, root).library
    assert (str(library) if library else None) == found
    (root / "etc").mkdir()
    (root / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0/opt/x/libnccl-net.so\0")
    if not variables:
        assert str(find_fabrics(TABLE, variables, root).library) == "libnccl-net.so"


def test_slingshot_gets_what_nobody_has_set(grow):
    root = grow(SLINGSHOT, NVIDIA, PLUGIN, {"nccl.conf": "NCCL_PROTO = Simple\n"})
    own = {**PATH, "NCCL_CROSS_NIC": "0", "FI_MR_CACHE_MONITOR": "kdreg2"}
    assert find_site_defaults("", own, root) is None
    assert find_site_defaults("none", own | {"MPIDDP_SITE": "/none"}, root) is None
    defaults = find_site_defaults("table", own, root)
    assert defaults.everywhere == {
        "FI_CXI_DISABLE_HOST_REGISTER": "1", "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_RX_MATCH_MODE": "hybrid", "FI_CXI_RDZV_EAGER_SIZE": "0",
        "FI_CXI_RDZV_THRESHOLD": "0", "FI_CXI_RDZV_GET_MIN": "0", "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_PROTO": "^LL128",
    }  # fmt: skip
    # On one node some sites' networks are not set up, and NCCL would stop.
    assert defaults.between_nodes == {"NCCL_NET": "AWS Libfabric"}
    assert "NCCL_NET=" not in defaults.describe(has_nodes=False)
    assert 'NCCL_NET="AWS Libfabric"' in defaults.describe(has_nodes=True)
    # Without the plugin NCCL would stop as well; its own file is somebody's word.
    variables = {"NCCL_CONF_FILE": str(root / "nccl.conf")}
    defaults = find_site_defaults("table", variables, root)
    assert not defaults.between_nodes and "NCCL_PROTO" not in defaults.everywhere


@pytest.mark.parametrize(
    ("trees", "variables", "chosen"),
    [
        ((ALT_READ, NVIDIA), {}, {"FI_CXI_RDZV_PROTO": "alt_read"}),
        ((SLINGSHOT, NVIDIA), {}, {"FI_CXI_RDZV_PROTO": None, "HSA_FORCE_FINE_GRAIN_PCIE": None}),
        (
            (SLINGSHOT, AMD, PLUGIN),
            {"LD_LIBRARY_PATH": "/opt/rccl"},
            {"HSA_FORCE_FINE_GRAIN_PCIE": "1", "NCCL_NET_PLUGIN": "/opt/rccl/librccl-net.so"},
        ),
        # LL128 is slow there as NCCL has it, not RCCL.
        ((SLINGSHOT, AMD), {}, {"NCCL_PROTO": None, "FI_CXI_DEFAULT_CQ_SIZE": "131072"}),
        ((SLINGSHOT, INTEL), {}, {"CCL_ATL_TRANSPORT": "mpi", "CCL_PROCESS_LAUNCHER": None}),
        ((SLINGSHOT, INTEL), {"PMIX_NAMESPACE": "j"}, {"CCL_PROCESS_LAUNCHER": "pmix"}),
        # No accelerator: what MPI does by itself is left alone.
        ((SLINGSHOT,), {}, {"FI_MR_CACHE_MONITOR": None, "NCCL_CROSS_NIC": None}),
        ((NVIDIA,), {"CRAY_MPICH_VERSION": "9"}, {"MPICH_GPU_SUPPORT_ENABLED": "0"}),
        ((NVIDIA,), {}, {"MPICH_GPU_SUPPORT_ENABLED": None}),
        ((), {"PMIX_SECURITY_MODE": "munge,native"}, {"PMIX_MCA_psec": "native"}),
        ((), {"PMIX_SECURITY_MODE": "native"}, {"PMIX_MCA_psec": None}),
        (
            ({"run/munge/munge.socket.2": ""},),
            {"PMIX_SECURITY_MODE": "munge,native"},
            {"PMIX_MCA_psec": None},
        ),
    ],
)
def test_when_a_variable_is_set(trees, variables, chosen, grow):
    found = find_site_defaults("table", variables, grow(*trees))
    every = {**found.everywhere, **found.between_nodes}
    assert {name: every.get(name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("trees", "variables", "words"),
    [
        ((SLINGSHOT, NVIDIA), {}, ["libnccl-net.so is nowhere in LD_LIBRARY_PATH", "aws-ofi-nccl"]),
        ((SLINGSHOT, AMD), {}, ["librccl-net.so is nowhere", "rccl-net-plugin"]),
        ((SLINGSHOT, NVIDIA), {}, ["not set: FI_CXI_DISABLE_HOST_REGISTER=1", "--site-defaults"]),
        ((SLINGSHOT, NVIDIA, PLUGIN), PATH, ['NCCL_NET="AWS Libfabric"']),
        (
            (SLINGSHOT, NVIDIA),
            {"SLURM_JOB_ID": "7"},
            ["SLURM_NETWORK=disable_rdzv_get is not set", "export SLURM_NETWORK=disable_rdzv_get"],
        ),
        (
            (SLINGSHOT, NVIDIA),
            {"FI_MR_CACHE_MONITOR": "memhooks"},
            ["FI_MR_CACHE_MONITOR=memhooks: ", "set FI_MR_CACHE_MONITOR=userfaultfd"],
        ),
        ((SLINGSHOT,), {"FI_PROVIDER": "tcp;ofi_rxm"}, ["go over TCP", "unset FI_PROVIDER"]),
        ((verbs("mlx5_0"),), {"NCCL_NET": "Socket"}, ["NCCL_NET=Socket", "unset NCCL_NET"]),
        ((verbs("m0"),), {"NCCL_IB_DISABLE": "1"}, ["leaves the cards", "unset NCCL_IB_DISABLE"]),
        (
            (NVIDIA,),
            {"CRAY_MPICH_VERSION": "9", "MPICH_GPU_SUPPORT_ENABLED": "1"},
            ["wait for each other for ever", "set MPICH_GPU_SUPPORT_ENABLED=0"],
        ),
        ((verbs("r0", driver="efa"),), {"RDMAV_FORK_SAFE": "1"}, ["unset RDMAV_FORK_SAFE"]),
        ((verbs("mlx5_0"), NVIDIA), {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, []),
        ((NVIDIA,), {"NCCL_IB_DISABLE": "1"}, []),
        # The card knows alt_read already.
        ((ALT_READ,), {"SLURM_JOB_ID": "7"}, []),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong(trees, variables, words, grow):
    problems = list(fabrics.find_problems(find_fabrics(TABLE, variables, grow(*trees)), variables))
    text = "\n".join(f"{each.found} | {each.advice}" for each in problems)
    assert all(word in text for word in words) and bool(problems) == bool(words), text


@pytest.mark.parametrize(
    ("backend", "nodes", "local_rank", "says"),
    [("nccl", 2, 0, True), ("nccl", 2, 1, False), ("nccl", 1, 0, False), ("gloo", 2, 0, False)],
)
def test_a_nodes_first_rank_notes_what_nccl_lacks_between_nodes(
    backend, nodes, local_rank, says, grow
):
    start_up = SimpleNamespace(site_defaults=find_site_defaults("table", {}, grow(SLINGSHOT, AMD)))
    world = World(local_rank, 2 * nodes, local_rank, 2, 0, nodes, "node1", "node1")
    problems = summary._find_problems(start_up, world, backend)
    assert ["librccl-net.so is nowhere" in each for each in problems] == [True] * says


@pytest.mark.parametrize(
    ("version", "machine", "is_bad"),
    [
        ("2.29.2+cuda13.0", "x86_64", True), ("2.29.3", "aarch64", False),
        ("2.28.9", "aarch64", True), ("2.28.9", "x86_64", False), ("2.9.9", "x86_64", False),
    ],
)  # fmt: skip
def test_bad_versions(version, machine, is_bad):
    rows = [row for row in TABLE.versions if row.library == "NCCL"]
    assert any(row.includes(version, machine) for row in rows) is is_bad


# InfiniBand devices, by the state of their ports


@pytest.mark.parametrize(
    ("states", "works"),
    [
        (("1: DOWN", "4: ACTIVE"), True),
        (("5: ACTIVE_DEFER",), True),
        (("4: ACTIVE", "4: ACTIVE"), True),
        # Plugged in, but no subnet manager has given it an address yet.
        (("1: DOWN", "3: ARMED"), False),
        (("2: INIT",), False),
        ((), False),
    ],
)
def test_a_device_needs_an_active_port(states, works, tmp_path):
    for number, state in enumerate(states, 1):
        port = tmp_path / f"mlx5_7/ports/{number}"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    assert find_infiniband(tmp_path) == (("mlx5_7",) if works else ())
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
def test_the_module_that_reads_gpu_memory(path, has, grow):
    assert has_peer_memory(grow({path: "580.65\n"})) is has


# Files


def test_a_sites_file_stands_before_the_table(grow):
    root = grow(SLINGSHOT, NVIDIA)
    file = root / "site.toml"
    file.write_text(
        '[[settings]]\nvariable = "NCCL_CROSS_NIC"\nvalue = "0"\nfabrics = ["Slingshot"]\n'
        '[[settings]]\nvariable = "OURS"\nvalue = "1"\nfabrics = ["Own"]\n'
        '[[fabrics]]\nname = "Own"\ndevices = ["sys/class/net/hsn*"]\n'
    )
    for option, variables in (("", {"MPIDDP_SITE": str(file)}), (str(file), {})):
        defaults = find_site_defaults(option, variables, root)
        assert defaults.everywhere["NCCL_CROSS_NIC"] == "0"
        assert defaults.everywhere["OURS"] == "1"
        assert defaults.everywhere["FI_CXI_DEFAULT_CQ_SIZE"] == "131072"
        assert f"Own (hsn0), Slingshot (cxi0, cxi1), NVIDIA, {file}: " in defaults.describe(
            has_nodes=True
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("a = ", "not valid TOML"),
        ("[settings]\na = 1", r"settings: expected rows, each below \[\[settings\]\]"),
        ("[[setings]]\na = 1", r"unknown key 'setings' \(did you mean settings\?\)"),
        ("[[settings]]\nvalue = '1'", r"settings\[0\]: lacks variable"),
        ("[[settings]]\nvariable = 'A'\nwrong = 'x'", r"settings\[0\].wrong: expected a list"),
        ("[[settings]]\nvariable = 'A'\nfabrics = [1]", r"fabrics\[0\]: expected a string"),
        ("[[settings]]\nvariable = 'A'\nfabrics = ['Slingshott']", "'Slingshott' is not known"),
        ("[[plugins]]\nvendors = []\nfabrics = []\nfiles = []\nsources = ''", "mean source"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line(text, words, tmp_path):
    file = tmp_path / "site.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_table(str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_every_row_of_the_table_says_why_and_who():
    for row in (*TABLE.settings, *TABLE.versions, *TABLE.plugins):
        assert re.fullmatch(r"https://\S+, \d{4}-\d\d-\d\d", row.source), row
    for row in (*TABLE.settings, *TABLE.versions):
        assert row.why and "\n" not in row.why
    # Of two rows only the first that fits would count.
    own = Counter((row.variable, each) for row in TABLE.settings for each in row.fabrics)
    assert max(own.values()) == 1


def test_every_row_is_in_the_chapter():
    chapter = (launchers.ROOT / "docs" / "centres.md").read_text(encoding="utf-8")
    for row in TABLE.settings:
        assert f"`{row.variable}" in chapter, row.variable
        assert row.source.partition(",")[0] in chapter, row.source
    for row in TABLE.versions:
        assert row.before in chapter and row.source.partition(",")[0] in chapter


# Launches

SCRIPT = """
import os
print("rank", os.environ["RANK"], os.environ.get("OURS"), os.environ.get("THEIRS"), flush=True)
"""
SITE = """
[[settings]]
variable = "OURS"
value = "site"
[[settings]]
variable = "THEIRS"
value = "site"
[[settings]]
variable = "OMPI_MCA_mpi_show_mca_params"
value = "enviro"
[[settings]]
variable = "BETWEEN"
value = "1"
needs_nodes = true
"""


@pytest.mark.mpi
def test_ranks_get_a_sites_settings_before_mpi_starts(tmp_path):
    file, script = tmp_path / "site.toml", tmp_path / "script.py"
    file.write_text(SITE)
    script.write_text(SCRIPT)
    words = ("-m", "mpiddp", "-n", 2, f"--site-defaults={file}", script)
    result = launchers.run_python(*words, env={"THEIRS": "mine"}).expect(0)
    for rank in range(2):
        assert f"rank {rank} site mine\n" in result.stdout
    # What Open MPI says in MPI_Init of the variables that it has read.
    assert "mpi_show_mca_params=enviro (environment)" in result.output
    lines = result.output.splitlines()
    (line,) = [line for line in lines if line.startswith("  site defaults")]
    assert f"{file}: OURS=site OMPI_MCA_mpi_show_mca_params=enviro" in line
    assert "THEIRS" not in line and "BETWEEN" not in line
