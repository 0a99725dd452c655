"""The files that Slurm reads, and the host names that the nodes know."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from slurm import SLURMD_PORT
from state import ClusterError, Machine, Shape, directory, local_directory, machine_directory

# What each line is for stands beside it if it is not Slurm's usual setting.
SLURM = """\
ClusterName=mpiddp
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued waits until the credentials of its last start have expired. On a machine
# with little time for the nodes a launch may take more than 5 s.
AuthInfo=socket={local}/munge.socket,cred_expire=15
CryptoType=crypto/munge
StateSaveLocation={state}/slurmctld
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdSpoolDir={local}/spool
SlurmdPidFile={local}/slurmd.pid
SlurmdPort={port}
SlurmdLogFile={local}/slurmd.log
# Not cgroups: they would belong to the machine, not to a node.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=pmix
SwitchType=switch/none
# Nodes may claim more cores than there are.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
# A job in the partition ``urgent`` may take nodes from one in ``main``, which is requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
SlurmdTimeout=20
MessageTimeout=10
{ip}{gres}NodeName=node[1-{shape.nodes}] NodeAddr={addresses} \
CPUs={shape.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={shape.cpus} ThreadsPerCore=1 \
RealMemory={memory} TmpDisk=1000{node_gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""

SLURM_IP = {
    "4": "",
    "dual": "CommunicationParameters=EnableIPv6\n",
    "6": "CommunicationParameters=EnableIPv6,DisableIPv4\n",
}

PROLOG_NAME = "rename_gpus.sh"
PROLOG = """\
[ -n "$CUDA_VISIBLE_DEVICES" ] || exit 0
case $SLURMD_NODENAME in
{rows} ;;
esac
names=
for index in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
    eval "names=\\$names,\\${{$((index + 1))}}"
done
echo "export CUDA_VISIBLE_DEVICES=${{names#,}}"
echo "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
"""
"""Slurm runs it before each task, and sets what it exports."""


def write(shape: Shape, version: tuple[int, int]) -> None:
    """Write all files of a new cluster."""
    state = directory()
    files = {
        "slurm.conf": SLURM.format(
            shape=shape,
            controller=shape.controller,
            state=state,
            local=local_directory(),
            memory=_memory(),
            port=SLURMD_PORT,
            addresses=shape.find_addresses(f"[1-{shape.nodes}]")[0],
            ip=SLURM_IP[shape.ip],
            gres="GresTypes=gpu\n" if shape.gpus else "",
            node_gres=f" Gres=gpu:{shape.gpus}" if shape.gpus else "",
        ),
        "mpi.conf": f"PMIxCliTmpDirBase={local_directory()}/pmix\n",
        # Look-ups of unknown names fail at once instead of waiting for a server.
        "resolv.conf": "# no name server\n",
    }
    if shape.devices:
        files["gres.conf"] = describe_gpus(shape)
        files["slurm.conf"] += f"TaskProlog={state}/{PROLOG_NAME}\n"
        files[PROLOG_NAME] = write_prolog(shape)
    elif shape.gpus:
        _make_devices(state / "gpus", shape.gpus)
        files["gres.conf"] = f"Name=gpu File={state}/gpus/nvidia[0-{shape.gpus - 1}]\n"
    if version >= (22, 5):
        # Named, v1 does without any cgroups; chosen by slurmd itself, v2 would ask systemd.
        plugin = "disabled" if version >= (24, 5) else "cgroup/v1"
        files["cgroup.conf"] = f"CgroupPlugin={plugin}\n"
    for name, text in files.items():
        (state / name).write_text(text)
    if shape.devices:
        (state / PROLOG_NAME).chmod(0o755)


def find_gpus(folder: Path) -> tuple[str, ...]:
    """The device files of this machine's GPUs, in order. Raises ClusterError if there is none."""
    found = [path for path in folder.glob("nvidia*") if _find_number(path).isdecimal()]
    if not found:
        raise ClusterError(f"--gpus real: this machine has no GPU ({folder}/nvidia0)")
    return tuple(map(str, sorted(found, key=lambda path: int(_find_number(path)))))


def describe_gpus(shape: Shape) -> str:
    """The lines of ``gres.conf`` that give each node its part of this machine's GPUs."""
    return "".join(
        f"NodeName={machine.name} Name=gpu File={file}\n"
        for number, machine in enumerate(shape.machines)
        for file in shape.find_gpus(number)
    )


def write_prolog(shape: Shape) -> str:
    """A script that renames a task's GPUs: Slurm counts those of its node, CUDA the machine's."""
    rows = [
        f"{machine.name}) set -- {' '.join(_find_number(file) for file in shape.find_gpus(number))}"
        for number, machine in enumerate(shape.machines)
    ]
    return "#!/bin/sh\n" + PROLOG.format(rows=" ;;\n".join(rows))


def _find_number(path: str | Path) -> str:
    return Path(path).name.removeprefix("nvidia")


def _make_devices(folder: Path, count: int) -> None:
    """Device files, since Slurm believes in no GPU without one. They are twins of /dev/null.

    Slurm sets CUDA_VISIBLE_DEVICES by them, as on a real node.
    """
    folder.mkdir(exist_ok=True)
    for number in range(count):
        path = folder / f"nvidia{number}"
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)


def write_hosts(shape: Shape, machine: Machine) -> None:
    """The ``/etc/hosts`` of one machine.

    Every IPv4 address is there in the form ``::ffff:…`` too, in which torch looks its peers up.
    """
    known = [(m.addresses, m.name) for m in (*shape.machines, shape.controller)]
    known.append((shape.host_addresses, socket.gethostname()))
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for addresses, name in known:
        mapped = [f"::ffff:{address}" for address in addresses if ":" not in address]
        lines += [f"{address} {name}" for address in (*addresses, *mapped)]
    (machine_directory(machine) / "hosts").write_text("\n".join(lines) + "\n")


def _memory() -> int:
    """Of the whole machine, in MiB: nodes share it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
