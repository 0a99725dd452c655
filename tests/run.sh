#!/usr/bin/env bash
# Lint, types and tests: bash tests/run.sh [pytest options…]
# All three always run; the exit code says whether all were good, pytest's summary is last.
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../jobs/environment.sh"

MPICH=$ROOT/.mpich

# MPICH's wheel has files of the same names as Open MPI's, hence a prefix of its own.
is_mpich_prepared() { [ "$(cat "$MPICH/$STAMP_NAME" 2>/dev/null)" = "$(mpich_stamp)" ]; }
mpich_stamp() { printf '%s %s' "$(uname -m)" "$(grep '^mpich==' "$ROOT/constraints.txt")"; }

install_mpich() {
    ! is_mpich_prepared || return 0
    say "installing the MPICH wheel into .mpich for the tests"
    rm -rf -- "${MPICH:?}"/*
    run_pip install --no-deps --ignore-installed --no-warn-script-location \
        --prefix "$MPICH" -c "$ROOT/constraints.txt" mpich || return 1
    mpich_stamp >"$MPICH/$STAMP_NAME"
}

# Debian's Open MPI 4 is tested where it is; root fetches it, once.
install_openmpi4() {
    local tried=$MPICH/.openmpi4-tried
    if command -v mpirun.openmpi >/dev/null || [ -e "$tried" ] || ! is_root || ! is_debian; then
        return
    fi
    install_packages openmpi-bin || say "there is no Debian Open MPI 4: its tests are left out"
    : >"$tried"
}

install_mpis() { install_mpich && install_openmpi4; }

# Whatever says that it is for a shell.
shell_scripts() { grep -rIlE '^(#!.*sh$|# shellcheck shell=)' jobs tests .ci | sort; }

declare -a failed=()
check() {
    local name=$1
    shift
    "$@" || failed+=("$name")
}

prepare mpi plot tensorboard test
mkdir -p -- "$MPICH"
locked "$MPICH" install_mpis || die "the MPICH wheel could not be installed, see above"
cd -- "$ROOT" || exit 1

# Sockets are made below TMPDIR and their paths must be short, so it cannot be in the checkout.
TMPDIR=$(mktemp -d /tmp/mpiddp-XXXXXX) || exit 1
export TMPDIR PATH=$PREFIX/bin:$PATH
trap 'rm -rf -- "$TMPDIR"' EXIT

check "ruff check" "$PYTHON" -m ruff check --quiet .
check "ruff format" "$PYTHON" -m ruff format --check --quiet .
mapfile -t scripts < <(shell_scripts)
check shellcheck shellcheck "${scripts[@]}"
check mypy "$PYTHON" -m mypy --no-error-summary

report="lint and types are good"
[ ${#failed[@]} -eq 0 ] || report="FAILED: $(printf '%s; ' "${failed[@]}")see above"
say "$report"
MPIDDP_CHECKS=$report "$PYTHON" -m pytest "$@"
status=$?
[ ${#failed[@]} -eq 0 ] || [ "$status" -ne 0 ] || status=1
exit "$status"
