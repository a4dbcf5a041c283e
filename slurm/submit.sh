#!/bin/bash
# sbatch with the settings of slurm/cluster.env, and a check before anything is queued.
#
#   bash slurm/submit.sh [sbatch flags] slurm/SCRIPT.sh [arguments]
#
# cluster.env's SBATCH_* variables (partition, account, time limit and so on) are sbatch's own; its
# array SBATCH_FLAGS is put before the flags given here, which win. Of a job with GPUs (pretrain_1b3,
# sweep, eval) cluster.env also says how many, how they are asked for, and whether its nodes are
# shared: GPUS_PER_NODE, EVAL_GPUS, GPU_FLAG, SHARED_NODES, CPUS_PER_GPU, MEM_PER_GPU. sbatch then
# gets the script without its #SBATCH lines on these. Of slurm/pretrain_1b3.sh the whole job is
# checked first: its config and options, and that the number of nodes divides the global batch.
# Prints what sbatch prints.
set -euo pipefail

# shellcheck source=slurm/lib.sh
source "${CANON_REPO:-$(dirname "${BASH_SOURCE[0]}")/..}/slurm/lib.sh"

flags=()
while (($#)) && [[ $1 != *.sh ]]; do
    if [[ $1 == -h || $1 == --help ]]; then
        print_header "${BASH_SOURCE[0]}"
        exit 0
    fi
    flags+=("$1")
    shift
done
(($#)) || die "no job script among the arguments. Usage: bash slurm/submit.sh [sbatch flags] slurm/SCRIPT.sh [arguments]"
script=$1
shift
[[ -f $script ]] || die "$script: there is no such job script"

# read_flags: NODES, the GPUS_ASKED on each, and HAS, what the flags and sbatch's variables settle
read_flags() {
    local words=("${SBATCH_FLAGS[@]}" "${flags[@]}") i name value total=''
    NODES=1 GPUS_ASKED=${SBATCH_GPUS_PER_NODE:-} HAS=' '
    [[ -z ${SBATCH_GPUS_PER_NODE:-}${SBATCH_GPUS:-}${SBATCH_GRES:-} ]] || HAS+='gpus '
    [[ -z ${SBATCH_EXCLUSIVE:-} ]] || HAS+='share '
    [[ -z ${SBATCH_MEM_PER_NODE:-}${SBATCH_MEM_PER_CPU:-}${SBATCH_MEM_PER_GPU:-} ]] || HAS+='memory '
    for ((i = 0; i < ${#words[@]}; i++)); do
        name=${words[i]%%=*} value=${words[i]#*=}
        [[ ${words[i]} == *=* ]] || value=${words[i + 1]:-}
        case $name in
            --nodes | -N) NODES=$value ;;
            -N[0-9]*) NODES=${name#-N} ;;
            --gpus-per-node | --gpus-per-task) GPUS_ASKED=$value HAS+='gpus ' ;;
            --gpus | -G) total=$value HAS+='gpus ' ;;
            --gres)
                HAS+='gpus '
                if [[ $value =~ gpu(:[^:,]*[^:,0-9][^:,]*)?(:([0-9]+))? ]]; then
                    GPUS_ASKED=${BASH_REMATCH[3]:-1}
                fi
                ;;
            --exclusive | --oversubscribe | -s) HAS+='share ' ;;
            --mem | --mem-per-*) HAS+='memory ' ;;
            --cpus-per-* | -c) HAS+='cores ' ;;
        esac
    done
    [[ $NODES =~ ^[1-9][0-9]*$ ]] || die "--nodes $NODES: expected one whole number, which must divide the global batch"
    [[ -z $total ]] || GPUS_ASKED=$((${total##*:} / NODES))
}

# ask NAME FLAG...: FLAGs, unless the user's own flags settle NAME
ask() {
    if [[ $HAS != *" $1 "* ]]; then RESOURCES+=("${@:2}"); fi
}

# set_resources SHARED: RESOURCES, what the job needs of each node
set_resources() {
    local cpus=${CPUS_PER_GPU-8} memory=${MEM_PER_GPU:-} flag=${GPU_FLAG---gpus-per-node=}
    local parts=$((GPUS > 0 ? GPUS : RANKS))
    RESOURCES=()
    if ((GPUS)) && [[ -n $flag ]]; then ask gpus "$flag$GPUS"; fi
    if [[ $1 != 1 ]]; then
        ask share --exclusive
        ask memory --mem=0
        return
    fi
    if [[ -n $cpus ]]; then
        [[ $cpus =~ ^[1-9][0-9]*$ ]] || die "CPUS_PER_GPU=$cpus: expected a whole number above 0"
        ask cores "--cpus-per-task=$((cpus * parts))"
    fi
    if [[ -n $memory ]]; then
        [[ $memory =~ ^([1-9][0-9]*)([KMGT]?)$ ]] || die "MEM_PER_GPU=$memory: expected a size such as 64G"
        ask memory "--mem=$((BASH_REMATCH[1] * parts))${BASH_REMATCH[2]}"
    fi
}

SBATCH_FLAGS=()
load_cluster
unset "${!SLURM_GPUS@}" # of an interactive job, which is not ours
export CANON_REPO
read_flags
name=${script##*/}
case $name in
    pretrain_1b3.sh | sweep.sh)
        set_ranks "${GPUS_ASKED:-${GPUS_PER_NODE:-8}}"
        set_resources "${SHARED_NODES:-0}"
        ;;
    eval.sh)
        set_ranks "${GPUS_ASKED:-${EVAL_GPUS:-1}}"
        set_resources 1
        ;;
    *) exec sbatch "${SBATCH_FLAGS[@]}" "${flags[@]}" "$script" "$@" ;;
esac
if [[ $name == pretrain_1b3.sh ]]; then
    split_arguments "$@"
    plan_job "$NODES"
    printf 'run folder: %s\n' "$RUN" >&2
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
sed -E '/^#SBATCH --(gpus-per-node|exclusive|mem|cpus-per-task)\b/d' "$script" >"$copy/$name"
sbatch "${RESOURCES[@]}" "${SBATCH_FLAGS[@]}" "${flags[@]}" "$copy/$name" "$@"
