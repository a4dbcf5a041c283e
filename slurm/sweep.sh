#!/bin/bash
# Train the runs of a sweep, each as slurm/pretrain_1b3.sh would: an array job, an element a run.
#
#   python -m canon_pretrain.sweep plan SWEEP --configs A.toml B.toml --lr 1e-3 2e-3 --seeds 0 1
#   bash slurm/sweep.sh submit SWEEP [--throttle K] [--nodes N] [sbatch flags]
#   bash slurm/sweep.sh --local SWEEP
#   bash slurm/sweep.sh --help
#
# SWEEP is the folder that `plan` has written; `python -m canon_pretrain.sweep table SWEEP` shows how
# its runs stand. `submit` leaves out what is DONE or in the queue, checks one run of each config as
# slurm/submit.sh does, and submits the rest as one array of which K elements run at a time (default:
# as many as the cluster has room for). Submitted again it goes on with what has failed or was
# cancelled. sbatch's flags are those of each run. An array of one's own making works as well:
#
#   sbatch --array=1-8%2 [sbatch flags] slurm/sweep.sh SWEEP
#
# Small runs, several on a node: GPUS_PER_NODE=1 SHARED_NODES=1 bash slurm/sweep.sh submit SWEEP.
# Time limit, preemption, failed nodes, crashes, settings and environment: slurm/pretrain_1b3.sh
# --help. Each run has its slurm.log in its own folder; SWEEP/logs has what an element says before.
# --local trains one run after the other on this machine; a run that fails does not stop the rest.
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

# Slurm runs a copy of this script: the repository is CANON_REPO, or around it, or around where the
# job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error: submit from inside the repository, or set CANON_REPO to it" >&2 && exit 2; }

# run_words NUMBER: WORDS of the run, its config first; none where it is DONE
run_words() {
    words_of python -m canon_pretrain.sweep run "$SWEEP" "$1" --print0
}

# todo [--besides N,N]: LEFT, the runs that are not DONE, and FIRSTS, one of them of each config
todo() {
    local answer lines
    answer=$(on_head python -m canon_pretrain.sweep todo "$SWEEP" "$@") || exit 2
    mapfile -t lines <<<"$answer"
    LEFT=${lines[0]}
    read -r -a FIRSTS <<<"${lines[1]:-}"
}

# sweep_element: one run, inside a Slurm job
sweep_element() {
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] ||
        die "this is an array's script: bash slurm/sweep.sh submit SWEEP, or sbatch --array=1-N, or --local"
    run_words "$SLURM_ARRAY_TASK_ID"
    ((${#WORDS[@]})) || exit 0
    pretrain_job "${WORDS[@]}"
}

# sweep_submit [--throttle K] [sbatch flags]
sweep_submit() {
    local throttle='' mark index comment queue queued='' number flags=()
    while (($#)); do
        case $1 in
            --throttle) throttle=${2:-} && shift ;;
            --throttle=*) throttle=${1#*=} ;;
            *) flags+=("$1") ;;
        esac
        shift
    done
    [[ -z $throttle || $throttle =~ ^[1-9][0-9]*$ ]] ||
        die "--throttle $throttle: expected a whole number above 0"
    mark="canon-sweep:$(cd "$SWEEP" && pwd -P)" || exit 2
    queue=$(squeue --me --noheader --array --format='%K %k') ||
        die "squeue failed, and a run that is in the queue already must not be submitted twice: nothing was submitted"
    while read -r index comment; do
        if [[ $comment == "$mark" ]]; then queued+="${queued:+,}$index"; fi
    done <<<"$queue"
    [[ -z $queued ]] || printf 'in the queue already, and left out: %s\n' "$queued"
    todo --besides "$queued"
    if [[ -z $LEFT ]]; then
        printf 'nothing to submit: each run is DONE or in the queue\n'
        exit 0
    fi
    for number in "${FIRSTS[@]}"; do
        run_words "$number"
        # nothing is queued by this: sbatch and the run's own arguments are checked
        bash "$CANON_REPO/slurm/submit.sh" "${flags[@]}" --test-only \
            "$CANON_REPO/slurm/pretrain_1b3.sh" "${WORDS[@]}" || exit
    done
    mkdir -p "$SWEEP/logs"
    exec bash "$CANON_REPO/slurm/submit.sh" --array="$LEFT${throttle:+%$throttle}" \
        --output="${SWEEP//%/%%}/logs/%A_%a.log" "${flags[@]}" --comment="$mark" \
        "$CANON_REPO/slurm/sweep.sh" "$SWEEP"
}

# sweep_local: all runs that are not DONE, one after the other
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
        # in the background, since a trap waits for a foreground command
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
    on_head python -m canon_pretrain.sweep table "$SWEEP"
    ((!enough)) || say "asked to stop: the same command goes on"
    ((!failed)) || die "$failed run(s) failed; the same command tries them again"
}

case ${1:-} in
    -h | --help)
        print_header "$CANON_REPO/slurm/sweep.sh"
        exit 0
        ;;
    submit | --local) (($# > 1)) || die "which sweep? bash slurm/sweep.sh $1 SWEEP" ;;
    '') die "which sweep? bash slurm/sweep.sh submit SWEEP, or --help" ;;
esac
mode=element
if [[ $1 == submit || $1 == --local ]]; then
    mode=${1#--}
    shift
fi
SWEEP=$1
shift
[[ -d $SWEEP ]] || die "$SWEEP: there is no such folder; python -m canon_pretrain.sweep plan makes a sweep"
load_cluster
case $mode in
    submit) sweep_submit "$@" ;;
    local)
        (($# == 0)) || die "$1: --local takes a sweep alone; options of its runs belong to its plan"
        sweep_local
        ;;
    *)
        [[ -n ${SLURM_JOB_ID:-} ]] || die "bash slurm/sweep.sh submit SWEEP, or --local SWEEP; this way it is a job script"
        sweep_element
        ;;
esac
