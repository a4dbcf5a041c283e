#!/bin/bash
# Build token shards on many nodes: an array of `build --shard i/N`, then `finish` and `verify`.
#
#   bash slurm/data_prep.sh submit --shards N [--throttle K] [sbatch flags] -- build's options
#   bash slurm/data_prep.sh --local [--shards N] [--] build's options
#   bash slurm/data_prep.sh --help
#
# Build's options are those of `canon data build`: --source, --tokenizer, --out and so on.
# `submit` checks them, submits an array job for the unfinished shards and a job that depends on it
# (afterok), which writes the manifests and verifies all files; it prints both ids. A shard that fails
# cancels the second job: the same command submits what is missing. The result is identical to that
# of one build on one machine. Logs are in the folder DATA.logs, beside --out DATA. K shards run at a
# time (default: all). The same by hand:
#
#   sbatch --parsable --array=1-64 [sbatch flags] slurm/data_prep.sh shard 64 BUILD'S OPTIONS
#   sbatch --dependency=afterok:ID --kill-on-invalid-dep=yes slurm/data_prep.sh finish DATA [limits]
#
# Each job uses its cores: --cpus-per-task. A shard that reaches the time limit, is preempted or loses
# its node is requeued and continues with the next input group. CANON_CLUSTER_ENV, CANON_REPO and
# cluster.env: see slurm/pretrain_1b3.sh --help. Errors print a code and exit with 2.
#SBATCH --job-name=canon-data
#SBATCH --nodes=1
#SBATCH --ntasks=1
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

# take_options: set SHARDS, THROTTLE, FLAGS and, after --, BUILD
take_options() {
    SHARDS='' THROTTLE='' FLAGS=() BUILD=()
    while (($#)); do
        case $1 in
            --)
                shift
                BUILD=("$@")
                break
                ;;
            --shards | --throttle)
                (($# > 1)) || die slurm.value "$1: expected an integer above 0"
                if [[ $1 == --shards ]]; then SHARDS=$2; else THROTTLE=$2; fi
                shift
                ;;
            --shards=*) SHARDS=${1#*=} ;;
            --throttle=*) THROTTLE=${1#*=} ;;
            *) FLAGS+=("$1") ;;
        esac
        shift
    done
    [[ ${SHARDS:-1} =~ ^[1-9][0-9]*$ ]] || die slurm.value "--shards $SHARDS: expected an integer above 0"
    [[ ${THROTTLE:-1} =~ ^[1-9][0-9]*$ ]] || die slurm.value "--throttle $THROTTLE: expected an integer above 0"
}

# plan_build: set LEFT, the unfinished shards; OUT; FINISH, the arguments of finish
plan_build() {
    words_of python -m data_prep build --unbuilt-of "$SHARDS" "${BUILD[@]}"
    LEFT=${WORDS[0]} OUT=$(realpath -m -- "${WORDS[1]}") FINISH=("${WORDS[@]:2}")
}

cores() { printf '%s' "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(nproc)}}"; }

# build_shard I BUILD'S OPTIONS: --workers comes first, so that build's options override it
build_shard() {
    local shard=$1
    shift
    on_head python -m data_prep build --workers "$(cores)" "$@" --shard "$shard"
}

# finish_build DATA [limits]: write the manifests and verify all files
finish_build() {
    on_head python -m data_prep finish "$@"
    on_head python -m data_prep verify "$1" --workers "$(cores)"
}

# count_parts: print the number of finished input groups, of all shards
count_parts() { { find "$OUT/train" -name 'part-*.json' 2>/dev/null || true; } | wc -l; }

end_build() { # with all workers, so that none keeps the lock of an input group
    kill -TERM -- "-$BUILDER" 2>/dev/null || true
    wait "$BUILDER" || true
}

on_near_limit() {
    end_build
    if (($(count_parts) > PARTS)); then
        say "the time limit is near: requeueing, to continue with the next input group"
        requeue
    fi
    say "failed: no input group was finished within the time limit. Submit again with a longer --time"
    exit 1
}

on_end() {
    end_build
    exit 143
}

# shard_job N BUILD'S OPTIONS: build one shard, in a task of an array job
shard_job() {
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || die slurm.not_a_job "expected sbatch --array=1-$1 slurm/data_prep.sh shard $1 ..."
    local code=0
    SHARDS=$1
    shift
    BUILD=("$@")
    plan_build
    PARTS=$(count_parts)
    say "job $SLURM_JOB_ID, shard $SLURM_ARRAY_TASK_ID/$SHARDS, restart ${SLURM_RESTART_COUNT:-0}, $(cores) cores"
    # in the background, as traps wait for foreground commands, and in its own process group
    set -m
    build_shard "$SLURM_ARRAY_TASK_ID/$SHARDS" "${BUILD[@]}" &
    BUILDER=$!
    trap on_near_limit USR1
    trap on_end TERM
    wait "$BUILDER" || code=$?
    exit "$code"
}

submit_build() {
    local comment queued array='' last flags
    take_options "$@"
    [[ -n $SHARDS ]] || die slurm.usage "expected --shards N, the number of jobs"
    need sbatch squeue
    plan_build
    comment=canon-data:$OUT
    queued=$(squeue --me --noheader --format='%A %k' | while read -r id text; do
        if [[ $text == "$comment" ]]; then printf ' %s' "$id"; fi
    done)
    [[ -z $queued ]] || die slurm.queued "jobs that build $OUT are in the queue:$queued. Wait for them, or scancel$queued"
    mkdir -p "$OUT.logs"
    flags=(--parsable "${FLAGS[@]}" "--comment=$comment")
    if [[ -n $LEFT ]]; then
        array=$(bash "$CANON_REPO/slurm/submit.sh" --array="$LEFT${THROTTLE:+%$THROTTLE}" \
            --output="${OUT//%/%%}.logs/%A_%a.log" "${flags[@]}" \
            "$CANON_REPO/slurm/data_prep.sh" shard "$SHARDS" "${BUILD[@]}")
        array=${array%%;*}
        printf 'job %s: shards %s of %s\n' "$array" "$LEFT" "$SHARDS"
        flags+=("--dependency=afterok:$array" --kill-on-invalid-dep=yes)
    else
        printf 'all shards are built\n'
    fi
    last=$(bash "$CANON_REPO/slurm/submit.sh" \
        --job-name=canon-data-finish --output="${OUT//%/%%}.logs/%j-finish.log" "${flags[@]}" \
        "$CANON_REPO/slurm/data_prep.sh" finish "${FINISH[@]}")
    printf 'job %s: finish and verify%s\n' "${last%%;*}" \
        "${array:+, after them; cancelled if a shard fails: then submit again}"
}

build_local() {
    local shard
    if [[ " $* " == *' -- '* || ${1:-} == --shards* ]]; then
        [[ " $* " == *' -- '* ]] || die slurm.usage "expected -- between --shards and build's options"
        take_options "$@"
        ((${#FLAGS[@]} == 0)) || die slurm.usage "${FLAGS[0]}: expected --local [--shards N] [--] build's options"
    else
        take_options -- "$@"
    fi
    SHARDS=${SHARDS:-1}
    plan_build
    for ((shard = 1; shard <= SHARDS; shard++)); do
        build_shard "$shard/$SHARDS" "${BUILD[@]}"
    done
    finish_build "${FINISH[@]}"
}

mode=${1:-}
(($#)) && shift
case $mode in
    -h | --help) print_header "$CANON_REPO/slurm/data_prep.sh" ;;
    submit)
        load_cluster
        submit_build "$@"
        ;;
    --local)
        load_cluster
        build_local "$@"
        ;;
    shard | finish)
        [[ -n ${SLURM_JOB_ID:-} ]] || die slurm.not_a_job "$mode runs in jobs: use submit or --local"
        (($#)) || die slurm.usage "$mode: arguments are missing; see --help"
        load_cluster
        if [[ $mode == shard ]]; then shard_job "$@"; else finish_build "$@"; fi
        ;;
    *) die slurm.usage "'$mode': expected submit, --local or --help" ;;
esac
