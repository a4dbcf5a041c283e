#!/bin/bash
# Watch runs: evaluate their checkpoints as they come, until they are DONE and the report stands.
#
#   sbatch [sbatch flags] slurm/eval_watch.sh RUN... [options of `python -m eval submit`]
#   bash slurm/submit.sh [sbatch flags] slurm/eval_watch.sh RUN... [...]
#   bash slurm/eval_watch.sh --once RUN... [...]      one look: from cron, or a login node
#   bash slurm/eval_watch.sh --local RUN... [...]     without Slurm: look and evaluate here
#   bash slurm/eval_watch.sh --help
#
# The job looks once, which takes seconds, and leaves the next look in the queue, to begin in
# WATCH_MINUTES. It needs one CPU. It ends by itself; `scancel` of the waiting job ends it before.
# Where the cluster has scrontab, this line does instead:
#   */10 * * * * bash /path/to/canon_pretrain/slurm/eval_watch.sh --once /path/to/RUN
# Watchers may be as many as you like: no work is given out twice.
#
# In the environment, or in slurm/cluster.env (see cluster.env.example beside this script):
#   WATCH_MINUTES=10     between two looks
#   CANON_CLUSTER_ENV    another file than slurm/cluster.env
#   CANON_REPO           this repository, where the job is submitted from outside of it
#SBATCH --job-name=canon-eval-watch
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this script: the repository is CANON_REPO, or around it, or around where the
# job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error: submit from inside the repository, or set CANON_REPO to it" >&2 && exit 2; }

# split_runs RUN... [options]: sets RUNS, and the NAME and the LOG of their watch
split_runs() {
    RUNS=()
    while (($#)) && [[ $1 != -* ]]; do
        RUNS+=("$(realpath -m -- "$1")") # it may still have to come
        shift
    done
    ((${#RUNS[@]})) || die "expected RUN... first; see bash slurm/eval_watch.sh --help"
    NAME=canon-eval-watch-$(printf '%s\n' "${RUNS[@]}" | sort | cksum | cut -d ' ' -f 1)
    LOG=${RUNS[0]}/evals/watch.log
}

# next_look [arguments]: the id of the job that looks next. One may be there already: this job was
# requeued, or two of them watch; then it stays at one.
next_look() {
    local minutes=${WATCH_MINUTES:-10} seconds waiting flags=()
    [[ $minutes =~ ^[0-9]+([.][0-9]+)?$ ]] || die "WATCH_MINUTES=$minutes: expected a number"
    seconds=$(awk -v m="$minutes" 'BEGIN { printf "%d", m * 60 }')
    waiting=$(squeue --me --noheader --name="$NAME" --states=PENDING --format=%i | head -n 1)
    if [[ -n $waiting ]]; then
        printf '%s' "$waiting"
        return
    fi
    # afterany: looks that take longer than WATCH_MINUTES don't pile up
    flags=(--parsable "--begin=now+$seconds" "--dependency=afterany:$SLURM_JOB_ID")
    flags+=("--job-name=$NAME" --output=/dev/null)
    flags+=("--partition=$SLURM_JOB_PARTITION")
    [[ -z ${SLURM_JOB_ACCOUNT:-} || $SLURM_JOB_ACCOUNT == '(null)' ]] || flags+=("--account=$SLURM_JOB_ACCOUNT")
    [[ -z ${SLURM_JOB_QOS:-} || $SLURM_JOB_QOS == '(null)' ]] || flags+=("--qos=$SLURM_JOB_QOS")
    local name
    for name in "${!SLURM_@}"; do # this job's own variables are not for the next
        [[ $name == SLURM_CONF || $name == SLURM_CLUSTERS ]] || unset "$name"
    done
    bash "$CANON_REPO/slurm/submit.sh" "${flags[@]}" "$CANON_REPO/slurm/eval_watch.sh" "$@" |
        cut -d ';' -f 1
}

watch_job() {
    local next
    split_runs "$@"
    if [[ -d ${RUNS[0]} ]]; then
        mkdir -p "${LOG%/*}"
        say "job $SLURM_JOB_ID: what follows is in $LOG"
        exec >>"$LOG" 2>&1
    fi
    # first of all: whatever comes over this job, somebody looks again
    next=$(next_look "$@") || die "the next look could not be submitted: submit the watch again"
    say "job $SLURM_JOB_ID looks; the next is job $next"
    # not in a container: it needs the cluster's own commands
    local code=0
    python -m eval submit "$@" --once || code=$?
    # not by that code: it is 1 as well where all is over and some evaluations failed for good
    if python -m eval submit "$@" --is_finished; then
        if ((code)); then
            say "nothing is left to do, and some of it failed (--status): the watch ends"
        else
            say "all is evaluated and reported: the watch ends"
        fi
        scancel "$next"
    elif ((code)); then
        say "this look failed; the next one tries again"
    fi
}

case ${1:-} in
    -h | --help) print_header "$CANON_REPO/slurm/eval_watch.sh" ;;
    --local | --once)
        how=$1
        shift
        load_cluster
        split_runs "$@"
        exec python -m eval submit "$@" "$how"
        ;;
    *)
        [[ -n ${SLURM_JOB_ID:-} ]] ||
            die "this is a job script: sbatch slurm/eval_watch.sh, or add --once or --local"
        load_cluster
        watch_job "$@"
        ;;
esac
