# shellcheck shell=bash
# What the job scripts share: which environment is used in a job, how many ranks and cores there
# are, where the logs go, and what the exit code means. To be sourced by them.
#
#   train OPTION…        starts the ranks of mpiddp.train, and leaves with their exit code
#   benchmark ARGUMENT…  runs python -m benchmarks, which starts its ranks itself
#   split_words TEXT     sets WORDS
#
# MPIDDP_ENV    a file to source, instead of choosing an environment
# MPIDDP_WRAP   a prefix to each rank, as: apptainer exec --nv image.sif
# MPIDDP_PMI    what srun's --mpi= gets; default pmix
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

# A job that was submitted from within an array's task has inherited that one's variables.
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] &&
    scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep "^JobId=$SLURM_JOB_ID JobName=" >/dev/null; then
    unset "${!SLURM_ARRAY_@}"
fi

# As users write it: ARRAY_TASK where there is an array. chain.sh is no job.
JOB=${SLURM_JOB_ID:-}
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# Process ids, set once the ranks, or another program, are being started; and once a signal came.
SRUN='' CHILD='' SIGNAL=''

# The user's mistakes have exit code 2, as everywhere in mpiddp.
refuse() {
    say "$@"
    exit 2
}

# What environment.sh cannot do is the user's to mend, too: in a job nothing is installed.
die() { refuse "$@"; }

# Sets WORDS to the words of a text, split and unquoted as a shell does it; nothing is expanded.
split_words() {
    local rest=$1 word='' begun='' quote='' char
    # Bytes: what is looked for is ASCII, and the user's text need not be valid in any locale.
    local LC_ALL=C
    WORDS=()
    while [ -n "$rest" ]; do
        char=${rest:0:1} rest=${rest:1}
        if [ "$char" = "$quote" ]; then
            quote=''
        elif [ "$quote" = "'" ]; then
            word+=$char
        elif [ "$char" = \\ ]; then
            [ -n "$rest" ] || refuse "these words end in a backslash, which has nothing to quote: $1"
            char=${rest:0:1} rest=${rest:1}
            [ "$char" != $'\n' ] || continue
            # Between double quotes it quotes only what would otherwise mean something there.
            [ -z "$quote" ] || [[ $char == [\"\\\$\`] ]] || word+=\\
            word+=$char begun=1
        elif [ -n "$quote" ]; then
            word+=$char
        else
            case $char in
            [\'\"]) quote=$char begun=1 ;;
            [$' \t\n'])
                [ -z "$begun" ] || WORDS+=("$word")
                word='' begun=''
                ;;
            *) word+=$char begun=1 ;;
            esac
        fi
    done
    [ -z "$quote" ] || refuse "these words cannot be told apart, a quote ($quote) is left open: $1"
    [ -z "$begun" ] || WORDS+=("$word")
}

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

# Sets ENVIRONMENT, PYTHON, WRAP, and HELPER: what starts Python in this script itself.
use_environment() {
    local module=$1
    HELPER=()
    split_words "${MPIDDP_WRAP:-}"
    WRAP=("${WORDS[@]}")
    if [ -n "${MPIDDP_ENV:-}" ]; then
        [ -f "$MPIDDP_ENV" ] && [ -r "$MPIDDP_ENV" ] ||
            refuse "MPIDDP_ENV=$MPIDDP_ENV is no file that can be sourced on $(hostname);" \
                "name one by its full path, as DIRECTORY/bin/activate"
        # With a slash, or it is looked for in PATH first.
        source_file "$(readlink -f -- "$MPIDDP_ENV")"
        ENVIRONMENT=$MPIDDP_ENV PYTHON=${MPIDDP_PYTHON:-python}
        [ ${#WRAP[@]} -gt 0 ] || command -v -- "$PYTHON" >/dev/null ||
            refuse "there is no program $PYTHON after MPIDDP_ENV=$MPIDDP_ENV was sourced on $(hostname)"
    else
        choose_environment
        if is_usable; then
            activate_chosen
        elif [ ${#WRAP[@]} -gt 0 ]; then
            ENVIRONMENT="what MPIDDP_WRAP brings" PYTHON=${MPIDDP_PYTHON:-python}
            HELPER=("${WRAP[@]}")
        else
            refuse "no environment with torch and mpi4py: run 'bash jobs/local.sh' once in $ROOT," \
                "or let MPIDDP_ENV name a file to source"
        fi
    fi
    if [ ${#WRAP[@]} -gt 0 ] || ! can_import "$module"; then
        export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    fi
}

can_import() {
    "$PYTHON" -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1" 2>/dev/null
}

# ---- the logs -----------------------------------------------------------------------------

# Sets OUT and ERR, and ERR_BEFORE, how many bytes an earlier start of this job has left in ERR.
# A job's name may hold anything, and be long; in srun's --output, % and \ mean something, too.
name_logs() {
    local name=${SLURM_JOB_NAME:-job}
    name=${name//[[:space:][:cntrl:]\/%\\]/-}
    OUT=logs/${name:0:50}-$JOB.out
    ERR=${OUT%.out}.err
    mkdir -p logs && [ -w logs ] ||
        refuse "cannot write to $PWD/logs on $(hostname); --chdir=DIRECTORY names another place"
    ERR_BEFORE=0
    [ ! -s "$ERR" ] || ERR_BEFORE=$(wc -c <"$ERR")
}

# ---- nodes, ranks, cores ------------------------------------------------------------------

# 4(x2),1 becomes 4 4 1, a line each.
expand_counts() {
    local IFS=, part times
    for part in $1; do
        times=1
        case $part in *"(x"*) times=${part##*"(x"} ;; esac
        times=${times%)}
        while ((times-- > 0)); do printf '%s\n' "${part%%"("*}"; done
    done
}

# What Slurm has written down about this job: "tasks N", "asked N" (GPUs per node that were asked
# for), "node HOSTS GPUS". Of an array's first task Slurm shows the siblings, too.
read_record() {
    scontrol show job -d "$SLURM_JOB_ID" 2>/dev/null | awk -v job="JobId=$SLURM_JOB_ID " '
        # gpu:2(IDX:0-1), gres:gpu:2, gres/gpu:a100:2, several with commas
        function count_gpus(text, parts, part, total) {
            gsub(/\([^)]*\)/, "", text)
            total = 0
            for (part = split(text, parts, ","); part > 0; part--) {
                sub(/^gres[:\/]/, "", parts[part])
                if (parts[part] !~ /^gpu([:=]|$)/) continue
                sub(/.*[:=]/, "", parts[part])
                total += parts[part] ~ /^[0-9]+$/ ? parts[part] : 1
            }
            return total
        }
        BEGIN { RS = ""; FS = "\n" }
        index($1 " ", job) != 1 { next }
        {
            for (line = 1; line <= NF; line++) {
                text = $line
                sub(/^ +/, "", text)
                if (text ~ /^NumNodes=.* NumTasks=[0-9]/) {
                    sub(/.* NumTasks=/, "", text)
                    print "tasks", text + 0
                } else if (text ~ /^TresPerNode=/) {
                    sub(/^TresPerNode=/, "", text)
                    if (count_gpus(text)) print "asked", count_gpus(text)
                } else if (text ~ /^Nodes=/) {
                    hosts = text
                    sub(/^Nodes=/, "", hosts)
                    sub(/ .*/, "", hosts)
                    sub(/.* GRES=/, "", text)
                    print "node", hosts, count_gpus(text)
                }
            }
        }'
}

# Sets HOSTS, and for each of them CORES_OF (as Slurm counts CPUs) and GPUS_OF; RECORDED_TASKS.
read_nodes() {
    local what first second host asked=''
    local -A gpus=()
    RECORDED_TASKS=''
    while read -r what first second; do
        case $what in
        tasks) RECORDED_TASKS=$first ;;
        asked) asked=$first ;;
        node) for host in $(scontrol show hostnames "$first"); do gpus[$host]=$second; done ;;
        esac
    done < <(read_record)
    mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    mapfile -t CORES_OF < <(expand_counts "$SLURM_JOB_CPUS_PER_NODE")
    GPUS_OF=()
    for host in "${HOSTS[@]}"; do
        # With --exclusive a job has all of a node's GPUs, whatever it asked for.
        GPUS_OF+=("${asked:-${gpus[$host]:-${SLURM_GPUS_ON_NODE:-0}}}")
    done
}

join_with() {
    local IFS=$1
    shift
    printf '%s\n' "$*"
}

sum() { echo $(($(join_with + "$@"))); }

# Refuses the job unless each of these variables of Slurm's, where it is set, holds a number.
need_numbers() {
    local name
    for name; do
        case ${!name:-0} in
        *[!0-9]* | ??????????*)
            refuse "$name is '${!name}', but Slurm sets it to a whole number:" \
                "left over from the shell that submitted this job; unset it there"
            ;;
        esac
    done
}

are_equal() {
    local value
    for value; do [ "$value" = "$1" ] || return 1; done
}

# Sets RANKS_OF (per node), WORLD, and LAYOUT, srun's options for both.
choose_ranks() {
    local node rank list=''
    local total_gpus
    total_gpus=$(sum "${GPUS_OF[@]}")
    if [ -n "${SLURM_NTASKS:-}" ]; then
        [ "${RECORDED_TASKS:-$SLURM_NTASKS}" = "$SLURM_NTASKS" ] ||
            refuse "SLURM_NTASKS is $SLURM_NTASKS, but Slurm gave this job $RECORDED_TASKS tasks:" \
                "left over from the shell that submitted it; unset it there, or give --ntasks"
        mapfile -t RANKS_OF < <(expand_counts "$SLURM_TASKS_PER_NODE")
        WORLD=$SLURM_NTASKS
        LAYOUT=(--ntasks="$WORLD")
    else
        unset SLURM_NTASKS_PER_NODE
        if [ "$total_gpus" -gt 0 ]; then
            RANKS_OF=("${GPUS_OF[@]}")
        else
            mapfile -t RANKS_OF < <(expand_counts "1(x${#HOSTS[@]})")
        fi
        WORLD=$(sum "${RANKS_OF[@]}")
        LAYOUT=(--ntasks="$WORLD" --ntasks-per-node="${RANKS_OF[0]}")
        if ! are_equal "${RANKS_OF[@]}"; then
            # Slurm spreads tasks by cores; told every rank's node by name, it obeys.
            for node in "${!HOSTS[@]}"; do
                for ((rank = 0; rank < RANKS_OF[node]; rank++)); do list+=,${HOSTS[node]}; done
            done
            LAYOUT=(--ntasks="$WORLD" --distribution=arbitrary --nodelist="${list#,}")
        fi
    fi
    # Not --gpus-per-task, nor --gpu-bind: a rank must see its neighbours' GPUs, as NCCL does.
    if [ "$total_gpus" -gt 0 ] && are_equal "${GPUS_OF[@]}"; then
        LAYOUT+=(--gpus-per-node="${GPUS_OF[0]}")
    elif [ "$total_gpus" -gt 0 ]; then
        LAYOUT+=(--gpus="$total_gpus")
    fi
}

# Sets CORES, per rank: what was asked for, as far as each node's cores go round.
choose_cores() {
    local node fitting='' here wanted=${SLURM_CPUS_PER_TASK:-}
    for node in "${!HOSTS[@]}"; do
        [ "${RANKS_OF[node]}" -gt 0 ] || continue
        here=$((CORES_OF[node] / RANKS_OF[node]))
        [ "$here" -ge "${fitting:-$here}" ] || fitting=$here
        fitting=${fitting:-$here}
        if [ -z "${SLURM_CPUS_PER_TASK:-}" ] && [ "${SLURM_CPUS_PER_GPU:-0}" -gt 0 ]; then
            here=$((SLURM_CPUS_PER_GPU * GPUS_OF[node] / RANKS_OF[node]))
            [ "$here" -ge "${wanted:-$here}" ] || wanted=$here
            wanted=${wanted:-$here}
        fi
    done
    CORES=${wanted:-$fitting}
    NOTE=''
    if [ "$CORES" -gt "$fitting" ]; then
        CORES=$fitting
        NOTE="$wanted cores for each rank were asked for, $fitting are there"
    fi
    if [ "$CORES" -lt 1 ]; then
        CORES=1
        LAYOUT+=(--overcommit)
        NOTE="there are fewer cores than ranks"
    fi
    [ -z "$NOTE" ] || [ -n "${SLURM_NTASKS:-}" ] ||
        NOTE+="; --cpus-per-gpu=N gives every GPU's rank N cores"
    export SRUN_CPUS_PER_TASK=$CORES
}

describe_layout() {
    local nodes=${#HOSTS[@]} s='' ranks="$WORLD ranks" each=ranks
    [ "$nodes" -eq 1 ] || s=s
    [ "$WORLD" -gt 1 ] || ranks="1 rank"
    [ "${RANKS_OF[0]}" -gt 1 ] || each=rank
    if [ "$(sum "${RANKS_OF[@]}")" -ne "$WORLD" ]; then
        # --ntasks beside --ntasks-per-node: srun spreads them.
        printf '%s\n' "$nodes node$s, at most ${RANKS_OF[0]} $each per node, $ranks"
    elif are_equal "${RANKS_OF[@]}"; then
        printf '%s\n' "$nodes node$s x ${RANKS_OF[0]} $each per node = $ranks"
    else
        printf '%s\n' "$nodes node$s, $(join_with + "${RANKS_OF[@]}") = $ranks"
    fi
}

describe_gpus() {
    local total
    total=$(sum "${GPUS_OF[@]}")
    if [ "$total" -eq 0 ]; then
        echo none
    elif are_equal "${GPUS_OF[@]}"; then
        echo "${GPUS_OF[0]} per node, each rank sees all of its node's"
    else
        echo "$(join_with + "${GPUS_OF[@]}") = $total, each rank sees all of its node's"
    fi
}

plan_ranks() {
    [ "${SLURM_HET_SIZE:-1}" -le 1 ] ||
        refuse "this script starts ranks in one component only, and the job has $SLURM_HET_SIZE;" \
            "submit it as one component"
    need_numbers SLURM_NTASKS SLURM_CPUS_PER_TASK SLURM_CPUS_PER_GPU
    read_nodes
    choose_ranks
    choose_cores
    # All of that is given to srun now; what it would read beside it could contradict.
    unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK \
        SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK
}

# ---- the exit code ------------------------------------------------------------------------

# The table of mpiddp/errors.py.
describe_code() {
    case $1 in
    0) echo "done" ;;
    1) echo "our code, or the user's, failed" ;;
    2) echo "bad arguments or configuration" ;;
    3) echo "the launch is wrong: wrong PMI, no MPI, GPUs shared" ;;
    4) echo "ranks could not reach each other in time" ;;
    5) echo "no usable checkpoint where one was demanded" ;;
    6) echo "a rank or peer was lost or stalled" ;;
    75) echo "preempted with a checkpoint written" ;;
    *)
        if [ "$1" -gt 128 ] && kill -l "$(($1 - 128))" >/dev/null 2>&1; then
            echo "signal $(($1 - 128)) (SIG$(kill -l "$(($1 - 128))")) killed it"
        else
            echo "a code of the program's own"
        fi
        ;;
    esac
}

# The run directory that the trainer will take, as it decides itself; nothing where its options
# are wrong, which it will say.
find_run_directory() {
    "${HELPER[@]}" "$PYTHON" -c '
import sys
from mpiddp.training.config import parse
from mpiddp.training.run_directory import find_path

print(find_path(parse(sys.argv[1:], show_help=False)) or "")' "$@" 2>/dev/null
}

# An outcome of an earlier attempt must not be taken for this one's. (find reads the directory,
# so that a network file system looks again.)
stamp_outcome() {
    [ -z "$1" ] || find "$1" -maxdepth 1 -name outcome.json -printf '%i %T@\n' 2>/dev/null
}

# What srun said about the rank that failed: one that crashed, "node1: task 0: Segmentation fault";
# else one that left with a code of its own, "node1: task 1: Exited with exit code 3"; else one
# that was killed, "node2: tasks 2-3: Killed". Their order is no sign: Slurm kills and terminates
# the others because of the one, may name them before it, and srun's code, the highest, is theirs.
find_failure() {
    awk '
        !/^srun: error: .*: tasks? [0-9,-]+: / { next }
        { sub(/^srun: error: /, "") }
        / Exited with exit code [0-9]+$/ { if ($NF <= 128 && !left) left = $0 }
        !/ (Exited with exit code [0-9]+|Killed|Terminated)$/ { if (!crashed) crashed = $0 }
        / Killed$/ { if (!killed) killed = $0 }
        { if (!any) any = $0 }
        END { print crashed ? crashed : left ? left : killed ? killed : any }'
}

read_new_errors() {
    [ ! -r "${ERR:-}" ] || tail -c +$((ERR_BEFORE + 1)) -- "$ERR"
}

report_end() {
    local code=$1 why=$2
    say "job $JOB ended with exit code $code: $(describe_code "$code")$why"
    if [ "$code" -ne 0 ] && [ -n "$(read_new_errors | head -c 1)" ]; then
        printf 'The last lines of %s:\n' "$ERR" >&2
        read_new_errors | tail -n 20 >&2
    fi
}

# ---- the program --------------------------------------------------------------------------

describe_job() {
    printf '%s\n' "mpiddp: job $JOB (${SLURM_JOB_NAME:-}) on $SLURM_JOB_NODELIST"
    printf '  %-12s %s\n' "$@" environment "$ENVIRONMENT"
    [ ${#WRAP[@]} -eq 0 ] || printf '  %-12s %s\n' prefix "${WRAP[*]}"
    printf '  %-12s %s\n' logs "$PWD/$OUT, ${ERR##*/}"
}

train() {
    local plural=s
    trap 'interrupt TERM' TERM
    trap 'interrupt INT' INT
    use_environment mpiddp
    name_logs
    plan_ranks
    # A job that is requeued, or a second start in salloc's shell, has the same name and must not
    # wipe out what the first said. Ctrl-C goes to the ranks, who write it down, and not to srun's
    # own display.
    COMMAND=(srun --mpi="${MPIDDP_PMI:-pmix}" --kill-on-bad-exit=1 --export=ALL --disable-status
        --nodes="${#HOSTS[@]}" "${LAYOUT[@]}" --output="$OUT" --error="$ERR" --open-mode=append
        "${WRAP[@]}" "$PYTHON" -m mpiddp.train "$@")
    [ "$CORES" -ne 1 ] || plural=
    describe_job ranks "$(describe_layout)" \
        "per rank" "$CORES core$plural${NOTE:+ ($NOTE)}" "GPUs" "$(describe_gpus)"
    print_command SRUN_CPUS_PER_TASK="$CORES" "${COMMAND[@]}"
    RUN=$(find_run_directory "$@")
    start_ranks
    report_end "$CODE" "$WHY"
    exit "$CODE"
}

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

# Sets CODE, and WHY, where it comes from.
start_ranks() {
    local before after status failure line said messages=''
    before=$(stamp_outcome "$RUN")
    # srun's messages are kept here: a file would be left behind by a job that Slurm kills.
    # A signal may come before the process is known: ranks are being started by then.
    SRUN=starting
    exec {said}< <(exec "${COMMAND[@]}" 2>&1)
    SRUN=$!
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s\n' "$line"
        messages+=$line$'\n'
    done <&"$said"
    exec {said}<&-
    wait "$SRUN"
    status=$?
    after=$(stamp_outcome "$RUN")
    failure=$(printf '%s' "$messages" | find_failure)
    CODE='' WHY=''
    if [ -n "$after" ] && [ "$after" != "$before" ]; then
        CODE=$(sed -n 's/^ *"code": *\([0-9]\{1,3\}\),\{0,1\}$/\1/p' "$RUN/outcome.json")
        WHY="$RUN/outcome.json"
        # When a rank is killed, srun terminates the others at once, and they may write down that
        # before they notice the loss. Whoever ends the whole job tells this script as well.
        if [ "$CODE" -eq 143 ] && [ -z "$SIGNAL" ] && [[ $failure == *": Killed" ]]; then
            CODE=6 WHY="$failure; srun terminated the others"
        fi
    elif [ "$status" -ne 0 ] && [ -n "$SIGNAL" ]; then
        CODE=$((128 + $(kill -l "$SIGNAL"))) WHY="SIG$SIGNAL came to this script"
    elif [ "$status" -ne 0 ] && [ -n "$failure" ]; then
        # Without an outcome, a rank that went without a code of its own is a rank lost.
        CODE=6 WHY=$failure
        case $failure in *": Exited with exit code "*) CODE=${failure##* } ;; esac
        [ "$CODE" -le 128 ] || CODE=6
    fi
    CODE=${CODE:-$status}
    [ "$CODE" -eq "$status" ] || WHY+="; srun's code was $status"
    WHY=${WHY:+ ($WHY)}
}

# scancel and the time limit send TERM to this script, to srun and to the ranks, and KILL after
# Slurm's KillWait: nothing can be written after that. Ctrl-C goes to this script and to srun, which
# hands it on. TERM for this script alone (scancel --batch, sbatch --signal=B:TERM@60) is handed on
# here, past srun, which would kill the ranks, as it does after scancel --full; Slurm refuses it
# where it ends the job anyway. A CHILD is told by Slurm in that case, and must not be told twice.
interrupt() {
    local step
    SIGNAL=$1
    if [ -z "$SRUN$CHILD" ]; then
        CODE=$((128 + $(kill -l "$SIGNAL")))
        report_end "$CODE" "; no rank had been started"
        exit "$CODE"
    fi
    [ "$SIGNAL" != INT ] || return 0
    if [ -n "$CHILD" ]; then
        is_ending || kill -s "$SIGNAL" "$CHILD" 2>/dev/null || :
        return 0
    fi
    step=$(find_step)
    [ -z "$step" ] || scancel --quiet --signal="$SIGNAL" "$step" 2>/dev/null
}

# Whether Slurm ends the job: it has told every process of it, and starts no more steps.
is_ending() {
    scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null |
        grep "^JobId=$SLURM_JOB_ID " | grep -v ' JobState=RUNNING ' >/dev/null
}

# The step whose srun is this script's: in salloc's shell there may be others.
find_step() {
    local here
    here=$(uname -n)
    scontrol --oneliner show step "$SLURM_JOB_ID" 2>/dev/null | awk -v host="${here%%.*}:$SRUN" '
        index($0 " ", " SrunHost:Pid=" host " ") { sub(/^StepId=/, "", $1); print $1 }'
}

print_command() {
    printf '  %-12s' command
    printf ' %q' "$@"
    printf '\n'
}

# The benchmark chooses its ranks, so it is started once, here.
benchmark() {
    local status
    trap 'interrupt TERM' TERM
    trap 'interrupt INT' INT
    [ -z "${MPIDDP_WRAP:-}" ] ||
        refuse "MPIDDP_WRAP is for scripts that start ranks; a benchmark starts its own, without it"
    use_environment benchmarks
    need_numbers SLURM_CPUS_PER_TASK
    name_logs
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    describe_job
    print_command "$PYTHON" -m benchmarks "$@"
    run_child "$PYTHON" -m benchmarks "$@" >>"$OUT" 2>>"$ERR"
    status=$?
    report_end "$status" "${SIGNAL:+ (SIG$SIGNAL came to this script)}"
    exit "$status"
}
