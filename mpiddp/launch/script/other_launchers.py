"""Options of other launchers, and what to type for them in ``python -m mpiddp``.

The tables of docs/launching.md have the same rows; they are read only for an error message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TORCHRUN = {
    "`--nproc-per-node N`, `gpu`, `auto`": (
        "`-n N` or `-n auto`, or in a Slurm job `--ranks-per-node N`"
    ),
    "`--nnodes N`, `--nnodes MIN:MAX`": (
        "`--nodes N`, in a Slurm job only, and `--min-nodes MIN` beside `--restarts`"
    ),
    "`-m`, `--module`": "`-m MODULE`",
    "`--max-restarts N`": "`--restarts N`",
    "`--standalone`, `--rdzv-backend`, `--rdzv-endpoint`, `--rdzv-id`, `--rdzv-conf`, "
    "`--node-rank`, `--master-addr`, `--master-port`": (
        "nothing: MPI knows the ranks, and the address is found"
    ),
    "`--local-addr`": "`--interface NAME`",
    "`--log-dir DIR`, `--redirects`, `--tee`": "`--log-dir DIR`",
    "`--local-ranks-filter LIST`": "`--console LIST`",
    "`--numa-binding`": "`--bind numa` or `--bind cores`",
    "`--signals-to-handle`": "nothing: signals reach the ranks",
    "`--shutdown-timeout`": "nothing: in a Slurm job the time is Slurm's `KillWait`",
    "`--monitor-interval`, `--start-method`": (
        "nothing: a rank that ends is noticed at once, and each rank is a process"
    ),
    "`--run-path`": "nothing: a script runs as by `python SCRIPT`",
    "`--no-python`": "nothing: start the program with mpirun or srun",
    "`--virtual-local-rank`": (
        "nothing: each rank sees all GPUs of its node, and `LOCAL_RANK` counts them"
    ),
    "`--role`, `--event-log-handler`, `--logs-specs`, `--duplicate-stdout-filters`, "
    "`--duplicate-stderr-filters`": "nothing: there is no counterpart",
}
ACCELERATE = {
    "`--num_processes N`": "`-n N`, the number on all machines together",
    "`--num_machines N`": "`--nodes N`, in a Slurm job only",
    "`--multi_gpu`, `--machine_rank`, `--main_process_ip`, `--main_process_port`, "
    "`--same_network`, `--rdzv_backend`": "nothing",
    "`--gpu_ids LIST`": "`--devices LIST`",
    "`--num_cpu_threads_per_process N`": "`OMP_NUM_THREADS=N` before the command",
    "`--mixed_precision TYPE`": (
        "`ACCELERATE_MIXED_PRECISION=TYPE` before the command, or `Accelerator(mixed_precision=…)`"
    ),
    "`--max_restarts N`, `--log_dir DIR`, `--tee`": "as for torchrun",
    "`-m`, `--module`": "`-m MODULE`",
}
SRUN = {
    "`--nodes N`, `-N N`": "`--nodes N`",
    "`--ntasks N`": "`-n N`",
    "`--ntasks-per-node N`": "`--ranks-per-node N`",
    "`--gpus`, `-G`, `--gpus-per-node`, `--cpus-per-task`, `-c`, `--cpus-per-gpu`, `--mem`, "
    "`--time`, `-t`, `--partition`, `-p`, `--account`, `-A`, `--nodelist`, `-w`, `--exclude`, "
    "`-x`, `--job-name`, `-J`": "nothing: give it to sbatch or salloc",
    "`--mpi TYPE`": "nothing, or type `MPIDDP_PMI=TYPE` before the command",
    "`--kill-on-bad-exit`, `-K`, `--export`": "nothing: both are on",
    "`--output FILE`, `-o`, `--error FILE`, `-e`": (
        "`--job-log DIR` for all ranks together, or `--log-dir DIR` for each"
    ),
    "`--label`, `-l`": "`--label`",
    "`--cpu-bind`": "`--bind cores`, `--bind numa` or `--bind none`",
    "any other": '`--launcher-options "…"`',
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "torchrun": TORCHRUN,
    "accelerate launch": ACCELERATE,
    "srun": SRUN,
}
"""By the name of the launcher; each row in Markdown: its options, and what to type."""


def explain(option: str) -> str | None:
    """What to do instead of ``option``, if another launcher has it.

    torchrun and accelerate take ``_`` for ``-``; a number may follow a short option at once, as in
    ``-N2``.
    """
    name = option.replace("_", "-").rstrip("0123456789:")
    for launcher, rows in TABLES.items():
        for options, text in rows.items():
            if name in re.findall(r"--?[A-Za-z][a-z-]*", options.replace("_", "-")):
                plain = f"type {text}".replace("`", "").replace("type nothing", "leave it out")
                return f"{option} is an option of {launcher}; for mpiddp, {plain}"
    return None
