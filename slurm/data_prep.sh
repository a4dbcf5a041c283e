#!/bin/bash
# Build token shards on many nodes: an array of `build --shard i/N`, then `finish` and `verify`.
#
#   bash slurm/data_prep.sh submit --shards N [--throttle K] [sbatch flags] -- build's options
#   bash slurm/data_prep.sh --local [--shards N] [--] build's options
#   bash slurm/data_prep.sh --help
#
# Build's options are those of `python -m data_prep build`: --source, --tokenizer, --out and so on.
# `submit` checks them, submits an array job of the shards that still have units to build, and a
# job that waits for all of them (afterok), writes the manifests and reads everything once; it
# prints both ids. A shard that fails cancels that second job: the same command again does what is
# missing, and no more. The result is, byte for byte, that of one build on one machine. What the
# jobs say is in the folder DATA.logs, beside --out DATA. K shards run at a time (default: as many as
# the cluster has room for). The jobs by hand, which is what `submit` does:
#
#   sbatch --parsable --array=1-64 [sbatch flags] slurm/data_prep.sh shard 64 BUILD'S OPTIONS
#   sbatch --dependency=afterok:ID --kill-on-invalid-dep=yes slurm/data_prep.sh finish DATA [limits]
#
# Each job uses the cores that it has: --cpus-per-task. A shard that reaches the time limit is
# requeued and goes on with its next unit, one that is preempted or loses its node as well.
# CANON_CLUSTER_ENV, CANON_REPO and cluster.env: as in slurm/pretrain_1b3.sh --help.
#SBATCH --job-name=canon-data
#SBATCH --nodes=1
#SBATCH --ntasks=1
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

# take_options: SHARDS, THROTTLE, FLAGS and, behind --, BUILD
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
                (($# > 1)) || die "$1: expected a whole number above 0"
                if [[ $1 == --shards ]]; then SHARDS=$2; else THROTTLE=$2; fi
                shift
                ;;
            --shards=*) SHARDS=${1#*=} ;;
            --throttle=*) THROTTLE=${1#*=} ;;
            *) FLAGS+=("$1") ;;
        esac
        shift
    done
    [[ ${SHARDS:-1} =~ ^[1-9][0-9]*$ ]] || die "--shards $SHARDS: expected a whole number above 0"
    [[ ${THROTTLE:-1} =~ ^[1-9][0-9]*$ ]] || die "--throttle $THROTTLE: expected a whole number above 0"
}

# plan_build: LEFT, the shards with work; OUT; FINISH, the arguments of finish
plan_build() {
    words_of python -m data_prep build --unbuilt-of "$SHARDS" "${BUILD[@]}"
    LEFT=${WORDS[0]} OUT=$(realpath -m -- "${WORDS[1]}") FINISH=("${WORDS[@]:2}")
}

cores() { printf '%s' "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(nproc)}}"; }

# build_shard I BUILD'S OPTIONS: the cores come first, so that build's own --workers wins
build_shard() {
    local shard=$1
    shift
    on_head python -m data_prep build --workers "$(cores)" "$@" --shard "$shard"
}

# finish_build DATA [limits]: manifests, then every byte
finish_build() {
    on_head python -m data_prep finish "$@"
    on_head python -m data_prep verify "$1" --workers "$(cores)"
}

# parts_in: how many parts the folder has, of all shards
parts_in() { { find "$OUT/train" -name 'part-*.json' 2>/dev/null || true; } | wc -l; }

end_build() { # and all of its workers, so that none is left to hold a unit's lock
    kill -TERM -- "-$BUILDER" 2>/dev/null || true
    wait "$BUILDER" || true
}

on_near_limit() {
    end_build
    if (($(parts_in) > PARTS)); then
        say "the time limit is near: requeued, to go on with the next unit"
        requeue
    fi
    say "failed: no shard has finished a unit since this job began, and the time limit is near. Submit again with a longer --time"
    exit 1
}

on_end() {
    end_build
    exit 143
}

# shard_job N BUILD'S OPTIONS: one shard, inside an element of an array job
shard_job() {
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || die "no array job: sbatch --array=1-$1 slurm/data_prep.sh shard $1 ..."
    local code=0
    SHARDS=$1
    shift
    BUILD=("$@")
    plan_build
    PARTS=$(parts_in)
    say "job $SLURM_JOB_ID, shard $SLURM_ARRAY_TASK_ID/$SHARDS, restart ${SLURM_RESTART_COUNT:-0}, $(cores) cores"
    # in the background, since a trap waits for a foreground command; in a process group of its own
    set -m
    build_shard "$SLURM_ARRAY_TASK_ID/$SHARDS" "${BUILD[@]}" &
    BUILDER=$!
    trap on_near_limit USR1
    trap on_end TERM
    wait "$BUILDER" || code=$?
    exit "$code"
}

submit_build() {
    local mark queued array='' last flags
    take_options "$@"
    [[ -n $SHARDS ]] || die "--shards N is missing: into how many jobs is the build to be split?"
    plan_build
    mark=canon-data:$OUT
    queued=$(squeue --me --noheader --format='%A %k' | while read -r id comment; do
        if [[ $comment == "$mark" ]]; then printf ' %s' "$id"; fi
    done)
    [[ -z $queued ]] || die "jobs are at work on $OUT already:$queued. Wait for them, or scancel$queued"
    mkdir -p "$OUT.logs"
    flags=(--parsable "${FLAGS[@]}" "--comment=$mark")
    if [[ -n $LEFT ]]; then
        array=$(bash "$CANON_REPO/slurm/submit.sh" --array="$LEFT${THROTTLE:+%$THROTTLE}" \
            --output="${OUT//%/%%}.logs/%A_%a.log" "${flags[@]}" \
            "$CANON_REPO/slurm/data_prep.sh" shard "$SHARDS" "${BUILD[@]}")
        array=${array%%;*}
        printf 'job %s: shards %s of %s\n' "$array" "$LEFT" "$SHARDS"
        flags+=("--dependency=afterok:$array" --kill-on-invalid-dep=yes)
    else
        printf 'all units are built\n'
    fi
    last=$(bash "$CANON_REPO/slurm/submit.sh" \
        --job-name=canon-data-finish --output="${OUT//%/%%}.logs/%j-finish.log" "${flags[@]}" \
        "$CANON_REPO/slurm/data_prep.sh" finish "${FINISH[@]}")
    printf 'job %s: finish and verify%s\n' "${last%%;*}" \
        "${array:+, when they have ended well; cancelled if one of them fails: then submit again}"
}

build_local() {
    local shard
    if [[ " $* " == *' -- '* || ${1:-} == --shards* ]]; then
        [[ " $* " == *' -- '* ]] || die "expected -- between --shards and build's options"
        take_options "$@"
        ((${#FLAGS[@]} == 0)) || die "${FLAGS[0]}: --local knows --shards N and, behind --, build's options"
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
        [[ -n ${SLURM_JOB_ID:-} ]] || die "$mode: this is for jobs; bash slurm/data_prep.sh submit, or --local"
        (($#)) || die "$mode: its arguments are missing; see --help"
        load_cluster
        if [[ $mode == shard ]]; then shard_job "$@"; else finish_build "$@"; fi
        ;;
    *) die "'$mode': expected submit, --local or --help" ;;
esac
