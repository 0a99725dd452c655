"""The one table from a logical name to the environment variables that carry it.

Every variable that mpiddp reads or sets is named in this file and nowhere else. Rows marked
*read* come from that launcher's documentation and were not run by mpiddp's tests.

Ranks and sizes have no defaults: a launcher is either recognised by its own variables or it
is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class LauncherVariables:
    """How one launcher tells a process who it is."""

    key: str
    """Short name used in code and tests."""
    name: str
    """Name used in messages."""
    signs: tuple[str, ...]
    """The launcher started this process if any of these is set."""
    rank: str
    size: str | None = None
    local_size: str | None = None
    """How many of the processes are on this host."""


PRRTE_LAUNCHED = "PRTE_LAUNCHED"
SLURM_STEP_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")
SLURM_NODE_NAME = "SLURMD_NODENAME"
"""Slurm's name of the node, in all that it starts there."""
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are the batch script, salloc's shell and the like: nobody's srun."""

# The order matters: an mpirun inside a Slurm allocation starts its daemons as a Slurm step, so
# its processes carry Slurm's step variables beside their own; torchrun is started by either.
LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        key="torchrun",
        name="torchrun",
        signs=("TORCHELASTIC_RUN_ID",),
        rank="RANK",
        size="WORLD_SIZE",
    ),
    LauncherVariables(
        key="openmpi",
        name="Open MPI's mpirun",
        signs=("OMPI_COMM_WORLD_SIZE",),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # read: `prterun` without Open MPI's personality gives the rank alone.
    LauncherVariables(key="prrte", name="PRRTE", signs=(PRRTE_LAUNCHED,), rank="PMIX_RANK"),
    LauncherVariables(
        key="hydra",
        name="Intel MPI's mpiexec (Hydra)",
        signs=("I_MPI_HYDRA_UUID",),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_size="MPI_LOCALNRANKS",
    ),
    # HYDI_CONTROL_FD is MPICH's; older MPICH sets only the MPI_LOCAL… pair (read).
    LauncherVariables(
        key="hydra",
        name="MPICH's mpiexec (Hydra)",
        signs=("HYDI_CONTROL_FD", "MPI_LOCALNRANKS"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_size="MPI_LOCALNRANKS",
    ),
    # read
    LauncherVariables(
        key="flux",
        name="Flux",
        signs=("FLUX_TASK_RANK",),
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
    ),
    # read
    LauncherVariables(
        key="jsm",
        name="IBM JSM (jsrun)",
        signs=("JSM_NAMESPACE_RANK",),
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
    ),
    # SLURM_LOCALID exists, SLURM_LOCAL_ID does not. Step variables, never the job's: the job's
    # node list and task count describe the allocation, not what srun started.
    LauncherVariables(
        key="slurm",
        name="srun",
        signs=SLURM_STEP_IDS,
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
    ),
    # read: HPE PALS, `mpiexec` of Cray systems. Last, for srun (`--mpi=cray_shasta`) and Flux
    # (`-opmi=cray-pals`) set its variables as well, since Cray's MPI reads them.
    LauncherVariables(
        key="pals",
        name="HPE PALS",
        signs=("PALS_RANKID",),
        rank="PALS_RANKID",
        size="PMI_SIZE",
        local_size="PALS_LOCAL_SIZE",
    ),
)


def _list_names(attribute: str, *others: str) -> tuple[str, ...]:
    """The variables that the launchers' rows have, and others."""
    names = (getattr(row, attribute) for row in LAUNCHERS)
    return (*dict.fromkeys(filter(None, names)), *others)


RANK_VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rank": _list_names("rank", "MV2_COMM_WORLD_RANK"),
        "size": _list_names("size", "SLURM_NTASKS", "SLURM_NPROCS", "MV2_COMM_WORLD_SIZE"),
        "local_rank": (
            "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK",
            "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "FLUX_TASK_LOCAL_ID",
            "JSM_NAMESPACE_LOCAL_RANK", "PALS_LOCAL_RANKID",
        ),
        "local_size": _list_names(
            "local_size", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"
        ),
        "node_rank": ("SLURM_NODEID", "PALS_NODEID"),
        "node_count": ("SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    }
)  # fmt: skip
"""The variables in which launchers tell a process its numbers, by the attribute of ``World``.

In a rank, Python code reads MPI's numbers from each of them, whichever launcher started it: if an
mpirun in an allocation did, Slurm's own are those of mpirun's daemons. None of them is a sign of a
Slurm job, as SLURM_JOB_ID is."""

PMI_DESCRIPTOR = "PMI_FD"

# A process manager that no row above describes still leaves one of these.
MANAGER_HINTS = ("PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", PMI_DESCRIPTOR, "PMI_PORT")

PMIX_NAMESPACE = "PMIX_NAMESPACE"
PMIX_HOST = "PMIX_HOSTNAME"
MANAGER_SIGNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"pmix": (PMIX_NAMESPACE, "PMIX_RANK"), "pmi": (PMI_DESCRIPTOR, "PMI_PORT", "PMI_RANK")}
)
SLURM_MANAGER_STEP = {"pmix": PMIX_NAMESPACE, "pmi": "PMI_JOBID"}
"""Which step of Slurm's a process manager serves, as ``slurm.pmix.17.0`` or ``17.0``: srun hands
those of an enclosing step on."""

OF_LAUNCH = frozenset(
    (
        *(name for names in RANK_VARIABLES.values() for name in names),
        *(sign for row in LAUNCHERS for sign in row.signs),
    )
)
OF_LAUNCH_BEGINNINGS = ("PMI_", "PMIX_", "SLURM_")
"""What a launcher has told a process, and would mislead a launcher that this process starts: Open
MPI's would start its ranks by srun if any of Slurm's variables is set, even one of the job."""
SETTINGS_BEGINNINGS = ("PMIX_MCA_", "SLURM_CONF")
"""Among them, what a user or an administrator sets."""

SLURM_TERMINAL = "SLURM_PTY_PORT"
"""Set by ``srun --pty``."""

LAUNCH_IDENTITY = (PMIX_NAMESPACE, "SLURM_JOB_ID", *SLURM_STEP_IDS)
"""What is the same for all processes of a launch, as far as it is set."""

SLURM_JOB_TASKS = "SLURM_NTASKS"
SLURM_TASKS_PER_NODE = "SLURM_TASKS_PER_NODE"
SLURM_MOST_TASKS_PER_NODE = "SLURM_NTASKS_PER_NODE"
SLURM_CPUS_PER_TASK = "SLURM_CPUS_PER_TASK"
SLURM_CPUS_PER_GPU = "SLURM_CPUS_PER_GPU"
SLURM_GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
SLURM_JOB_NODES = "SLURM_JOB_NODELIST"
SLURM_JOB_CORES = "SLURM_JOB_CPUS_PER_NODE"
SLURM_STEP_NODES = "SLURM_STEP_NODELIST"
SRUN_CPUS_PER_TASK = "SRUN_CPUS_PER_TASK"
"""srun takes no count of cores from sbatch since Slurm 22.05, but from here."""
SLURM_CONTRADICTING = (
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_CPUS_PER_GPU",
    "SLURM_TRES_PER_TASK",
)
"""What srun would read beside its options, which say all of that."""
SLURM_HETEROGENEOUS_SIZE = "SLURM_HET_SIZE"
SLURM_HETEROGENEOUS_TASKS = "SLURM_NTASKS_HET_GROUP_"
SLURM_JOB_NAME = "SLURM_JOB_NAME"
SLURM_JOB_ID = "SLURM_JOB_ID"
SLURM_ARRAY_JOB_ID = "SLURM_ARRAY_JOB_ID"
SLURM_ARRAY_TASK_ID = "SLURM_ARRAY_TASK_ID"
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
"""How often Slurm has requeued the job; unset before the first time."""

# Lists of hosts, of schedulers other than Slurm and of settings.
PBS_NODE_FILE = "PBS_NODEFILE"
LSF_HOST_FILE = "LSB_DJOB_HOSTFILE"
LSF_HOSTS = "LSB_MCPU_HOSTS"
GRID_ENGINE_HOST_FILE = "PE_HOSTFILE"
COBALT_NODE_FILE = "COBALT_NODEFILE"
OAR_NODE_FILE = "OAR_NODEFILE"
FLUX_BROKER = "FLUX_URI"
"""In each shell and script of a Flux job (man flux-environment)."""
GRID_ENGINE_TASK = "SGE_TASK_ID"
"""In each job of Grid Engine, also without an array or several hosts."""
OPEN_MPI_HOST_FILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")
HYDRA_HOST_FILES = ("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
HOST_LISTS = (
    PBS_NODE_FILE,
    LSF_HOST_FILE,
    LSF_HOSTS,
    GRID_ENGINE_HOST_FILE,
    COBALT_NODE_FILE,
    OAR_NODE_FILE,
    *OPEN_MPI_HOST_FILES,
    *HYDRA_HOST_FILES,
)
OF_SCHEDULERS = (SLURM_JOB_ID, *HOST_LISTS)
"""Signs of a job that may have several machines."""
OPEN_MPI_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")
"""By which Open MPI reaches a host, in place of ssh: release 5 reads the first, 4 the second."""
HYDRA_AGENT = "HYDRA_LAUNCHER_EXEC"
"""The same of MPICH."""
INTEL_AGENT = "I_MPI_HYDRA_BOOTSTRAP_EXEC"
"""The same of Intel MPI."""
LEADING_TO_PYTHON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""By which Python finds what it imports: a shell on another host may set others."""
OF_MACHINE = frozenset(
    {
        "HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "SHELL", "USER", "LOGNAME", "MAIL", "TERM",
        "DISPLAY", "XAUTHORITY", "LS_COLORS", "TMUX", "TMUX_PANE", "STY", "WINDOWID", "_",
    }
)  # fmt: skip
OF_MACHINE_BEGINNINGS = ("SSH_", "XDG_", "DBUS_", "OMPI_", "PRTE_", *OF_LAUNCH_BEGINNINGS)
"""Variables of one machine, session or launch: those of the ranks on other hosts are other ones."""


def is_of_job(name: str) -> bool:
    """Whether a variable is for all ranks of a job, and not for one machine or session alone."""
    is_name = name.replace("_", "a").isalnum() and name.isascii()
    return is_name and name not in OF_MACHINE and not name.startswith(OF_MACHINE_BEGINNINGS)


# Set for others' scripts: what torchrun gives.
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
ROLE_RANK = "ROLE_RANK"
ROLE_NAME = "ROLE_NAME"
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
TORCHELASTIC_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
TORCHELASTIC_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
TORCHCOMM_RANK = "TORCHCOMM_RANK"
TORCHCOMM_SIZE = "TORCHCOMM_SIZE"
"""torchcomms asks other launchers' variables before RANK, if these are not set (*read*)."""
RESTARTS = (TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS)
TORCHELASTIC_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
OMP_NUM_THREADS = "OMP_NUM_THREADS"

CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    "MIOPEN_USER_DB_PATH": "miopen",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
"""Where compilers keep their results, and what `launch/caches.py` calls the directory."""
CACHE_CHOICES = {"TRITON_CACHE_DIR": ("TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME")}
"""Other variables by which a user has chosen one of them: Triton's is below Inductor's then."""

OPENBLAS_MAIN_FREE = "OPENBLAS_MAIN_FREE"
"""Lets the main thread use all cores. numpy sets it while it is imported."""
NO_BACKTRACES = ("HFI_NO_BACKTRACE", "IPATH_NO_BACKTRACE")
"""Open MPI sets them to 1 in MPI_Init, if they are not set."""
PMIX_SECURITY = "PMIX_MCA_psec"
PMIX_SECURITY_MODE = "PMIX_SECURITY_MODE"
"""The daemon's value for PMIX_SECURITY, which PMIx sets in MPI_Init."""

OUR_RUN_ID_PREFIX = "mpiddp-"
"""Start of the run id that mpiddp gives, so that it is never taken for torchrun."""

# Which interface a library may use.
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
NCCL_RAS_ADDRESS = "NCCL_RAS_ADDR"
"""HOST:PORT at which NCCL tells how the job is (`lifeline/stacks/nccl_status.py`)."""
NCCL_RAS = "NCCL_RAS_ENABLE"
FLIGHT_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The beginning of the files that torch writes if a collective of NCCL times out; one for each
rank. Their newer and their older name."""
NCCL_CONF_FILE = "NCCL_CONF_FILE"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_NET_PLUGIN = "NCCL_NET_PLUGIN"
"""The library by which NCCL uses a fabric that it does not know itself."""
SITE = "MPIDDP_SITE"
"""A site's own file of settings (`launch/fabrics.py`)."""

GLOO_STORE_V2 = "GLOO_ENABLE_STORE_V2_API"
"""Lets Gloo ask the store for all ranks' addresses at once instead of one by one (found in Gloo's
source, gloo/transport/tcp/context.cc)."""

# The collective calls.
DEBUG = "MPIDDP_DEBUG"
"""Whether every call is compared between the ranks before it is made."""
WAIT = "MPIDDP_WAIT"
"""How ranks wait: spin, yield or sleep."""
MESSAGE_BYTES = "MPIDDP_MESSAGE_BYTES"
"""The longest message over MPI; longer ones are sent in parts."""
TUNING = "MPIDDP_TUNING"
"""A tuning table, which says what ``auto`` chooses."""

# What the front (`mpiddp/front/`) tells the ranks that it starts.
HOME = "HOME"
STATE_HOME = "XDG_STATE_HOME"
JOB_DIRECTORY = "MPIDDP_JOB_DIRECTORY"
"""A private directory of the job (`process/job_directory.py`)."""
ATTEMPT_TOKEN = "MPIDDP_ATTEMPT_TOKEN"
"""Identifies one start of the job's ranks: it differs after each restart."""
ASKED_HOSTS = "MPIDDP_ASKED_HOSTS"
"""For the doctor: how many hosts were asked over SSH before, and which of them cannot take part."""
OF_JOB = (JOB_DIRECTORY, ATTEMPT_TOKEN, ASKED_HOSTS, *RESTARTS)
"""What the front tells its own ranks, and is wrong for a job that one of them starts."""

CALLER = "MPIDDP_CALLER"
"""How ranks reach the process that calls functions on them (`remote/`)."""

STANDARD_INPUT = "MPIDDP_STANDARD_INPUT"
"""Where rank 0 finds its standard input (`process/streams/standard_input.py`)."""

EXPORTED = "MPIDDP_EXPORTED"
"""What start-up has set in this environment (`launch/launcher/exported_variables.py`)."""

# What libraries and Python tell of themselves (`launch/debugging.py`).
TORCH_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
KEEP_DETAIL = "MPIDDP_KEEP_DETAIL"
"""Whether TORCH_DISTRIBUTED_DEBUG=DETAIL stays even if DDP would end the process with it."""
FAULT_HANDLER = "PYTHONFAULTHANDLER"
UNBUFFERED = "PYTHONUNBUFFERED"

# What the doctor sets, reads or shows.
NO_COLOR = "NO_COLOR"
SLURM_KILL_BAD_EXIT = "SLURM_KILL_BAD_EXIT"
NCCL_DEBUG = "NCCL_DEBUG"
NCCL_DEBUG_FILE = "NCCL_DEBUG_FILE"
NCCL_DEBUG_SUBSYSTEMS = "NCCL_DEBUG_SUBSYS"
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"
NCCL_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Lets ranks share a GPU, from NCCL 2.30 on."""

# Which transports and interfaces MPI uses; if one of these is set, the user has decided.
OPEN_MPI_PREFIX = "OMPI_MCA_"
"""Before the name of one of Open MPI's parameters."""
OPEN_MPI_TRANSPORTS = "OMPI_MCA_btl"
MPICH_APART = "MPIR_CVAR_NOLOCAL"
"""Ranks of one host share no memory."""
OPEN_MPI_INTERFACES = "OMPI_MCA_btl_tcp_if_include"
OPEN_MPI_INTERFACE_SETTINGS = (OPEN_MPI_INTERFACES, "OMPI_MCA_btl_tcp_if_exclude")
UCX_INTERFACES = "UCX_NET_DEVICES"
OFI_INTERFACES = ("FI_TCP_IFACE", "FI_SOCKETS_IFACE")
"""Of libfabric's providers that use TCP."""

PORT_RANGE = "MPIDDP_PORT_RANGE"
"""LOW-HIGH: the ports that mpiddp may listen on, unless ``--port-range`` says others."""

TEMPORARY_DIRECTORIES = ("TMPDIR", "TEMP", "TMP")
"""Where MPI puts its session directories: the first one that is set."""

# Where programs and libraries are looked for.
PATH = "PATH"
LIBRARY_PATH = "LD_LIBRARY_PATH"

# How ranks are started on one machine.
MPIRUN = "MPIDDP_MPIRUN"
"""The program that starts them."""
PMI = "MPIDDP_PMI"
"""What srun's ``--mpi=`` gets."""
WRAP = "MPIDDP_WRAP"
"""A prefix to each rank, as for a container."""
ENVIRONMENT = "MPIDDP_ENVIRONMENT"
"""Which environment a job script has chosen, in words."""
OPEN_MPI_MESSAGING = "OMPI_MCA_pml"
OPEN_MPI_YIELD = "OMPI_MCA_mpi_yield_when_idle"
OPEN_MPI_4_BINDING = "OMPI_MCA_hwloc_base_binding_policy"
PRRTE_BINDING = "PRTE_MCA_hwloc_default_binding_policy"
UCX_DEBUG_SIGNAL = "UCX_DEBUG_SIGNO"
"""UCX takes SIGHUP by default, so that a job goes on after it."""
UCX_MEMORY_EVENTS = "UCX_MEM_EVENTS"
HYDRA_INTERFACE = "HYDRA_IFACE"
HYDRA = "mpiexec.hydra"
"""The program of that name: Intel MPI's, or MPICH's."""
INTEL_BINDING = "I_MPI_PIN"
INTEL_BOOTSTRAP = "I_MPI_HYDRA_BOOTSTRAP"
"""By what Intel MPI's mpiexec reaches other hosts."""
INTEL_NODE_MAP = "I_MPI_NODEMAP_ALGORITHM"
INTEL_PMI = "I_MPI_PMI_LIBRARY"

# MPI's own behaviour.
MPI4PY_LIBRARY = "MPI4PY_LIBMPI"
MPI4PY_INITIALIZE = "MPI4PY_RC_INITIALIZE"
CRAY_GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
CRAY_SIGNS = ("CRAY_MPICH_VERSION", "CRAY_MPICH_DIR", "PE_MPICH_PKGCONFIG_VARIABLES")
PYTHONINSPECT = "PYTHONINSPECT"
"""Python reads commands from the terminal after the script."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HIP_VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES"
ROCR_VISIBLE_DEVICES = "ROCR_VISIBLE_DEVICES"
ZE_AFFINITY_MASK = "ZE_AFFINITY_MASK"
ZE_HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
"""Whether each tile of one of Intel's cards is a device, or the card."""
CUDA_DEVICE_ORDER = "CUDA_DEVICE_ORDER"
CUBLAS_WORKSPACE_CONFIG = "CUBLAS_WORKSPACE_CONFIG"

HARMLESS = frozenset(
    {
        OMP_NUM_THREADS,
        NCCL_SOCKET_IFNAME,
        GLOO_SOCKET_IFNAME,
        NCCL_RAS_ADDRESS,
        NCCL_DEBUG,
        NCCL_DEBUG_SUBSYSTEMS,
        NCCL_IB_DISABLE,
        NCCL_MULTI_RANK,
        CUDA_VISIBLE_DEVICES,
        HIP_VISIBLE_DEVICES,
        ROCR_VISIBLE_DEVICES,
        ZE_AFFINITY_MASK,
        ZE_HIERARCHY,
        CRAY_GPU_SUPPORT,
        CUDA_DEVICE_ORDER,
        "CUDA_LAUNCH_BLOCKING",
        "FI_PROVIDER",
        "NCCL_ALGO",
        "NCCL_CROSS_NIC",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_PROTO",
        "NCCL_SHM_DISABLE",
        "NCCL_SOCKET_FAMILY",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "OMPI_MCA_btl",
        "OMPI_MCA_pml",
        "UCX_NET_DEVICES",
        "UCX_TLS",
    }
)
"""Variables whose values may be shown; of all others the doctor tells the name alone."""

DIFFERS_BY_NODE = frozenset(
    {
        NCCL_SOCKET_IFNAME,
        GLOO_SOCKET_IFNAME,
        NCCL_RAS_ADDRESS,
        CUDA_VISIBLE_DEVICES,
        HIP_VISIBLE_DEVICES,
        ROCR_VISIBLE_DEVICES,
        ZE_AFFINITY_MASK,
        "UCX_NET_DEVICES",
        "NCCL_IB_HCA",
    }
)
"""Variables that have good reasons to differ between nodes."""

FROM_LAUNCHER = (
    "I_MPI_BIND_WIN_ALLOCATE",
    "I_MPI_HYDRA_TOPOLIB",
    "I_MPI_HYDRA_UUID",
    "I_MPI_INFO_",
    "I_MPI_INTERNAL_MEM_POLICY",
    "I_MPI_PIN_INFO",
    "I_MPI_PIN_MAPPING",
    "I_MPI_RETURN_WIN_MEM_NUMA",
    "MPI4PY_RC_",
    "OMPI_MCA_PREFIXES",
    "OMPI_MCA_cpu_type",
    "OMPI_MCA_ess",
    "OMPI_MCA_initial_wdir",
    "OMPI_MCA_num_procs",
    "OMPI_MCA_orte_",
    "PMIX_MCA_",
    "PRTE_MCA_",
)
"""Beginnings of variables that a launcher, or mpiddp, sets by itself."""


def is_set(names: Iterable[str], variables: Mapping[str, str] = os.environ) -> bool:
    """Whether any of ``names`` has a value that is not empty."""
    return any(variables.get(name) for name in names)


def job_identity(variables: Mapping[str, str] = os.environ) -> str | None:
    """The Slurm job's id as users write it: ARRAY_TASK in an array; None outside of a job."""
    job = variables.get(SLURM_JOB_ID) or None
    array, task = variables.get(SLURM_ARRAY_JOB_ID), variables.get(SLURM_ARRAY_TASK_ID)
    return f"{array}_{task}" if job and array and task else job


def job_name(variables: Mapping[str, str] = os.environ) -> str | None:
    """Name of the Slurm job with its id (array id and task in an array), or None.

    It is the same after a requeue, so a run finds its own directory again.
    """
    identity = job_identity(variables)
    if identity is None:
        return None
    # Slurm lets a job's name hold anything; a directory's name must stay one component.
    name = (variables.get(SLURM_JOB_NAME) or "job").replace("/", "-").lstrip(".")
    return f"{name}-{identity}"


def read_count(name: str) -> int:
    """The count that a variable holds; 0 if it holds none."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def is_restarted() -> bool:
    """Whether this is not the first attempt of its job: Slurm or the front has started it again."""
    return any(map(read_count, (SLURM_RESTART_COUNT, TORCHELASTIC_RESTART_COUNT)))
