#!/usr/bin/env bash
# Train on this machine: make the environment if there is none, then start the ranks.
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
usage: bash jobs/local.sh [RANKS] [trainer options…]

Trains on this machine with RANKS processes (default 2), started by mpirun; without
options: the handwritten digits that come with mpiddp. The exit code is the job's.

    bash jobs/local.sh
    bash jobs/local.sh 4 --epochs 5 --batch-size 16

The first call makes .venv in the checkout and installs what is needed; later calls need no
network. An active environment that has torch and mpi4py is used instead of .venv. Scripts that
mpiddp jobs has written install nothing, and write runs/ where you are.
MPIDDP_MPIRUN=PROGRAM names another mpirun; MPIDDP_PYTHON=PROGRAM names a Python that has all
that is needed, and nothing is installed. Runs are written to runs/ in the
checkout, unless --runs-dir or --config is given.
TEXT
}

has_option() {
    local wanted=$1 argument
    for argument in "${@:2}"; do
        case $argument in "$wanted" | "$wanted"=*) return 0 ;; esac
    done
    return 1
}

ranks=2
case ${1:-} in
-h | --help)
    usage
    choose_environment
    if ! is_prepared; then
        printf '\nThe trainer lists its own options once it is installed.\n'
        exit 0
    fi
    printf '\nTrainer options:\n\n'
    exec "$PYTHON" -m mpiddp.train --help
    ;;
-* | "") ;;
*[!0-9]*)
    say "RANKS must be a whole number, not '$1'; for a script of your own:" \
        "python -m mpiddp -n RANKS SCRIPT"
    exit 2
    ;;
*)
    ranks=$((10#$1))
    shift
    if [ "$ranks" -lt 1 ]; then
        say "RANKS must be 1 or more, not 0"
        exit 2
    fi
    ;;
esac

prepare mpi
if [ "$KIND" = venv ] && [ -z "${MPIDDP_MPIRUN:-}" ] && [ ! -x "$PREFIX/bin/mpirun" ]; then
    die "$PREFIX/bin/mpirun has gone; remove .venv and start again"
fi
# From elsewhere the default directory of runs would be elsewhere, too.
if [ -z "$INSTALLED" ] && [ "$(pwd -P)" != "$ROOT" ] && ! has_option --runs-dir "$@" && ! has_option --config "$@"; then
    set -- --runs-dir "$ROOT/runs" "$@"
fi
exec "$PYTHON" -m mpiddp -n "$ranks" --launcher mpirun train "$@"
