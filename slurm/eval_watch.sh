#!/bin/bash
# Watch runs: evaluate their checkpoints as they are written, until the runs are DONE and reported.
#
#   sbatch [sbatch flags] slurm/eval_watch.sh RUN... [options of `canon eval submit`]
#   bash slurm/submit.sh [sbatch flags] slurm/eval_watch.sh RUN... [...]
#   bash slurm/eval_watch.sh --once RUN... [...]      once: from cron, or a login node
#   bash slurm/eval_watch.sh --local RUN... [...]     without Slurm: evaluate on this machine
#   bash slurm/eval_watch.sh --help
#
# The job submits what is missing, which takes seconds, and queues itself to start again after
# WATCH_MINUTES. It needs one CPU. It ends when all is done; end it earlier with `scancel` of the
# pending job. On a cluster with scrontab, this line does the same:
#   */10 * * * * bash /path/to/canon_pretrain/slurm/eval_watch.sh --once /path/to/RUN
# Several watches may run at once: no work is submitted twice. Errors print a code and exit with 2.
#
# In the environment, or in slurm/cluster.env (see cluster.env.example beside this script):
#   WATCH_MINUTES=10     interval of the checks
#   CANON_CLUSTER_ENV    file to read instead of slurm/cluster.env
#   CANON_REPO           this repository, if the job is submitted from elsewhere
#SBATCH --job-name=canon-eval-watch
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this script: the repository is CANON_REPO, or contains the script, or contains
# the folder in which the job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error[slurm.repository]: submit in the repository, or set CANON_REPO to it" >&2 && exit 2; }

# split_runs RUN... [options]: set RUNS, and the NAME and LOG of their watch
split_runs() {
    RUNS=()
    while (($#)) && [[ $1 != -* ]]; do
        RUNS+=("$(realpath -m -- "$1")") # it may not exist yet
        shift
    done
    ((${#RUNS[@]})) || die slurm.usage "expected RUN... first; see bash slurm/eval_watch.sh --help"
    NAME=canon-eval-watch-$(printf '%s\n' "${RUNS[@]}" | sort | cksum | cut -d ' ' -f 1)
    LOG=${RUNS[0]}/evals/watch.log
}

# submit_next [arguments]: print the id of the next job. If one is pending already, because this job
# was requeued or there are two watches, print that.
submit_next() {
    local minutes=${WATCH_MINUTES:-10} seconds waiting flags=()
    [[ $minutes =~ ^[0-9]+([.][0-9]+)?$ ]] || die slurm.value "WATCH_MINUTES=$minutes: expected a number"
    seconds=$(awk -v m="$minutes" 'BEGIN { printf "%d", m * 60 }')
    waiting=$(squeue --me --noheader --name="$NAME" --states=PENDING --format=%i | head -n 1)
    if [[ -n $waiting ]]; then
        printf '%s' "$waiting"
        return
    fi
    # afterany: jobs that take longer than WATCH_MINUTES do not overlap
    flags=(--parsable "--begin=now+$seconds" "--dependency=afterany:$SLURM_JOB_ID")
    flags+=("--job-name=$NAME" --output=/dev/null)
    flags+=("--partition=$SLURM_JOB_PARTITION")
    [[ -z ${SLURM_JOB_ACCOUNT:-} || $SLURM_JOB_ACCOUNT == '(null)' ]] || flags+=("--account=$SLURM_JOB_ACCOUNT")
    [[ -z ${SLURM_JOB_QOS:-} || $SLURM_JOB_QOS == '(null)' ]] || flags+=("--qos=$SLURM_JOB_QOS")
    local name
    for name in "${!SLURM_@}"; do # not for the next job
        [[ $name == SLURM_CONF || $name == SLURM_CLUSTERS ]] || unset "$name"
    done
    CANON_JOB_CHECKED=1 bash "$CANON_REPO/slurm/submit.sh" "${flags[@]}" "$CANON_REPO/slurm/eval_watch.sh" "$@" |
        cut -d ';' -f 1
}

watch_job() {
    local next
    split_runs "$@"
    if [[ -d ${RUNS[0]} ]]; then
        mkdir -p "${LOG%/*}"
        say "job $SLURM_JOB_ID: continued in $LOG"
        exec >>"$LOG" 2>&1
    fi
    # first, so that the watch continues even if this job fails
    next=$(submit_next "$@") || die slurm.refused "the next job could not be submitted: submit the watch again"
    say "job $SLURM_JOB_ID; the next is job $next"
    # not in a container: it needs Slurm's commands
    local code=0
    python -m eval submit "$@" --once || code=$?
    # its exit code is also 1 if all is done and some evaluations have finally failed
    if python -m eval submit "$@" --is_finished; then
        if ((code)); then
            say "done, but some evaluations failed (see --status): the watch ends"
        else
            say "done: the watch ends"
        fi
        scancel "$next"
    elif ((code)); then
        say "failed; the next job tries again"
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
            die slurm.not_a_job "submit it with sbatch slurm/eval_watch.sh, or add --once or --local"
        load_cluster
        watch_job "$@"
        ;;
esac
