# shellcheck shell=bash
# What the job scripts share: which environment is used in a job. To be sourced by them.
#
#   start OPTION…               becomes the front, python -m mpiddp OPTION…, in the environment chosen
#   take_front_options WORD…    adds the words at the beginning that are the front's options to
#                               FRONT, and sets REST to the others
#
# MPIDDP_ENV    a file to source, instead of choosing an environment
# MPIDDP_WRAP   a prefix to each rank, as: apptainer exec --nv image.sif
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# A job that was submitted from within an array's task has inherited that one's variables.
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] &&
    timeout 100 scontrol show job "$SLURM_JOB_ID" 2>/dev/null |
    grep "^JobId=$SLURM_JOB_ID JobName=" >/dev/null; then
    unset "${!SLURM_ARRAY_@}"
fi

# As users write it: ARRAY_TASK in an array. chain.sh is no job.
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
        # Its path may be another one in a container.
        [ -z "${MPIDDP_WRAP:-}" ] || PYTHON=${MPIDDP_PYTHON:-python}
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
        elif [ -n "$INSTALLED" ]; then
            refuse "these scripts were written for $INSTALLED, which has gone: write them again" \
                "(mpiddp jobs), or let MPIDDP_ENV name a file to source"
        else
            refuse "no environment with torch and mpi4py: run 'bash jobs/local.sh' once in $ROOT," \
                "or let MPIDDP_ENV name a file to source"
        fi
    fi
    if [ -n "${MPIDDP_WRAP:-}" ] || [ -z "$(find_mpiddp "$PYTHON")" ]; then
        add_checkout
    fi
}

# ---- the front ----------------------------------------------------------------------------

# The front's options with a value, and those without (mpiddp/launch/script/front_options.py).
VALUED=(-n --nodes --ranks-per-node --launcher --launcher-options --restarts --restart-window
    --min-nodes --job-log --python --hosts --hostfile)
SINGLE=(--dry-run --preflight --requeue --version)
FRONT=()

take_front_options() {
    local name count
    while [ $# -gt 0 ]; do
        name=${1//_/-} count=1
        case " ${VALUED[*]} " in *" $name "*) count=2 ;; esac
        case " ${VALUED[*]} ${SINGLE[*]} " in *" ${name%%=*} "*) ;; *) break ;; esac
        [ $# -ge "$count" ] || refuse "$1 expects a value"
        FRONT+=("${@:1:count}")
        shift "$count"
    done
    REST=("$@")
}

# A signal that comes before there is a front.
end_early() {
    say "job $JOB ended with exit code $((128 + $1)): signal $1 (SIG$(kill -l "$1")) killed it;" \
        "no rank had been started"
    exit $((128 + $1))
}

start() {
    local front
    trap 'end_early 15' TERM
    trap 'end_early 2' INT
    use_environment
    front=$PYTHON
    # The front needs any Python from 3.11 on; the ranks' own may be in a container.
    if [ -n "${MPIDDP_WRAP:-}" ]; then
        front=${INSTALLED:-$(find_python)} && [ -n "$front" ] || exit 2
    fi
    export MPIDDP_ENVIRONMENT=$ENVIRONMENT
    exec "$front" -m mpiddp --python "$PYTHON" "$@"
}
