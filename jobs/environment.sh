# shellcheck shell=bash
# What jobs/local.sh and tests/run.sh share: which Python environment is used, and what is
# installed into it. To be sourced.
#
#   prepare EXTRA…   sets PREFIX, PYTHON and KIND; installs what is missing
#
# KIND is venv (the checkout's .venv), active (the user's environment), or given (MPIDDP_PYTHON
# names a Python to use as it is; or so does python.txt, where `mpiddp jobs` has written these files,
# without a checkout; or the active one has another mpiddp, which is left alone).
#
# A stamp in the environment says what it was made from. While it is true nothing is
# installed, so no network is needed; it is taken away before an installation begins and
# written when it is complete, so one that was interrupted is done again.

# Open MPI 5 does not start without HOME, and pip keeps its cache below it.
if [ -z "${HOME:-}" ]; then
    HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
    export HOME=${HOME:-/tmp}
fi

JOBS=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
ROOT=${JOBS%/*}
INSTALLED=$(cat -- "$JOBS/python.txt" 2>/dev/null || true)
STAMP_NAME=.mpiddp-stamp

say() { printf 'mpiddp: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

is_root() { [ "$(id -u)" -eq 0 ]; }

is_debian() {
    [ -r "${OS_RELEASE:-/etc/os-release}" ] &&
        grep -Eq '^(ID|ID_LIKE)=.*(debian|ubuntu)' "${OS_RELEASE:-/etc/os-release}"
}

# Debian's packages, as root; false if they cannot be had.
install_packages() {
    is_root && is_debian && command -v apt-get >/dev/null || return 1
    local install=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 "$@")
    local log
    say "installing Debian's $*"
    log=$(DEBIAN_FRONTEND=noninteractive "${install[@]}" 2>&1 </dev/null) ||
        log=$(apt-get update -q 2>&1 </dev/null &&
            DEBIAN_FRONTEND=noninteractive "${install[@]}" 2>&1 </dev/null) ||
        {
            printf '%s\n' "$log" | tail -n 3 >&2
            return 1
        }
}

# ---- which Python -------------------------------------------------------------------------

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# The Python that makes .venv.
find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no Python 3.11 or newer in PATH; install one, as with: apt-get install python3 python3-venv"
}

has_ensurepip() { "$1" -c 'import ensurepip; ensurepip.version()' >/dev/null 2>&1; }

need_ensurepip() {
    has_ensurepip "$1" && return
    local versioned
    versioned="$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    install_packages python3-venv && has_ensurepip "$1" && return
    install_packages "$versioned" && has_ensurepip "$1" && return
    if is_root; then
        die "$1 cannot make virtual environments: it lacks ensurepip; install $versioned"
    fi
    die "$1 cannot make virtual environments; first run: sudo apt-get install python3-venv"
}

# The directory that a Python finds mpiddp in.
find_mpiddp() {
    env -u PYTHONPATH "$1" -P -c 'import importlib.util, os
spec = importlib.util.find_spec("mpiddp")
print(os.path.realpath(f"{spec.origin}/../..") if spec else "")' 2>/dev/null
}

add_checkout() {
    [ -n "$INSTALLED" ] || export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
}

# An active environment is used if it can already do the work; else .venv is.
choose_environment() {
    local active
    PASSED_OVER=()
    if [ -n "${MPIDDP_PYTHON:-}" ]; then
        PYTHON=$(command -v -- "$MPIDDP_PYTHON") || die "MPIDDP_PYTHON=$MPIDDP_PYTHON is no program"
        PREFIX=$("$PYTHON" -c 'import sys; print(sys.prefix)') || die "$PYTHON does not work"
        KIND=given
        add_checkout
        return
    fi
    for active in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
        if [ -z "$active" ] || [ ! -x "$active/bin/python" ]; then
            continue
        fi
        active=$(cd -- "$active" && pwd -P)
        [ "$active" != "$ROOT/.venv" ] || break
        PREFIX=$active PYTHON=$active/bin/python KIND=active
        if is_prepared; then
            return
        elif is_new_enough "$PYTHON" &&
            "$PYTHON" -c "import mpi4py, torch${INSTALLED:+, mpiddp}" 2>/dev/null; then
            leave_alone_others
            return
        fi
        PASSED_OVER+=("$active")
    done
    if [ -n "$INSTALLED" ]; then
        PYTHON=$INSTALLED PREFIX=${INSTALLED%/bin/*} KIND=given
        return
    fi
    PREFIX=$ROOT/.venv PYTHON=$ROOT/.venv/bin/python KIND=venv
}

# An installation into it would redirect whoever uses the mpiddp that it has.
leave_alone_others() {
    local other
    other=$(find_mpiddp "$PYTHON")
    if [ -n "$INSTALLED" ]; then
        KIND=given
    elif [ -n "$other" ] && [ "$other" != "$ROOT" ]; then
        say "$PREFIX has the mpiddp of $other, and stays as it is: this checkout runs in it without" \
            "being installed (for another environment, deactivate this one, or name its Python in" \
            "MPIDDP_PYTHON or, in a job, a file to source in MPIDDP_ENV)"
        KIND=given
        add_checkout
    fi
}

# ---- what is installed --------------------------------------------------------------------

# A digest of all that decides what is installed, without starting Python.
digest() {
    {
        printf '%s\n' "$ROOT" "$PREFIX"
        readlink -f -- "$PYTHON"
        cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" \
            "$ROOT/jobs/environment.sh" "$ROOT/jobs/constraints.py"
    } | sha256sum | cut -d' ' -f1
}

# The stamp holds the digest, then a line "extra NAME" for each extra that is installed and
# a line "file PATH" for each file whose absence means that somebody removed a package.
is_prepared() {
    local stamp=$PREFIX/$STAMP_NAME line extra
    [ "$KIND" != given ] || return 0
    [ -x "$PYTHON" ] && [ -r "$stamp" ] && [ -z "$INSTALLED" ] || return 1
    [ "$(head -n 1 "$stamp")" = "$(digest)" ] || return 1
    for extra; do
        grep -qx "extra $extra" "$stamp" || return 1
    done
    while IFS= read -r line; do
        [ -e "$line" ] || return 1
    done < <(sed -n 's/^file //p' "$stamp")
}

# Of the extras that were asked for, some may have been left out.
write_stamp() {
    local stamp=$PREFIX/$STAMP_NAME
    {
        digest
        [ $# -eq 0 ] || printf 'extra %s\n' "$@"
        "$PYTHON" "$ROOT/jobs/constraints.py" files "$ROOT/setup.cfg" "${EXTRAS[@]}" || exit 1
    } >"$stamp.new"
    mv -f "$stamp.new" "$stamp"
}

make_venv() {
    local base
    if "$PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if is_new_enough "$PYTHON"; then
        need_ensurepip "$PYTHON"
        "$PYTHON" -m ensurepip >/dev/null || die "$PYTHON has no pip, and ensurepip failed"
        return
    fi
    [ "$KIND" = venv ] || die "$PYTHON does not work"
    base=$(find_python) || exit 1
    need_ensurepip "$base"
    say "making .venv with $("$base" --version)"
    # Links to a Python that has gone would be kept.
    rm -f "$PREFIX"/bin/python*
    "$base" -m venv "$PREFIX" || die "$PREFIX could not be made, see above"
}

# pip writes a package's RECORD last: without one the package is incomplete, yet pip would
# take it for installed.
remove_incomplete() {
    local info
    for info in "$PREFIX"/lib/python*/site-packages/*.dist-info; do
        if [ -f "$info/METADATA" ] && [ ! -f "$info/RECORD" ]; then
            rm -rf -- "$info"
        fi
    done
}

# In a log there is a line for each large file.
run_pip() {
    local pip=(env PIP_USER=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
        "$PYTHON" -m pip "$1" --no-input)
    if [ -t 2 ]; then
        "${pip[@]}" "${@:2}" >&2
    else
        "${pip[@]}" --progress-bar off "${@:2}" > >(grep -E '^ *Downloading .* [MG]B' >&2)
    fi
}

# Whether the user has said where packages come from, to pip; uv does not know it.
has_own_index() {
    local settings
    settings=$("$PYTHON" -m pip config list 2>/dev/null)
    [[ $settings =~ index|find-links ]]
}

# PyPI has the build of torch for one release of CUDA alone; torch's own index has the others, and
# uv finds out which fits the machine. A torch or torchvision that is there keeps its build.
install_torch() {
    local constraints=$1 uv=$PREFIX/.mpiddp-uv build
    mapfile -t build < <("$PYTHON" "$ROOT/jobs/constraints.py" "$KIND" "$ROOT/setup.cfg" \
        "$ROOT/constraints.txt" build)
    if [ "${#build[@]}" -eq 0 ] || has_own_index; then
        return
    fi
    say "installing ${build[*]:1}, the build for" \
        "$([ "${build[0]}" = auto ] && printf 'this machine' || printf '%s' "${build[0]}"):" \
        "for CPUs some 0.2 GB, for GPUs 2 to 4 GB"
    if run_pip install --no-deps --target "$uv" uv && UV_HTTP_RETRIES=1 "$uv/bin/uv" pip install \
        --python "$PYTHON" --torch-backend "${UV_TORCH_BACKEND:-${build[0]}}" \
        -c "$constraints" "${build[@]:1}" >&2; then
        rm -rf -- "$uv"
        return
    fi
    rm -rf -- "$uv"
    [ "${build[0]}" = auto ] ||
        die "the build ${build[0]} of torch and torchvision could not be had, see above: install" \
            "both of one build into $PREFIX"
    say "torch's own index could not be used, see above: PyPI's build comes instead, for CUDA (some" \
        "3 GB to download)"
}

# The build needs no download if setuptools is new enough.
has_setuptools() {
    "$PYTHON" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' \
        2>/dev/null
}

install() {
    local extras constraints=$PREFIX/.mpiddp-constraints options=()
    make_venv
    mapfile -t EXTRAS < <("$PYTHON" "$ROOT/jobs/constraints.py" extras "$ROOT/setup.cfg" "$@")
    extras=$(IFS=, && printf '%s' "${EXTRAS[*]}")
    [ "${#EXTRAS[@]}" -eq $# ] || say "torchvision is left out: there is none for the torch of" \
        "$PREFIX, which somebody has built; data sets of images and their models need it"
    rm -f "$PREFIX/$STAMP_NAME"
    [ "$KIND" = active ] || remove_incomplete
    [ "${#PASSED_OVER[@]}" -eq 0 ] ||
        say "not used, for want of Python 3.11, torch or mpi4py: ${PASSED_OVER[*]}"
    say "installing mpiddp${extras:+ [$extras]} and what it needs into $PREFIX;" \
        "where torch has to be downloaded this takes some minutes"
    "$PYTHON" "$ROOT/jobs/constraints.py" "$KIND" "$ROOT/setup.cfg" "$ROOT/constraints.txt" \
        >"$constraints" || die "the versions to install could not be found out, see above"
    install_torch "$constraints"
    ! has_setuptools || options+=(--no-build-isolation)
    (cd -- "$ROOT" && run_pip install "${options[@]}" -c "$constraints" -e ".${extras:+[$extras]}") ||
        die "the installation failed, see above; it is tried again the next time"
    rm -f "$constraints"
    write_stamp "$@"
}

# locked DIRECTORY COMMAND…: run a command that changes a directory, one at a time.
locked() {
    local lock=$1/.mpiddp-lock
    shift
    command -v flock >/dev/null || {
        "$@"
        return
    }
    (
        if ! flock -n 9; then
            say "waiting for another installation into ${lock%/*}"
            flock 9
        fi
        "$@"
    ) 9>>"$lock"
}

install_if_needed() { is_prepared "$@" || install "$@"; }

prepare() {
    choose_environment
    # An active environment has its own MPI, or its machine has one.
    if [ "$KIND" = active ] && [ "${1:-}" = mpi ]; then
        shift
    fi
    # A checkout has the trainer's data sets and models.
    set -- "$@" vision
    ! is_prepared "$@" || return 0
    mkdir -p -- "$PREFIX" 2>/dev/null
    if [ ! -w "$PREFIX" ]; then
        local on_top="; or make one on top of it: $PYTHON -m venv --system-site-packages DIR"
        # Within a virtual environment that one would not see its packages.
        [ ! -e "$PREFIX/pyvenv.cfg" ] || on_top=
        die "$PREFIX is not writable; MPIDDP_PYTHON=$PYTHON uses it as it is$on_top"
    fi
    locked "$PREFIX" install_if_needed "$@" || exit 1
}
