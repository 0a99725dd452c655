#!/usr/bin/env bash
# Starts a rank's program; that of rank 0 under strace, with the name of the trace as its last word.
# Without -D strace would stand between the rank and its launcher, by which mpiddp knows who started it.
set -euo pipefail

rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-${SLURM_PROCID:-}}}}
if [[ $rank != 0 ]]; then
    exec "$@"
fi
trace=$(mktemp)
calls=access,faccessat,execve,accept,accept4,connect,sendto,sendmsg,sendmmsg,recvfrom,recvmsg,recvmmsg
exec strace -D -f -qq -ttt -yy -s 0 --seccomp-bpf --signal=none \
    --trace "$calls,read,write,readv,writev" --output "$trace" "$@" "$trace"
