#!/bin/bash
# Run sbatch with the settings of slurm/cluster.env, and check the job first.
#
#   bash slurm/submit.sh [sbatch flags] slurm/SCRIPT.sh [arguments]
#
# cluster.env may set sbatch's SBATCH_* variables (partition, account, time limit and so on) and the
# array SBATCH_FLAGS, which the flags given here override. For jobs with GPUs (pretrain_1b3, sweep,
# eval) it also sets the resources per node, which replace the script's #SBATCH lines: GPUS_PER_NODE,
# EVAL_GPUS, GPU_FLAG, SHARED_NODES, CPUS_PER_GPU, MEM_PER_GPU. Before it is queued, a job is checked
# as in its first seconds: of pretrain_1b3.sh the config, options and data, that the nodes divide the
# global batch, and the run's code; of eval.sh the checkpoint, suite, options and staged data; of
# eval_watch.sh the options, as its runs may not exist yet; of eval_report.sh the runs. With
# --dependency or --begin, data, checkpoints and runs may not exist yet either. Prints the output of
# sbatch. Errors print a code and exit with 2.
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
(($#)) || die slurm.usage "expected bash slurm/submit.sh [sbatch flags] slurm/SCRIPT.sh [arguments]"
script=$1
shift
[[ -f $script ]] || die slurm.usage "$script does not exist"

# read_flags: set NODES, GPUS_ASKED per node, HAS, what sbatch's flags and variables set, and WAITS, 1
# if the job starts after others or later, when its data, checkpoint or runs may exist
read_flags() {
    local words=("${SBATCH_FLAGS[@]}" "${flags[@]}") i name value total=''
    NODES=1 GPUS_ASKED=${SBATCH_GPUS_PER_NODE:-} HAS=' ' WAITS=0
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
            --dependency | -d | --begin | -b) WAITS=1 ;;
        esac
    done
    [[ $NODES =~ ^[1-9][0-9]*$ ]] || die slurm.value "--nodes $NODES: expected one integer above 0"
    [[ -z $total ]] || GPUS_ASKED=$((${total##*:} / NODES))
}

# add_flags NAME FLAG...: add FLAGs unless the user's flags set NAME
add_flags() {
    if [[ $HAS != *" $1 "* ]]; then RESOURCES+=("${@:2}"); fi
}

# set_resources SHARED: set RESOURCES, the flags for the resources of each node
set_resources() {
    local cpus=${CPUS_PER_GPU-8} memory=${MEM_PER_GPU:-} flag=${GPU_FLAG---gpus-per-node=}
    local parts=$((GPUS > 0 ? GPUS : RANKS))
    RESOURCES=()
    if ((GPUS)) && [[ -n $flag ]]; then add_flags gpus "$flag$GPUS"; fi
    if [[ $1 != 1 ]]; then
        add_flags share --exclusive
        add_flags memory --mem=0
        return
    fi
    if [[ -n $cpus ]]; then
        [[ $cpus =~ ^[1-9][0-9]*$ ]] || die slurm.value "CPUS_PER_GPU=$cpus: expected an integer above 0"
        add_flags cores "--cpus-per-task=$((cpus * parts))"
    fi
    if [[ -n $memory ]]; then
        [[ $memory =~ ^([1-9][0-9]*)([KMGT]?)$ ]] || die slurm.value "MEM_PER_GPU=$memory: expected a size such as 64G"
        add_flags memory "--mem=$((BASH_REMATCH[1] * parts))${BASH_REMATCH[2]}"
    fi
}

# check_job SCRIPT [arguments]: exit if the job would fail in its first seconds
check_job() {
    local name=$1 with_data=(--data) code=0 said
    shift
    ((!WAITS)) || with_data=()
    case $name in
        pretrain_1b3.sh)
            split_arguments "$@"
            words_of python -m canon_pretrain.cluster.chain code --job none -- --config "$CONFIG" "${ARGUMENTS[@]}"
            plan_job "$NODES" "${with_data[@]}"
            printf 'run folder: %s\n' "$RUN" >&2
            ;;
        sweep.sh) words_of python -m canon_pretrain sweep todo "$@" ;;
        eval.sh) ((WAITS)) || words_of python -m eval.schedule check "$@" ;;
        eval_watch.sh)
            # 1: not finished; a watch may be submitted before there is a run
            said=$(on_head python -m eval submit "$@" --is_finished 2>&1 >/dev/null) || code=$?
            if ((code > 1)) && [[ $said != *'error[run.not_a_run]'* ]]; then
                printf '%s\n' "$said" >&2
                exit 2
            fi
            ;;
        eval_report.sh)
            [[ ${1:--} != -* ]] || die slurm.usage "expected RUN...; see bash slurm/eval_report.sh --help"
            while (($# && !WAITS)) && [[ $1 != -* ]]; do
                [[ -d $1 ]] || die run.not_a_run "$1 does not exist: expected a run (job.dump_folder) or a sweep"
                shift
            done
            ;;
    esac
}

SBATCH_FLAGS=()
need sbatch
load_cluster
unset "${!SLURM_GPUS@}" # set in an interactive job
export CANON_REPO
read_flags
name=${script##*/}
# set by our own programs, which have checked what they submit
is_checked=${CANON_JOB_CHECKED:-0}
unset CANON_JOB_CHECKED
RESOURCES=()
case $name in
    pretrain_1b3.sh | sweep.sh)
        set_ranks "${GPUS_ASKED:-${GPUS_PER_NODE:-8}}"
        set_resources "${SHARED_NODES:-0}"
        ;;
    eval.sh)
        set_ranks "${GPUS_ASKED:-${EVAL_GPUS:-1}}"
        set_resources 1
        ;;
esac
[[ $is_checked == 1 ]] || check_job "$name" "$@"
if [[ $name != @(pretrain_1b3|sweep|eval).sh ]]; then
    exec sbatch "${SBATCH_FLAGS[@]}" "${flags[@]}" "$script" "$@"
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
sed -E '/^#SBATCH --(gpus-per-node|exclusive|mem|cpus-per-task)\b/d' "$script" >"$copy/$name"
sbatch "${RESOURCES[@]}" "${SBATCH_FLAGS[@]}" "${flags[@]}" "$copy/$name" "$@"
