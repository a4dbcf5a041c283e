#!/bin/bash
# Write the report of runs: the job that `canon eval submit` submits after the last evaluation. No
# GPU.
#
#   sbatch [sbatch flags] slurm/eval_report.sh RUN... [options of `canon eval report`]
#   bash slurm/eval_report.sh --local RUN... [options of `canon eval report`]
#   bash slurm/eval_report.sh --help
#
# Settings: slurm/cluster.env.example. `--mark FILE`, before all else, writes FILE after the report.
# Errors print a code and exit with 2.
#SBATCH --job-name=canon-report
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
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

report() {
    local mark=
    if [[ ${1:-} == --mark ]]; then
        mark=$2
        shift 2
    fi
    (($#)) || die slurm.usage "expected RUN...; see bash slurm/eval_report.sh --help"
    on_head python -m eval report "$@"
    if [[ -n $mark ]]; then date -u +%FT%TZ >"$mark"; fi
}

report_local() {
    unset SLURM_JOB_ID # set in an interactive job
    report "$@"
}

entry eval_report.sh report_local report "$@"
