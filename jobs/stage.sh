#!/usr/bin/env bash
# Copy an environment to a local disk of each node of a job, and run a command with it.
# shellcheck source=jobs/slurm.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/slurm.sh"
set -e

usage() {
    cat <<'TEXT'
usage: bash jobs/stage.sh ARCHIVE DIRECTORY COMMAND…

In a job: copies ARCHIVE, a tar file of an environment (tar -czf env.tar.gz -C .venv .), to each
node, along Slurm's tree of nodes, unpacks it below DIRECTORY, runs COMMAND with it, and takes it
away again. The exit code is COMMAND's.

    sbatch --nodes=16 --gpus-per-node=8 \
        --wrap 'bash jobs/stage.sh env.tar.gz /tmp bash jobs/train.sbatch --batch-size 64'

DIRECTORY must be local to each node, such as /tmp. Others may write to it: what is made there has a
name that nobody can guess, is new, and can be read and changed by you alone.
COMMAND finds the environment's programs first in PATH, and MPIDDP_ENV names a file that says so.
A job that is cancelled leaves the copies on all nodes but its first, since it can start no step any
more that would take them away.
TEXT
}

# Its process, once COMMAND is being started.
CHILD=''

# Runs a program as CHILD, to which interrupt hands signals on: while a program runs in the
# foreground, a shell does not answer them. Its exit code is read from a shell that no signal ends,
# since a wait that a signal cuts short may lose it.
run_child() {
    local out said status=''
    exec {out}>&1
    exec {said}< <(
        trap '' TERM INT
        # In the background it would not hear Ctrl-C, nor read.
        (
            trap - TERM INT QUIT
            exec -- "$@" >&"$out" {out}>&-
        ) <&0 &
        echo "$!"
        exec {out}>&-
        if wait "$!"; then echo 0; else echo "$?"; fi
    )
    read -r CHILD <&"$said"
    read -r status <&"$said" || :
    exec {said}<&- {out}>&-
    return "${status:-137}"
}

# Whether Slurm ends the job: it has told every process of it, and starts no more steps.
is_ending() {
    scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null |
        grep "^JobId=$SLURM_JOB_ID " | grep -v ' JobState=RUNNING ' >/dev/null
}

# A signal for this script alone is handed on. If Slurm ends the job, COMMAND has got it already, and
# must not get it twice.
interrupt() {
    [ -n "$CHILD" ] || exit $((128 + $1))
    [ "$1" -eq 2 ] || is_ending || kill -s "$1" "$CHILD" 2>/dev/null || :
}

# On every node at once.
on_each_node() {
    srun --mpi=none --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
        bash -c "set -e; umask 077; $1" stage "$PLACE"
}

# shellcheck disable=SC2016
# What each node does; $1 is the place. Only mkdir without -p refuses what is there already.
MAKE='
parent=$(find -L "${1%/*}" -maxdepth 0 \( -not -perm /022 -o -perm -1000 \) 2>/dev/null)
[ -n "$parent" ] || {
    echo "mpiddp: on $(uname -n), ${1%/*} is no directory, or others can rename what you make there" >&2
    exit 2
}
mkdir -m 700 -- "$1" || {
    echo "mpiddp: on $(uname -n), $1 cannot be made: is ${1%/*} local to each node?" >&2
    exit 2
}'
# shellcheck disable=SC2016
UNPACK='
[ -O "$1" ] && [ ! -L "$1" ] && [ "$(stat -c %a -- "$1")" = 700 ] || {
    echo "mpiddp: on $(uname -n), $1 is not what this job has made" >&2
    exit 2
}
mkdir -- "$1/env"
tar -xf "$1/archive" --no-same-owner -C "$1/env"
rm -- "$1/archive"
printf "export PATH=%q:\$PATH\n" "$1/env/bin" >"$1/env.sh"'
# shellcheck disable=SC2016
REMOVE='[ ! -O "$1" ] || rm -rf -- "$1"'

# In a job that Slurm ends there are no further steps: then this node alone is cleared.
clean_up() {
    trap : TERM INT
    if is_ending || ! on_each_node "$REMOVE"; then rm -rf -- "$PLACE"; fi
}

case ${1:-} in
-h | --help)
    usage
    exit
    ;;
esac
[ $# -ge 3 ] || refuse "expected ARCHIVE DIRECTORY COMMAND…, found $# words (--help shows an example)"
[ -n "${SLURM_JOB_ID:-}" ] || refuse "this runs in a job: see bash jobs/stage.sh --help"
archive=$1
[ -f "$archive" ] && [ -r "$archive" ] || refuse "there is no archive $archive in $PWD"
[[ $2 == /* ]] || refuse "DIRECTORY must be a full path, such as /tmp, not '$2'"
token=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
PLACE=${2%/}/mpiddp-env-$SLURM_JOB_ID-$token
shift 2

trap clean_up EXIT
trap 'interrupt 15' TERM
trap 'interrupt 2' INT
on_each_node "$MAKE"
sbcast -- "$archive" "$PLACE/archive"
on_each_node "$UNPACK"
run_child env MPIDDP_ENV="$PLACE/env.sh" PATH="$PLACE/env/bin:$PATH" "$@"
