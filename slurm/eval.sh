#!/bin/bash
# Evaluate one checkpoint on one suite, on one GPU or several of one node.
#
#   sbatch [sbatch flags] slurm/eval.sh RUN/checkpoint/step-N SUITE [options of `python -m eval run`]
#   bash slurm/submit.sh [sbatch flags] slurm/eval.sh RUN/checkpoint/step-N SUITE [...]
#   bash slurm/eval.sh --local RUN/checkpoint/step-N SUITE [...]
#   bash slurm/eval.sh --help
#
# `python -m eval submit` submits it for each checkpoint and suite of a run; by hand it does one.
# SUITE is a suite, a task or the path of a task's YAML. Results go to RUN/evals/step-N/SUITE, and
# the job's log beside them where `eval submit` submitted it. The same job again, or one that was
# requeued, goes on after the last task that was answered.
#
# In the environment, or in slurm/cluster.env (see cluster.env.example beside this script):
#   EVAL_GPUS=1          GPUs that slurm/submit.sh and `eval submit` ask for, and ranks; with sbatch
#                        itself --gpus-per-node=8
#   GPU_FLAG, CPUS_PER_GPU, MEM_PER_GPU   how submit.sh asks for them, and what goes with each
#   CANON_CPU=1          on CPUs, RANKS_PER_NODE=2 ranks; with sbatch itself --gpus-per-node=0
#   CANON_EVAL_DATA      what `python -m eval stage` wrote
#   MAX_RESTARTS_WITHOUT_PROGRESS=3   restarts in a row, without a task more, that end it
#   CANON_CLUSTER_ENV    another file than slurm/cluster.env
#   CANON_REPO           this repository, where the job is submitted from outside of it
#
# The time limit (--time): 60 s before it the job is requeued; sbatch --signal=B:USR1@120 makes that
# earlier. Preemption and a failed node: Slurm requeues. Any other failure, and scancel: not
# requeued; `eval submit` submits anew, --retries times.
#SBATCH --job-name=canon-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
set -euo pipefail

# Slurm runs a copy of this script: the repository is CANON_REPO, or around it, or around where the
# job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error: submit from inside the repository, or set CANON_REPO to it" >&2 && exit 2; }

# split_work [--lease ID] CHECKPOINT SUITE [options]
split_work() {
    LEASE=()
    if [[ ${1:-} == --lease ]]; then
        LEASE=(--lease "$2")
        shift 2
    fi
    if (($# < 2)) || [[ $1 == -* || $2 == -* ]]; then
        die "expected RUN/checkpoint/step-N and SUITE; see bash slurm/eval.sh --help"
    fi
    CHECKPOINT=$1 SUITE=$2
    shift 2
    OPTIONS=("$@")
}

# set_command GPUS: RUN_IT, all ranks of one node
set_command() {
    set_ranks "$1"
    prepare_node
    RUN_IT=(python -m torch.distributed.run --standalone --nproc-per-node="$RANKS" -m eval run)
    RUN_IT+=(--checkpoint "$CHECKPOINT" --suite "$SUITE")
}

# is_ours JOB: ends the script where another job has this work, or ours gets nowhere
is_ours() {
    local code=0
    on_head python -m eval.schedule begin --job "$1" "${LEASE[@]}" \
        --restarts "$MAX_RESTARTS_WITHOUT_PROGRESS" -- "$CHECKPOINT" "$SUITE" || code=$?
    case $code in
        0) ;;
        3) exit 0 ;; # left to the other one
        *) exit 1 ;;
    esac
}

# end_step: the ranks end at once; what they have answered is on disk, task by task
end_step() { if ((STEP)); then kill -TERM "$STEP" 2>/dev/null || true; fi; }

on_eval_limit() {
    ASKED=limit
    say "the time limit is near: the job begins again, after the last task that was answered"
    end_step
}

on_eval_term() {
    ASKED=term
    say "SIGTERM: ending"
    end_step
}

# wait_for_ranks: sets STEP_CODE; a trap runs at once, since bash waits here
wait_for_ranks() {
    while :; do
        STEP_CODE=0
        wait "$STEP" || STEP_CODE=$?
        kill -0 "$STEP" 2>/dev/null || break
    done
    STEP=0
}

eval_job() {
    split_work "$@"
    set_command "${EVAL_GPUS:-1}"
    trap on_eval_limit USR1
    trap on_eval_term TERM
    say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST, $RANKS rank(s): $SUITE of $CHECKPOINT"
    is_ours "$SLURM_JOB_ID"
    STEP_CODE=1
    if [[ $ASKED == none ]]; then
        # unlike the trainer's, these ranks shall die of SIGTERM: what counts is on disk
        srun --nodes=1 --ntasks=1 --cpu-bind=none --kill-on-bad-exit=1 "${SRUN_FLAGS[@]}" \
            "${CONTAINER[@]}" "${RUN_IT[@]}" "${OPTIONS[@]}" &
        STEP=$!
        wait_for_ranks
    fi
    ((STEP_CODE)) || exit 0
    case $ASKED in
        limit) requeue ;;
        term) exit 143 ;; # Slurm has put the job back into the queue, or a person has cancelled it
    esac
    exit 1
}

eval_local() {
    unset SLURM_JOB_ID SLURM_RESTART_COUNT # of an interactive job, which is not ours
    split_work "$@"
    set_command "${GPUS_PER_NODE:-}"
    is_ours "local-$(uname -n)-$$"
    trap on_eval_term INT TERM HUP
    "${CONTAINER[@]}" "${RUN_IT[@]}" "${OPTIONS[@]}" &
    STEP=$!
    wait_for_ranks
    exit "$STEP_CODE"
}

entry eval.sh eval_local eval_job "$@"
