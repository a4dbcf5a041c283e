#!/bin/bash
# Write the report of some runs: the job that `python -m eval submit` submits after the last
# evaluation. No GPU.
#
#   sbatch [sbatch flags] slurm/eval_report.sh RUN... [options of `python -m eval report`]
#   bash slurm/eval_report.sh --local RUN... [options of `python -m eval report`]
#   bash slurm/eval_report.sh --help
#
# In the environment, or in slurm/cluster.env: see slurm/cluster.env.example. `--mark FILE`, before
# anything else, makes FILE once the report stands.
#SBATCH --job-name=canon-report
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this script from a folder of its own: the repository is found by where the
# job was submitted
find_repository() {
    local folder
    folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ ! -f $folder/slurm/lib.sh ]]; then
        folder=${SLURM_SUBMIT_DIR:-$PWD}
        while [[ ! -f $folder/slurm/lib.sh && $folder == */* ]]; do folder=${folder%/*}; done
    fi
    printf '%s' "$folder"
}
CANON_REPO=${CANON_REPO:-$(find_repository)}
if [[ ! -f $CANON_REPO/slurm/lib.sh ]]; then
    echo "error: no slurm/lib.sh in CANON_REPO=$CANON_REPO: submit from inside the repository, or set CANON_REPO to it" >&2
    exit 2
fi
# shellcheck source=slurm/lib.sh
source "$CANON_REPO/slurm/lib.sh"

report() {
    local mark=
    if [[ ${1:-} == --mark ]]; then
        mark=$2
        shift 2
    fi
    (($#)) || die "expected RUN...; see bash slurm/eval_report.sh --help"
    on_head python -m eval report "$@"
    if [[ -n $mark ]]; then date -u +%FT%TZ >"$mark"; fi
}

case ${1:-} in
    -h | --help) print_header "$CANON_REPO/slurm/eval_report.sh" ;;
    --local)
        shift
        unset SLURM_JOB_ID
        load_cluster
        report "$@"
        ;;
    *)
        [[ -n ${SLURM_JOB_ID:-} ]] ||
            die "this is a job script: sbatch slurm/eval_report.sh, or add --local to run it on this machine"
        load_cluster
        report "$@"
        ;;
esac
