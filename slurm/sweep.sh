#!/bin/bash
# Train the runs of a sweep, each as slurm/pretrain_1b3.sh does, as the tasks of an array job.
#
#   canon sweep plan SWEEP --configs A.toml B.toml --lr 1e-3 2e-3 --seeds 0 1
#   bash slurm/sweep.sh submit SWEEP [--throttle K] [--nodes N] [sbatch flags]
#   bash slurm/sweep.sh --local SWEEP
#   bash slurm/sweep.sh --help
#
# SWEEP is the folder that `plan` has written; `canon sweep table SWEEP` prints the
# state of its runs. `submit` skips runs that are DONE or in the queue, checks one run of each config
# as slurm/submit.sh does, and submits the others as one array of which K tasks run at a time (default:
# all). Submit again to continue runs that failed or were cancelled. sbatch's flags are those of each
# run. The same by hand:
#
#   sbatch --array=1-8%2 [sbatch flags] slurm/sweep.sh SWEEP
#
# For several small runs per node: GPUS_PER_NODE=1 SHARED_NODES=1 bash slurm/sweep.sh submit SWEEP.
# Time limit, preemption, failed nodes, crashes, settings and environment: slurm/pretrain_1b3.sh
# --help. Each run has a slurm.log; output before it is opened is in SWEEP/logs. --local trains the
# runs one after another on this machine, also after a failure. Errors print a code and exit with 2.
#SBATCH --job-name=canon-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

# Slurm runs a copy of this script: the repository is CANON_REPO, or contains the script, or contains
# the folder in which the job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error[slurm.repository]: submit in the repository, or set CANON_REPO to it" >&2 && exit 2; }

# run_words NUMBER: set WORDS to the arguments of the run, its config first; empty if it is DONE
run_words() {
    words_of python -m canon_pretrain sweep run "$SWEEP" "$1" --print0
}

# todo [--besides N,N]: set LEFT, the runs that are not DONE, and FIRSTS, one of them per config
todo() {
    local answer lines
    answer=$(on_head python -m canon_pretrain sweep todo "$SWEEP" "$@") || exit 2
    mapfile -t lines <<<"$answer"
    LEFT=${lines[0]}
    read -r -a FIRSTS <<<"${lines[1]:-}"
}

# sweep_element: train one run, in a Slurm job
sweep_element() {
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] ||
        die slurm.not_a_job "use bash slurm/sweep.sh submit SWEEP, sbatch --array=1-N, or --local"
    run_words "$SLURM_ARRAY_TASK_ID"
    ((${#WORDS[@]})) || exit 0
    pretrain_job "${WORDS[@]}"
}

# sweep_submit [--throttle K] [sbatch flags]
sweep_submit() {
    local throttle='' index text comment queue queued='' number flags=()
    while (($#)); do
        case $1 in
            --throttle) throttle=${2:-} && shift ;;
            --throttle=*) throttle=${1#*=} ;;
            *) flags+=("$1") ;;
        esac
        shift
    done
    [[ -z $throttle || $throttle =~ ^[1-9][0-9]*$ ]] ||
        die slurm.value "--throttle $throttle: expected an integer above 0"
    need sbatch squeue
    comment="canon-sweep:$(cd "$SWEEP" && pwd -P)" || exit 2
    queue=$(squeue --me --noheader --array --format='%K %k') ||
        die slurm.queue "squeue failed, nothing was submitted: a run might be in the queue already"
    while read -r index text; do
        if [[ $text == "$comment" ]]; then queued+="${queued:+,}$index"; fi
    done <<<"$queue"
    [[ -z $queued ]] || printf 'in the queue already, skipped: %s\n' "$queued"
    todo --besides "$queued"
    if [[ -z $LEFT ]]; then
        printf 'nothing to submit: each run is DONE or in the queue\n'
        exit 0
    fi
    for number in "${FIRSTS[@]}"; do
        run_words "$number"
        # checks sbatch's flags and the run's arguments
        bash "$CANON_REPO/slurm/submit.sh" "${flags[@]}" --test-only \
            "$CANON_REPO/slurm/pretrain_1b3.sh" "${WORDS[@]}" || exit
    done
    mkdir -p "$SWEEP/logs"
    CANON_JOB_CHECKED=1 exec bash "$CANON_REPO/slurm/submit.sh" --array="$LEFT${throttle:+%$throttle}" \
        --output="${SWEEP//%/%%}/logs/%A_%a.log" "${flags[@]}" --comment="$comment" \
        "$CANON_REPO/slurm/sweep.sh" "$SWEEP"
}

# sweep_local: train all runs that are not DONE, one after another
sweep_local() {
    local number code failed=0 enough=0 child='' left
    trap 'enough=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' INT TERM HUP
    todo
    IFS=, read -r -a left <<<"$LEFT"
    for number in "${left[@]}"; do
        ((!enough)) || break
        run_words "$number"
        ((${#WORDS[@]})) || continue
        say "run $number: $(basename "${WORDS[2]}")"
        # in the background, as traps wait for foreground commands
        (pretrain_local "${WORDS[@]}") &
        child=$!
        while true; do
            code=0
            wait "$child" || code=$?
            kill -0 "$child" 2>/dev/null || break
        done
        child=''
        ((code == 0)) || failed=$((failed + 1))
    done
    on_head python -m canon_pretrain sweep table "$SWEEP"
    ((!enough)) || say "stopped: run the same command to continue"
    ((!failed)) || die sweep.failed_runs "$failed run(s) failed; run the same command to retry them"
}

case ${1:-} in
    -h | --help)
        print_header "$CANON_REPO/slurm/sweep.sh"
        exit 0
        ;;
    submit | --local) (($# > 1)) || die slurm.usage "expected bash slurm/sweep.sh $1 SWEEP" ;;
    '') die slurm.usage "expected bash slurm/sweep.sh submit SWEEP, or --help" ;;
esac
mode=element
if [[ $1 == submit || $1 == --local ]]; then
    mode=${1#--}
    shift
fi
SWEEP=$1
shift
[[ -d $SWEEP ]] || die sweep.not_a_sweep "$SWEEP does not exist; create it with canon sweep plan"
load_cluster
case $mode in
    submit) sweep_submit "$@" ;;
    local)
        (($# == 0)) || die slurm.usage "$1: --local has no options; give options of runs to the plan"
        sweep_local
        ;;
    *)
        [[ -n ${SLURM_JOB_ID:-} ]] || die slurm.not_a_job "use bash slurm/sweep.sh submit SWEEP, or --local SWEEP"
        sweep_element
        ;;
esac
