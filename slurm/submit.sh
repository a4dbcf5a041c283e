#!/bin/bash
# sbatch with the settings of slurm/cluster.env, and a check before anything is queued.
#
#   bash slurm/submit.sh [sbatch flags] slurm/SCRIPT.sh [arguments]
#
# cluster.env's SBATCH_* variables (partition, account, time limit and so on) are sbatch's own; its
# array SBATCH_FLAGS is put before the flags given here, which win. Of slurm/pretrain_1b3.sh the
# whole job is checked first: its config and options, and that the number of nodes divides the
# global batch. Prints what sbatch prints.
set -euo pipefail

CANON_REPO=${CANON_REPO:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
# shellcheck source=slurm/lib.sh
source "$CANON_REPO/slurm/lib.sh"

flags=()
nodes=1
gpus=''
while (($#)) && [[ $1 != *.sh ]]; do
    case $1 in
        -h | --help)
            print_header "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --nodes=*) nodes=${1#*=} ;;
        -N[0-9]*) nodes=${1#-N} ;;
        --nodes | -N) nodes=${2:-} ;;
        --gpus-per-node=*) gpus=${1#*=} ;;
        --gpus-per-node) gpus=${2:-} ;;
    esac
    flags+=("$1")
    shift
done
(($#)) || die "no job script among the arguments. Usage: bash slurm/submit.sh [sbatch flags] slurm/SCRIPT.sh [arguments]"
script=$1
shift
[[ -f $script ]] || die "$script: there is no such job script"

SBATCH_FLAGS=()
load_cluster
if [[ ${script##*/} == pretrain_1b3.sh ]]; then
    [[ $nodes =~ ^[1-9][0-9]*$ ]] || die "--nodes $nodes: expected one whole number, which must divide the global batch"
    GPUS_PER_NODE=${GPUS_PER_NODE:-${gpus:-${SBATCH_GPUS_PER_NODE:-8}}}
    set_ranks
    split_arguments "$@"
    plan_job "$nodes"
    printf 'run folder: %s\n' "$RUN" >&2
fi
export CANON_REPO
exec sbatch "${SBATCH_FLAGS[@]}" "${flags[@]}" "$script" "$@"
