#!/usr/bin/env bash
# Submit jobs that run one after another, each only if the one before it succeeded.
# shellcheck source=jobs/slurm.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/slurm.sh"

usage() {
    cat <<'TEXT'
usage: bash jobs/chain.sh 'STAGE 1' 'STAGE 2'…

Submits jobs that run one after another. A stage is what you would type after sbatch, as one
quoted word: sbatch's options, a script, the script's arguments.

    bash jobs/chain.sh '--nodes=2 jobs/train.sbatch --epochs 5' \
        '--array=0-2 jobs/sweep.sbatch learning-rate=0.1,0.01,0.001 -- --epochs 5' \
        '--job-name=summary --wrap="ls runs"'

Quotes and backslashes within a stage work as in a shell; variables and * are not expanded. A
stage starts when the one before it, all tasks of an array included, has ended with exit code 0
(afterok); if that one fails, Slurm cancels the rest. If a stage cannot be submitted, those
before it are cancelled, and the exit code is 2.
TEXT
}

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

# sbatch's options without a value, or with one only after =; all others take the next word.
FLAGS=(contiguous exclusive external get-user-env help hold ignore-pbs nice no-kill no-requeue
    overcommit oversubscribe parsable propagate quiet reboot requeue spread-job stepmgr test-only
    usage use-min-nodes verbose version wait)
LETTERS=HOQVWhksv

# sbatch takes -Hd TEXT as -H -d TEXT, and any beginning of a long name that only one has.
is_dependency() {
    case $1 in
    --dep*) [[ --dependency == "${1%%=*}"* ]] ;;
    --*) return 1 ;;
    *) [[ $1 =~ ^-[$LETTERS]*d ]] ;;
    esac
}

takes_next_word() {
    local flag
    case $1 in
    --*=*) return 1 ;;
    --*) for flag in "${FLAGS[@]}"; do [[ --$flag != "$1"* ]] || return 1; done ;;
    *) [[ $1 =~ ^-[$LETTERS]*[^$LETTERS]$ ]] ;;
    esac
}

# All stages are looked at before the first is submitted. What follows the script is the script's.
check_stage() {
    local number=$1 text=$2 at=0 word script='' wrapped=''
    split_words "$text"
    while [ "$at" -lt ${#WORDS[@]} ]; do
        word=${WORDS[at]} at=$((at + 1))
        case $word in
        --)
            script=${WORDS[at]:-}
            break
            ;;
        :) continue ;; # between the parts of a heterogeneous job
        --wr | --wra | --wrap | --wr=* | --wra=* | --wrap=*) wrapped=1 ;;
        -?*) ;;
        *)
            script=$word
            break
            ;;
        esac
        # sbatch would take the stage's own for the chain's.
        [ "$number" -eq 1 ] || ! is_dependency "$word" ||
            refuse "stage $number has a dependency of its own ($word):" \
                "in a chain it can only depend on stage $((number - 1))"
        # What begins with - is looked at as an option: one too many is seen rather than one too few.
        if takes_next_word "$word" && [[ ${WORDS[at]:-} != -* ]]; then at=$((at + 1)); fi
    done
    [ -n "$wrapped" ] || [ -f "$script" ] ||
        refuse "stage $number names no script that is here: '$text'; expected sbatch's options," \
            "then a script such as jobs/train.sbatch, then its arguments"
}

# Sets LAST. What is submitted already must not run when the chain is not complete.
submit_stage() {
    local number=$1 text=$2 depend=()
    split_words "$text"
    [ -z "$LAST" ] || depend=(--dependency="afterok:$LAST")
    LAST=$(sbatch --parsable --kill-on-invalid-dep=yes "${depend[@]}" "${WORDS[@]}" </dev/null)
    LAST=${LAST%%;*}
    if [[ ! $LAST =~ ^[0-9]+$ ]]; then
        [ ${#JOBS[@]} -eq 0 ] || scancel "${JOBS[@]}"
        refuse "stage $number could not be submitted, see above${JOBS[*]:+; cancelled: ${JOBS[*]}}"
    fi
    JOBS+=("$LAST")
}

case ${1:-} in
-h | --help)
    usage
    exit
    ;;
'') refuse "no stage is given (--help shows an example)" ;;
esac
command -v sbatch >/dev/null || refuse "there is no sbatch on $(hostname): run this where jobs are submitted"

number=0
for stage; do
    number=$((number + 1))
    check_stage "$number" "$stage"
done
LAST='' JOBS=()
number=0
printf '%-5s  %-10s  %-10s  %s\n' stage job after sbatch
for stage; do
    number=$((number + 1))
    previous=$LAST
    submit_stage "$number" "$stage"
    printf '%-5s  %-10s  %-10s  %s\n' "$number" "$LAST" "${previous:--}" "$stage"
done
echo "to cancel them all: scancel ${JOBS[*]}"
