#!/usr/bin/env bash
# What sbatch scripts do without MPI: one torchrun per node, the first node's name as the master.
# srun runs this once per node:
#     srun_torchrun.sh default|static PYTHON RANKS_PER_NODE PORT SCRIPT [ARGUMENT…]
set -euo pipefail

form=$1 python=$2 ranks_per_node=$3 port=$4
shift 4

master=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
options=(--nnodes "$SLURM_STEP_NUM_NODES" --nproc-per-node "$ranks_per_node")
if [[ $form == static ]]; then
    # No rendezvous that waits for late nodes, and a quick look at the workers.
    options+=(--node-rank "$SLURM_NODEID" --master-addr "$master" --master-port "$port"
        --monitor-interval 0.01)
else
    options+=(--rdzv-backend c10d --rdzv-endpoint "$master:$port" --rdzv-id "$SLURM_JOB_ID")
fi
exec "$python" -m torch.distributed.run "${options[@]}" "$@"
