# shellcheck shell=bash
# What the job scripts share: which environment is used in a job. To be sourced by them.
#
#   start MODULE OPTION…  becomes the front, python -m mpiddp OPTION…, in the environment chosen,
#                         in which MODULE can be imported
#
# MPIDDP_ENV    a file to source, instead of choosing an environment
# MPIDDP_WRAP   a prefix to each rank, as: apptainer exec --nv image.sif
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# A job that was submitted from within an array's task has inherited that one's variables.
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] &&
    timeout 10 scontrol show job "$SLURM_JOB_ID" 2>/dev/null |
    grep "^JobId=$SLURM_JOB_ID JobName=" >/dev/null; then
    unset "${!SLURM_ARRAY_@}"
fi

# As users write it: ARRAY_TASK where there is an array. chain.sh is no job.
JOB=${SLURM_JOB_ID:-}
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# The user's mistakes have exit code 2, as everywhere in mpiddp.
refuse() {
    say "$@"
    exit 2
}

# What environment.sh cannot do is the user's to mend, too: in a job nothing is installed.
die() { refuse "$@"; }

# ---- the environment ----------------------------------------------------------------------

# Activation scripts look at their arguments, and at variables that nobody has set.
source_file() {
    local file=$1
    shift
    set +u
    # shellcheck disable=SC1090
    source "$file"
    set -u
}

is_usable() {
    [ -x "$PYTHON" ] || return 1
    [ "$KIND" != given ] || return 0
    is_prepared || "$PYTHON" -c 'import mpi4py, torch' 2>/dev/null
}

activate_chosen() {
    if [ "$KIND" = given ]; then
        ENVIRONMENT=$PYTHON
        return
    fi
    ENVIRONMENT=$PREFIX
    if [ -f "$PREFIX/pyvenv.cfg" ] && [ -r "$PREFIX/bin/activate" ]; then
        source_file "$PREFIX/bin/activate"
    fi
    PATH=$PREFIX/bin:$PATH
    PYTHON=python
}

# Sets ENVIRONMENT, and PYTHON, which runs the ranks.
use_environment() {
    local module=$1
    if [ -n "${MPIDDP_ENV:-}" ]; then
        [ -f "$MPIDDP_ENV" ] && [ -r "$MPIDDP_ENV" ] ||
            refuse "MPIDDP_ENV=$MPIDDP_ENV is no file that can be sourced on $(hostname);" \
                "name one by its full path, as DIRECTORY/bin/activate"
        # With a slash, or it is looked for in PATH first.
        source_file "$(readlink -f -- "$MPIDDP_ENV")"
        ENVIRONMENT=$MPIDDP_ENV PYTHON=${MPIDDP_PYTHON:-python}
        [ -n "${MPIDDP_WRAP:-}" ] || command -v -- "$PYTHON" >/dev/null ||
            refuse "there is no program $PYTHON after MPIDDP_ENV=$MPIDDP_ENV was sourced on $(hostname)"
    else
        choose_environment
        if is_usable; then
            activate_chosen
        elif [ -n "${MPIDDP_WRAP:-}" ]; then
            ENVIRONMENT="what MPIDDP_WRAP brings" PYTHON=${MPIDDP_PYTHON:-python}
        else
            refuse "no environment with torch and mpi4py: run 'bash jobs/local.sh' once in $ROOT," \
                "or let MPIDDP_ENV name a file to source"
        fi
    fi
    if [ -n "${MPIDDP_WRAP:-}" ] || ! can_import "$module"; then
        export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    fi
}

can_import() {
    "$PYTHON" -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1" 2>/dev/null
}

# ---- the front ----------------------------------------------------------------------------

# A signal that comes before there is a front.
end_early() {
    say "job $JOB ended with exit code $((128 + $1)): signal $1 (SIG$(kill -l "$1")) killed it;" \
        "no rank had been started"
    exit $((128 + $1))
}

start() {
    local front module=$1
    shift
    trap 'end_early 15' TERM
    trap 'end_early 2' INT
    use_environment "$module"
    front=$PYTHON
    # The front needs any Python from 3.11 on; the ranks' own may be in a container.
    if [ -n "${MPIDDP_WRAP:-}" ]; then
        front=$(find_python) || exit
    fi
    export MPIDDP_ENVIRONMENT=$ENVIRONMENT
    exec "$front" -m mpiddp --python "$PYTHON" "$@"
}
