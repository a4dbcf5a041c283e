# shellcheck shell=bash
# Functions of the job scripts slurm/*.sh: cluster settings, preflight, ranks on all nodes, requeue.
# Settings are in slurm/cluster.env, the environment and sbatch's flags.
#
# A requeued job runs the script that it was submitted with, and a resumed run sources the lib.sh in
# its RUN/code: functions that scripts call, and pretrain_link and local_links, keep their names.

CANON_REPO=${CANON_REPO:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
PREFLIGHT=${PREFLIGHT:-1}
MAX_RESTARTS_WITHOUT_PROGRESS=${MAX_RESTARTS_WITHOUT_PROGRESS:-3}
PREFLIGHT_TIMEOUT_S=${PREFLIGHT_TIMEOUT_S:-600}
USER_PYTHONPATH=${USER_PYTHONPATH-${PYTHONPATH:-}}
export PYTHONPATH=$CANON_REPO${USER_PYTHONPATH:+:$USER_PYTHONPATH}
export PYTHONUNBUFFERED=1
# set by sbatch --export: srun would not pass the variables of cluster.env to the ranks
unset SLURM_EXPORT_ENV

STEP=0        # pid of the srun or torchrun in the background
STEP_CODE=0   # its exit code
ASKED=none    # what requested the stop: StopCause in canon_pretrain/cluster/chain.py
RUN=
CODE=        # the snapshot of the run's code that its launches use, RUN/code/NNN
OURS=0       # 1 once the launch has begun: before that, RUN may belong to another job
# The job's id for scontrol. SLURM_JOB_ID of the last array task to start is the id of the whole
# array, by which scontrol would requeue all tasks
JOB=${SLURM_JOB_ID:-}
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

# On stderr, since a trap may run while stdout is captured; without a command substitution, in which
# bash 5.2 cannot parse the trap of another signal and exits
say() { TZ=UTC0 printf '%(%FT%TZ)T slurm: %s\n' -1 "$*" >&2; }
# die CODE MESSAGE: as canon_pretrain/core/errors.py
die() { printf 'error[%s]: %s\n' "$1" "${*:2}" >&2; exit 2; }

# print_header FILE: print the comment at its top, for --help
print_header() { sed -n -e '1d' -e '/^#SBATCH/d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$1"; }

# entry SCRIPT LOCAL JOB [arguments]: run --help, LOCAL for --local, or JOB in a Slurm job
entry() {
    local script=$1 on_machine=$2 in_job=$3
    shift 3
    case ${1:-} in
        -h | --help) print_header "$CANON_REPO/slurm/$script" ;;
        --local)
            load_cluster
            "$on_machine" "${@:2}"
            ;;
        *)
            [[ -n ${SLURM_JOB_ID:-} ]] ||
                die slurm.not_a_job "submit it with sbatch slurm/$script, or add --local to run it on this machine"
            load_cluster
            "$in_job" "$@"
            ;;
    esac
}

# load_cluster: read cluster.env, load its modules, activate its virtual environment
load_cluster() {
    MODULES=() CONTAINER=() SRUN_FLAGS=() VENV=${VENV:-}
    local file=${CANON_CLUSTER_ENV:-$CANON_REPO/slurm/cluster.env}
    if [[ -f $file ]]; then
        # shellcheck source=slurm/cluster.env.example
        source "$file"
    elif [[ -n ${CANON_CLUSTER_ENV:-} ]]; then
        die slurm.cluster_env "CANON_CLUSTER_ENV=$file does not exist; copy slurm/cluster.env.example to it"
    fi
    if ((${#MODULES[@]})); then
        set +u # module does not work with it
        module load "${MODULES[@]}"
        set -u
    fi
    if [[ -n $VENV ]]; then
        [[ -f $VENV/bin/activate ]] || die slurm.venv "VENV=$VENV has no bin/activate: expected a virtual environment"
        set +u
        # shellcheck disable=SC1091
        source "$VENV/bin/activate"
        set -u
    fi
}

# need COMMAND...: exit unless these commands of Slurm are on PATH
need() {
    local name
    for name in "$@"; do
        command -v "$name" >/dev/null ||
            die slurm.no_slurm "$name not found: submit on a login node of the cluster, or pass --local to a job script"
    done
}

# on_head COMMAND...: run it on the batch host, in the container if there is one
on_head() {
    if [[ -n ${SLURM_JOB_ID:-} ]] && ((${#SRUN_FLAGS[@]})); then
        srun --overlap --nodes=1 --ntasks=1 "${SRUN_FLAGS[@]}" "${CONTAINER[@]}" "$@"
    else
        "${CONTAINER[@]}" "$@"
    fi
}

# words_of COMMAND...: set WORDS to its NUL-terminated output; exit if it fails
words_of() {
    local answer
    answer=$(mktemp)
    if ! on_head "$@" >"$answer"; then
        rm -f "$answer"
        exit 2 # it has printed an error; nothing is submitted or requeued
    fi
    mapfile -d '' -t WORDS <"$answer"
    rm -f "$answer"
}

# set_ranks N: set GPUS (0: CPUs) and RANKS per node: in a job those that Slurm allocated, if it
# counts GPUs, else N; if N is empty, all GPUs of this machine
set_ranks() {
    local given=$1
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        given=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$1}}
    fi
    given=${given##*:} # h100:8
    if [[ ${CANON_CPU:-0} == 1 ]]; then
        GPUS=0
        export CUDA_VISIBLE_DEVICES=
    else
        GPUS=${given:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)}
    fi
    [[ $GPUS =~ ^[0-9]+$ ]] || die slurm.value "$GPUS GPUs per node: expected an integer (GPUS_PER_NODE, EVAL_GPUS)"
    RANKS=${RANKS_PER_NODE:-$((GPUS > 0 ? GPUS : 2))}
    [[ $RANKS =~ ^[1-9][0-9]*$ ]] || die slurm.value "RANKS_PER_NODE=$RANKS: expected an integer above 0"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

# prepare_node: put compiler caches on the node's local disk; raise the limit on open files
prepare_node() {
    local folder=${TMPDIR:-/tmp}
    [[ -d $folder && -w $folder ]] || folder=/tmp
    folder+=/canon_pretrain-$UID
    # a folder of that name may be another user's, with their compiled code
    mkdir -m 700 "$folder" 2>/dev/null || true
    [[ -d $folder && -O $folder && ! -L $folder ]] || folder=$(mktemp -d "$folder-XXXXXX")
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$folder/triton}
    ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
}

# split_arguments [CONFIG] [--section.key value ...]: set CONFIG and ARGUMENTS
split_arguments() {
    CONFIG=$CANON_REPO/train_configs/nope_canon.toml
    if (($#)) && [[ $1 != -* ]]; then
        CONFIG=$1
        shift
    fi
    ARGUMENTS=("$@")
}

# use_code FOLDER: from now on import Python modules from a run's snapshot
use_code() {
    CODE=$1
    # else -m puts the working folder first, which may be a repository
    export PYTHONSAFEPATH=1 PYTHONPATH=$CODE${USER_PYTHONPATH:+:$USER_PYTHONPATH}
}

# find_code JOB: use the snapshot of a resumed run, with its lib.sh, and the CONFIG that a requeued
# job started with, whatever has changed in the repository
find_code() {
    local answer lines
    answer=$(on_head python -m canon_pretrain.cluster.chain code --job "$1" -- --config "$CONFIG" \
        "${ARGUMENTS[@]}") || exit 2
    mapfile -t lines <<<"$answer"
    [[ -n ${lines[0]} ]] || return 0
    # shellcheck disable=SC1091
    source "${lines[0]}/slurm/lib.sh"
    use_code "${lines[0]}"
    CODE_NOTE=${lines[1]:-}
    CONFIG=${lines[2]:-$CONFIG}
}

# make_run_folder: create RUN, which only this user may write: its jobs run RUN/code
make_run_folder() {
    { mkdir -p "${RUN%/*}/" && (umask go-w && mkdir -p "$RUN"); } ||
        die run.unwritable "the run folder $RUN cannot be created"
}

# plan_job NODES [--data]: check the job; set RUN and CHECKPOINT_BYTES, or exit
plan_job() {
    words_of python -m canon_pretrain.cluster.preflight job --ranks_per_node "$RANKS" --gpus "$GPUS" \
        --nodes "$@" -- --config "$CONFIG" "${ARGUMENTS[@]}"
    RUN=${WORDS[0]} CHECKPOINT_BYTES=${WORDS[1]}
}

# -- signals: RUN/STOP makes the trainer stop after the same step on all ranks ---------------------

on_limit() { # USR1: the time limit is near
    if [[ $ASKED == none && -e $RUN/STOP ]]; then
        say "the time limit is near; $RUN/STOP exists already, made by a user: no requeue"
    elif [[ $ASKED == none ]]; then
        ASKED=limit
        say "the time limit is near: the trainer saves and stops"
        ask_to_stop
    fi
}

on_term() { # TERM: the job is cancelled or requeued, or a user signals this script
    if [[ $ASKED != term ]]; then
        ASKED=term
        say "SIGTERM: the trainer saves and stops"
        ask_to_stop
    fi
}

ask_to_stop() {
    if ((OURS)) && [[ ! -e $RUN/STOP ]]; then : >"$RUN/STOP" || true; fi
}

# wait_for_step: wait for the end of STEP; set STEP_CODE. Bash runs traps during `wait`, but not
# during a foreground command.
wait_for_step() {
    while kill -0 "$STEP" 2>/dev/null; do
        if [[ $ASKED == none ]]; then
            wait "$STEP" || true
        else
            # again: a trainer that was still starting removes an older STOP
            ask_to_stop
            sleep 2 &
            wait -n "$STEP" $! || true
        fi
    done
    STEP_CODE=0
    wait "$STEP" || STEP_CODE=$?
    STEP=0
}

# -- ranks on all nodes ---------------------------------------------------------------------------

# Runs on each node. torchrun's agent must ignore Slurm's signals: on SIGTERM it would kill its
# workers after 30 s, on USR1 it would die without them. The workers handle both. The first node
# hosts the rendezvous; torchrun chooses the node of rank 0, which the others reach by Slurm's name
# for it (--local-addr).
# shellcheck disable=SC2016
ON_NODE=$(declare -f prepare_node)'
prepare_node
trap "" TERM USR1 USR2
[[ $SLURM_NODEID == 0 ]] && host=1 || host=0
export PET_RDZV_CONF="is_host=$host,join_timeout=${RDZV_TIMEOUT_S:-600}"
export PET_LOCAL_ADDR=$SLURMD_NODENAME
exec "$@"'

# start_ranks NUMBER MODULE [arguments]: start torchrun on all nodes, as STEP; NUMBER is 0 or 1, so
# that two launches of one job use different rendezvous. --immediate: after a node failure
# Slurm may report the nodes as busy until the job's time limit, and srun would wait for them
start_ranks() {
    local number=$1 restart=${SLURM_RESTART_COUNT:-0}
    local port=$((15000 + (SLURM_JOB_ID * 14 + restart * 2 + number) % 15000))
    shift
    srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=1 --immediate=120 "${SRUN_FLAGS[@]}" \
        bash -c "$ON_NODE" bash "${CONTAINER[@]}" \
        python -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$RANKS" \
        --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-$restart-$number" \
        --rdzv-endpoint="${HOSTS[0]}:$port" --signals-to-handle=SIGINT \
        -m "$@" &
    STEP=$!
}

# preflight: check nodes and ranks; return 1 for a fault of a node, 2 for a fault of ranks, and set
# BROKEN to the nodes to exclude
preflight() {
    local folder=$RUN/preflight/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} names
    BROKEN=
    names=$(IFS=,; printf '%s' "${HOSTS[*]}")
    rm -rf "$folder"
    mkdir -p "$folder"
    timeout "$PREFLIGHT_TIMEOUT_S" srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
        --cpu-bind=none "${SRUN_FLAGS[@]}" "${CONTAINER[@]}" python -m canon_pretrain.cluster.preflight \
        node --report "$folder" --run "$RUN" --bytes "$CHECKPOINT_BYTES" --gpus "$GPUS" &
    STEP=$!
    wait_for_step
    [[ $ASKED == none ]] || return 0
    BROKEN=$(on_head python -m canon_pretrain.cluster.preflight verdict --report "$folder" \
        --nodes "$names") || return 1
    start_ranks 1 canon_pretrain.cluster.preflight ranks --report "$folder" --gpus "$GPUS"
    wait_for_step
    [[ $ASKED == none ]] || return 0
    BROKEN=$(on_head python -m canon_pretrain.cluster.preflight verdict --report "$folder" \
        --nodes "$names" --ranks) || return 2
    say "preflight: ${#HOSTS[@]} node(s), $((NODES * RANKS)) ranks: ok"
}

# -- after a launch --------------------------------------------------------------------------------

job_field() { # NAME: print its value in scontrol's description of this job, if any
    { scontrol show job -o "$JOB" 2>/dev/null || true; } | tr ' ' '\n' | sed -n "s/^$1=//p"
}

# requeue_job: requeue this job under its id; return 1 if Slurm refuses. Retries if the controller
# does not answer, since its restart must not end a job chain.
requeue_job() {
    local words try
    trap '' TERM USR1 # Slurm now ends this script
    for ((try = 1; try <= ${REQUEUE_TRIES:-20}; try++)); do
        words=$(scontrol requeue "$JOB" 2>&1) && return 0
        say "scontrol requeue $JOB: $words"
        [[ $words =~ contact|timed\ out|Zero\ Bytes|ommunication|onnection|temporarily|standby ]] ||
            return 1
        sleep "${REQUEUE_PAUSE_S:-15}"
    done
    return 1
}

# requeue: requeue this job and exit
requeue() {
    if requeue_job; then
        exit 0
    fi
    say "Slurm refused to requeue this job (the cluster overrides sbatch --requeue): submit it again"
    exit 1
}

# requeue_without NODES: requeue this job on other nodes and exit
requeue_without() {
    local before try
    before=$(job_field ExcNodeList)
    [[ $before == '(null)' ]] && before=
    if ! requeue_job; then
        say "Slurm refused to requeue this job: submit it again with sbatch --exclude=$1"
        exit 1
    fi
    # possible only for a pending job; a requeued one is pending for at least two minutes
    for try in 1 2 3 4 5; do
        if scontrol update "JobId=$JOB" "ExcNodeList=${before:+$before,}$1"; then
            exit 0
        fi
        sleep "$try"
    done
    say "Slurm did not exclude $1 from the job's nodes: scancel it and submit again with sbatch --exclude=$1"
    exit 1
}

# after_launch JOB: evaluate the launch that has ended; set NEXT, an Action of chain.py
after_launch() {
    local answer lines
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        local state preempted
        state=$(job_field JobState)
        preempted=$(job_field PreemptTime)
        if [[ -n $state && $state != RUNNING ]]; then
            ASKED=term # Slurm has cancelled or requeued it
        elif [[ -n $preempted && $preempted != None ]]; then
            ASKED=preempted # the job may run for the partition's GraceTime
        fi
    fi
    [[ $ASKED == none ]] || rm -f "$RUN/STOP"
    answer=$(on_head python -m canon_pretrain.cluster.chain end "$RUN" --job "$1" --asked "$ASKED" \
        --restarts "$MAX_RESTARTS_WITHOUT_PROGRESS") || answer=failed
    mapfile -t lines <<<"$answer"
    NEXT=${lines[0]}
    say "$NEXT: ${lines[1]:-the outcome of the launch is unknown}"
}

# begin_launch JOB: record the start of the launch, or exit if the job chain must end. A new run
# takes a snapshot of this repository's code
begin_launch() {
    local answer take=()
    [[ -n $CODE ]] || take=(--take_code)
    answer=$(on_head python -m canon_pretrain.cluster.chain begin "$RUN" --job "$1" \
        --restarts "$MAX_RESTARTS_WITHOUT_PROGRESS" "${take[@]}" -- --config "$CONFIG") || exit 1
    if [[ $answer == code$'\n'* ]]; then
        use_code "${answer#*$'\n'}"
    elif [[ -n $answer ]]; then
        say "${answer/$'\n'/: }"
        exit 1
    fi
    OURS=1
    say "using the code in $CODE${CODE_NOTE:+, $CODE_NOTE; --run.allow_changes code uses the repository\'s}"
}

# pretrain_job [CONFIG] [--section.key value ...]: one launch of a run, in a Slurm job
pretrain_job() {
    split_arguments "$@"
    find_code "$SLURM_JOB_ID"
    pretrain_link # that of the run's lib.sh
}

pretrain_link() { # CONFIG and ARGUMENTS are set
    set_ranks "${GPUS_PER_NODE:-8}"
    trap on_limit USR1
    trap on_term TERM
    NODES=$SLURM_JOB_NUM_NODES
    mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    plan_job "$NODES" --data
    make_run_folder
    say "job $SLURM_JOB_ID on ${HOSTS[*]}: continued in $RUN/slurm.log"
    exec >>"$RUN/slurm.log" 2>&1
    say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on ${HOSTS[*]}, $RANKS rank(s) each"
    begin_launch "$SLURM_JOB_ID"
    local fit=0
    BROKEN=
    if [[ $PREFLIGHT == 1 && $ASKED == none ]]; then
        preflight || fit=$?
    fi
    if ((fit == 1)) && [[ -z $BROKEN ]]; then
        say "failed: the preflight found a fault that is not that of a node; not requeued"
        exit 1
    fi
    if [[ $ASKED == none && $fit == 0 ]]; then
        start_ranks 0 canon_pretrain.train --config "$CONFIG" "${ARGUMENTS[@]}"
        wait_for_step
        say "srun exited with code $STEP_CODE"
    fi
    after_launch "$SLURM_JOB_ID"
    case $NEXT in
        requeue) if [[ -n $BROKEN ]]; then requeue_without "$BROKEN"; else requeue; fi ;;
        failed) exit 1 ;;
    esac
    exit 0
}

# pretrain_local [CONFIG] [--section.key value ...]: all launches of a run, without Slurm
pretrain_local() {
    local job
    unset SLURM_JOB_ID SLURM_RESTART_COUNT # set in an interactive job
    split_arguments "$@"
    job=local-$(uname -n)-$$-$(date +%s)
    find_code "$job"
    local_links "$job"
}

local_links() {
    local job=$1
    set_ranks "${GPUS_PER_NODE:-}"
    prepare_node
    plan_job 1 --data
    make_run_folder
    trap on_term INT TERM HUP
    NEXT=requeue
    while [[ $NEXT == requeue ]]; do
        begin_launch "$job"
        (
            trap '' INT TERM HUP USR1 USR2 # this script handles Ctrl-C
            exec "${CONTAINER[@]}" python -m torch.distributed.run --standalone \
                --nproc-per-node="$RANKS" --signals-to-handle=SIGQUIT \
                -m canon_pretrain.train --config "$CONFIG" "${ARGUMENTS[@]}"
        ) &
        STEP=$!
        wait_for_step
        after_launch "$job"
    done
    [[ $NEXT == failed ]] && exit 1
    exit 0
}
