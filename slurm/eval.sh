#!/bin/bash
# Evaluate one checkpoint on one suite, on one or several GPUs of a node.
#
#   sbatch [sbatch flags] slurm/eval.sh RUN/checkpoint/step-N SUITE [options of `canon eval run`]
#   bash slurm/submit.sh [sbatch flags] slurm/eval.sh RUN/checkpoint/step-N SUITE [...]
#   bash slurm/eval.sh --local RUN/checkpoint/step-N SUITE [...]
#   bash slurm/eval.sh --help
#
# `canon eval submit` submits it for each checkpoint and suite of a run. SUITE is a suite, a task
# or the path of a task's YAML. Results, and the log of jobs of `eval submit`, are written to
# RUN/evals/step-N/SUITE. A job that is requeued or submitted again continues after the last finished
# task.
#
# In the environment, or in slurm/cluster.env (see cluster.env.example beside this script):
#   EVAL_GPUS=1          GPUs that slurm/submit.sh and `eval submit` request, one rank each; with
#                        sbatch itself --gpus-per-node=8
#   GPU_FLAG, CPUS_PER_GPU, MEM_PER_GPU   sbatch's flag for GPUs, and cores and memory per GPU
#   CANON_CPU=1          on CPUs, RANKS_PER_NODE=2 ranks; with sbatch itself --gpus-per-node=0
#   CANON_EVAL_DATA      folder written by `canon eval stage`
#   MAX_RESTARTS_WITHOUT_PROGRESS=3   consecutive restarts without a finished task
#   CANON_CLUSTER_ENV    file to read instead of slurm/cluster.env
#   CANON_REPO           this repository, if the job is submitted from elsewhere
#
# The job is requeued 60 s before the time limit (--time; change that with --signal=B:USR1@120), and
# after preemption or a node failure, but not after other failures or scancel; `eval submit` submits
# a failed job again, --retries times. Errors print a code and exit with 2.
#SBATCH --job-name=canon-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
set -euo pipefail

# Slurm runs a copy of this script: the repository is CANON_REPO, or contains the script, or contains
# the folder in which the job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error[slurm.repository]: submit in the repository, or set CANON_REPO to it" >&2 && exit 2; }

# split_work [--lease ID] CHECKPOINT SUITE [options]: set LEASE, CHECKPOINT, SUITE and OPTIONS
split_work() {
    LEASE=()
    if [[ ${1:-} == --lease ]]; then
        LEASE=(--lease "$2")
        shift 2
    fi
    if (($# < 2)) || [[ $1 == -* || $2 == -* ]]; then
        die slurm.usage "expected RUN/checkpoint/step-N and SUITE; see bash slurm/eval.sh --help"
    fi
    CHECKPOINT=$1 SUITE=$2
    shift 2
    OPTIONS=("$@")
}

# set_command GPUS: set RUN_IT, the command of all ranks
set_command() {
    set_ranks "$1"
    prepare_node
    RUN_IT=(python -m torch.distributed.run --standalone --nproc-per-node="$RANKS" -m eval run)
    RUN_IT+=(--checkpoint "$CHECKPOINT" --suite "$SUITE")
}

# begin_evaluation JOB: exit if another job does this work, or after too many restarts
begin_evaluation() {
    local code=0
    on_head python -m eval.schedule begin --job "$1" "${LEASE[@]}" \
        --restarts "$MAX_RESTARTS_WITHOUT_PROGRESS" -- "$CHECKPOINT" "$SUITE" || code=$?
    case $code in
        0) ;;
        3) exit 0 ;; # another job does it
        *) exit 1 ;;
    esac
}

# end_step: end the ranks at once; finished tasks are on disk
end_step() { if ((STEP)); then kill -TERM "$STEP" 2>/dev/null || true; fi; }

on_eval_limit() {
    ASKED=limit
    say "the time limit is near: requeueing, to continue after the last finished task"
    end_step
}

on_eval_term() {
    ASKED=term
    say "SIGTERM: ending"
    end_step
}

# wait_for_ranks: wait for the end of STEP; set STEP_CODE. Bash runs traps during `wait`.
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
    begin_evaluation "$SLURM_JOB_ID"
    STEP_CODE=1
    if [[ $ASKED == none ]]; then
        # unlike the trainer's, these ranks end on SIGTERM: finished tasks are on disk
        srun --nodes=1 --ntasks=1 --cpu-bind=none --kill-on-bad-exit=1 "${SRUN_FLAGS[@]}" \
            "${CONTAINER[@]}" "${RUN_IT[@]}" "${OPTIONS[@]}" &
        STEP=$!
        wait_for_ranks
    fi
    ((STEP_CODE)) || exit 0
    case $ASKED in
        limit) requeue ;;
        term) exit 143 ;; # Slurm has requeued the job, or a user has cancelled it
    esac
    exit 1
}

eval_local() {
    unset SLURM_JOB_ID SLURM_RESTART_COUNT # set in an interactive job
    split_work "$@"
    set_command "${GPUS_PER_NODE:-}"
    begin_evaluation "local-$(uname -n)-$$"
    trap on_eval_term INT TERM HUP
    "${CONTAINER[@]}" "${RUN_IT[@]}" "${OPTIONS[@]}" &
    STEP=$!
    wait_for_ranks
    exit "$STEP_CODE"
}

entry eval.sh eval_local eval_job "$@"
