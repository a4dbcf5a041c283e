# shellcheck shell=bash
# What the job scripts share: cluster settings, preflight, ranks on all nodes, requeue or end.
# Sourced by slurm/*.sh. Nothing here is to be edited: settings are in slurm/cluster.env, in the
# environment, or among sbatch's flags.

CANON_REPO=${CANON_REPO:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
PREFLIGHT=${PREFLIGHT:-1}
MAX_RESTARTS_WITHOUT_PROGRESS=${MAX_RESTARTS_WITHOUT_PROGRESS:-3}
PREFLIGHT_TIMEOUT_S=${PREFLIGHT_TIMEOUT_S:-600}
USER_PYTHONPATH=${USER_PYTHONPATH-${PYTHONPATH:-}}
export PYTHONPATH=$CANON_REPO${USER_PYTHONPATH:+:$USER_PYTHONPATH}
export PYTHONUNBUFFERED=1
# of sbatch --export: by it srun would keep from the ranks what cluster.env sets
unset SLURM_EXPORT_ENV

STEP=0        # pid of the srun or torchrun in the background
STEP_CODE=0   # its exit code
ASKED=none    # who asked the launch to stop: see Asked in canon_pretrain/chain.py
RUN=
CODE=        # the snapshot of a run's code that its launches use, RUN/code/NNN
OURS=0       # 1 once the launch has begun: before, RUN may be another job's
# What scontrol is told: the last element of an array to start has the array's own number as its
# SLURM_JOB_ID, by which scontrol would requeue all elements
JOB=${SLURM_JOB_ID:-}
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

# on stderr: a trap may come while the output of a command is being kept
say() { printf '%s slurm: %s\n' "$(date -u +%FT%TZ)" "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# print_header FILE: the comment at its top, for --help
print_header() { sed -n -e '1d' -e '/^#SBATCH/d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$1"; }

# entry SCRIPT LOCAL JOB [arguments]: --help, LOCAL for --local, or JOB inside a Slurm job
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
                die "this is a job script: sbatch slurm/$script, or add --local to run it on this machine"
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
        die "CANON_CLUSTER_ENV=$file: there is no such file; copy slurm/cluster.env.example to it"
    fi
    if ((${#MODULES[@]})); then
        set +u # module's own functions do not bear it
        module load "${MODULES[@]}"
        set -u
    fi
    if [[ -n $VENV ]]; then
        [[ -f $VENV/bin/activate ]] || die "VENV=$VENV has no bin/activate: expected a virtual environment"
        set +u
        # shellcheck disable=SC1091
        source "$VENV/bin/activate"
        set -u
    fi
}

# on_head COMMAND...: on the batch host, in the container where there is one
on_head() {
    if [[ -n ${SLURM_JOB_ID:-} ]] && ((${#SRUN_FLAGS[@]})); then
        srun --overlap --nodes=1 --ntasks=1 "${SRUN_FLAGS[@]}" "${CONTAINER[@]}" "$@"
    else
        "${CONTAINER[@]}" "$@"
    fi
}

# words_of COMMAND...: WORDS, what it prints, each ended by a NUL byte; ends the script if it fails
words_of() {
    local answer
    answer=$(mktemp)
    if ! on_head "$@" >"$answer"; then
        rm -f "$answer"
        exit 2 # the message is above; nothing is submitted or requeued
    fi
    mapfile -d '' -t WORDS <"$answer"
    rm -f "$answer"
}

# set_ranks N: GPUS (0 on CPUs) and RANKS on each node. Inside a job those that Slurm has given it,
# where it counts them, else N; with an empty N all GPUs of this machine
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
    [[ $GPUS =~ ^[0-9]+$ ]] || die "$GPUS GPUs on a node: expected a whole number (GPUS_PER_NODE, EVAL_GPUS)"
    RANKS=${RANKS_PER_NODE:-$((GPUS > 0 ? GPUS : 2))}
    [[ $RANKS =~ ^[1-9][0-9]*$ ]] || die "RANKS_PER_NODE=$RANKS: expected a whole number above 0"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

# prepare_node: caches of compiled kernels on this node's own disk, and as many open files as allowed
prepare_node() {
    local folder=${TMPDIR:-/tmp}
    [[ -d $folder && -w $folder ]] || folder=/tmp
    folder+=/canon_pretrain-$UID
    # in a folder of that name that is another user's, compiled code would be theirs
    mkdir -m 700 "$folder" 2>/dev/null || true
    [[ -d $folder && -O $folder && ! -L $folder ]] || folder=$(mktemp -d "$folder-XXXXXX")
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$folder/triton}
    ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
}

# split_arguments [CONFIG] [--section.key value ...]: into CONFIG and ARGUMENTS
split_arguments() {
    CONFIG=$CANON_REPO/train_configs/nope_canon.toml
    if (($#)) && [[ $1 != -* ]]; then
        CONFIG=$1
        shift
    fi
    ARGUMENTS=("$@")
}

# use_code FOLDER: Python's programs are those of a run's snapshot from now on
use_code() {
    CODE=$1
    # -m would put the working folder first, which may be a repository
    export PYTHONSAFEPATH=1 PYTHONPATH=$CODE${USER_PYTHONPATH:+:$USER_PYTHONPATH}
}

# find_code JOB: a run that is resumed has its own code, and its own lib.sh, whatever is here by now;
# a job that is requeued has the CONFIG that it began with
find_code() {
    local answer lines
    answer=$(on_head python -m canon_pretrain.chain code --job "$1" -- --config "$CONFIG" \
        "${ARGUMENTS[@]}") || exit 2
    mapfile -t lines <<<"$answer"
    [[ -n ${lines[0]} ]] || return 0
    # shellcheck disable=SC1091
    source "${lines[0]}/slurm/lib.sh"
    use_code "${lines[0]}"
    CODE_NOTE=${lines[1]:-}
    CONFIG=${lines[2]:-$CONFIG}
}

# plan_job NODES [--data]: check the job as a whole; sets RUN and CHECKPOINT_BYTES, or ends the script
plan_job() {
    words_of python -m canon_pretrain.preflight job --ranks_per_node "$RANKS" --nodes "$@" -- \
        --config "$CONFIG" "${ARGUMENTS[@]}"
    RUN=${WORDS[0]} CHECKPOINT_BYTES=${WORDS[1]}
}

# -- signals: the trainer stops at RUN/STOP, after the same step on all ranks ---------------------

on_limit() { # USR1: the time limit is near
    if [[ $ASKED == none && -e $RUN/STOP ]]; then
        say "the time limit is near; $RUN/STOP is there already, from someone else: no requeue"
    elif [[ $ASKED == none ]]; then
        ASKED=limit
        say "the time limit is near: asking the trainer to save and stop"
        ask_to_stop
    fi
}

on_term() { # TERM: the job is cancelled or requeued, or a person signals this script
    if [[ $ASKED != term ]]; then
        ASKED=term
        say "SIGTERM: asking the trainer to save and stop"
        ask_to_stop
    fi
}

ask_to_stop() {
    if ((OURS)) && [[ ! -e $RUN/STOP ]]; then : >"$RUN/STOP" || true; fi
}

# wait_for_step: until STEP has ended; sets STEP_CODE. A trap runs at once, since bash waits here
# and not in a foreground command.
wait_for_step() {
    while kill -0 "$STEP" 2>/dev/null; do
        if [[ $ASKED == none ]]; then
            wait "$STEP" || true
        else
            # a trainer that was still starting takes a STOP from before its start for a leftover
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

# What runs on each node. The agent must outlive Slurm's signals: on SIGTERM it would give its
# workers 30 s and then kill them, by USR1 it would die and leave them behind. They handle both
# themselves. The first node keeps the rendezvous; which one has rank 0 is for torchrun to say, and
# the others reach it by Slurm's name for its node (--local-addr).
# shellcheck disable=SC2016
ON_NODE=$(declare -f prepare_node)'
prepare_node
trap "" TERM USR1 USR2
[[ $SLURM_NODEID == 0 ]] && host=1 || host=0
export PET_RDZV_CONF="is_host=$host,join_timeout=${RDZV_TIMEOUT_S:-600}"
export PET_LOCAL_ADDR=$SLURMD_NODENAME
exec "$@"'

# start_ranks NUMBER MODULE [arguments]: torchrun on all nodes, as STEP; NUMBER is 0 or 1, so that
# two launches of one job have rendezvous of their own. --immediate: after a node failure Slurm may
# count the nodes as busy for good, and srun would wait for them until the job's time limit
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

# preflight: 1 where a node is not fit, with BROKEN naming those that may be left out; 2 where the
# ranks could not meet, and no node is known to be the reason
preflight() {
    local folder=$RUN/preflight/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} names
    BROKEN=
    names=$(IFS=,; printf '%s' "${HOSTS[*]}")
    rm -rf "$folder"
    mkdir -p "$folder"
    timeout "$PREFLIGHT_TIMEOUT_S" srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 \
        --cpu-bind=none "${SRUN_FLAGS[@]}" "${CONTAINER[@]}" python -m canon_pretrain.preflight \
        node --report "$folder" --run "$RUN" --bytes "$CHECKPOINT_BYTES" --gpus "$GPUS" &
    STEP=$!
    wait_for_step
    [[ $ASKED == none ]] || return 0
    BROKEN=$(on_head python -m canon_pretrain.preflight verdict --report "$folder" \
        --nodes "$names") || return 1
    start_ranks 1 canon_pretrain.preflight ranks --report "$folder" --gpus "$GPUS"
    wait_for_step
    [[ $ASKED == none ]] || return 0
    BROKEN=$(on_head python -m canon_pretrain.preflight verdict --report "$folder" \
        --nodes "$names" --ranks) || return 2
    say "preflight: ${#HOSTS[@]} node(s), $((NODES * RANKS)) ranks: fit"
}

# -- what comes after -----------------------------------------------------------------------------

job_field() { # NAME: its value in scontrol's description of this job; empty where there is none
    { scontrol show job -o "$JOB" 2>/dev/null || true; } | tr ' ' '\n' | sed -n "s/^$1=//p"
}

# put_back: this job goes back into the queue under its id; 1 where Slurm refuses. A controller that
# does not answer is asked again: a restart of it must not end a chain of days.
put_back() {
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

# requeue: put_back; the script ends
requeue() {
    if put_back; then
        exit 0
    fi
    say "Slurm does not requeue this job (sbatch --requeue is overruled here). To go on, submit it again"
    exit 1
}

# requeue_without NODES: the same, on other nodes
requeue_without() {
    local before try
    before=$(job_field ExcNodeList)
    [[ $before == '(null)' ]] && before=
    if ! put_back; then
        say "Slurm does not requeue this job: submit it again with sbatch --exclude=$1"
        exit 1
    fi
    # only a job that waits lets its nodes be chosen; it waits for two minutes at least
    for try in 1 2 3 4 5; do
        if scontrol update "JobId=$JOB" "ExcNodeList=${before:+$before,}$1"; then
            exit 0
        fi
        sleep "$try"
    done
    say "Slurm does not take $1 out of the job's nodes, and the next launch may meet it again: scancel, then submit again with sbatch --exclude=$1"
    exit 1
}

# after_launch JOB: read what the launch has come to; sets NEXT
after_launch() {
    local answer lines
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        local state preempted
        state=$(job_field JobState)
        preempted=$(job_field PreemptTime)
        if [[ -n $state && $state != RUNNING ]]; then
            ASKED=term # Slurm has cancelled or requeued it
        elif [[ -n $preempted && $preempted != None ]]; then
            ASKED=preempted # Slurm lets the job run on for the partition's GraceTime
        fi
    fi
    [[ $ASKED == none ]] || rm -f "$RUN/STOP"
    answer=$(on_head python -m canon_pretrain.chain end "$RUN" --job "$1" --asked "$ASKED" \
        --restarts "$MAX_RESTARTS_WITHOUT_PROGRESS") || answer=failed
    mapfile -t lines <<<"$answer"
    NEXT=${lines[0]}
    say "$NEXT: ${lines[1]:-what the launch came to cannot be told}"
}

# may_begin JOB: record the launch's begin, or end the script where the chain has to stop. A run
# that is not resumed takes this repository's code
may_begin() {
    local answer take=()
    [[ -n $CODE ]] || take=(--take_code)
    answer=$(on_head python -m canon_pretrain.chain begin "$RUN" --job "$1" \
        --restarts "$MAX_RESTARTS_WITHOUT_PROGRESS" "${take[@]}" -- --config "$CONFIG") || exit 1
    if [[ $answer == code$'\n'* ]]; then
        use_code "${answer#*$'\n'}"
    elif [[ -n $answer ]]; then
        say "${answer/$'\n'/: }"
        exit 1
    fi
    OURS=1
    say "the run's code is $CODE${CODE_NOTE:+, $CODE_NOTE; --run.allow_changes code takes the repository\'s}"
}

# pretrain_job [CONFIG] [--section.key value ...]: one link of a training run, inside a Slurm job
pretrain_job() {
    split_arguments "$@"
    find_code "$SLURM_JOB_ID"
    pretrain_link # of the run's own lib.sh
}

pretrain_link() { # CONFIG and ARGUMENTS are set
    set_ranks "${GPUS_PER_NODE:-8}"
    trap on_limit USR1
    trap on_term TERM
    NODES=$SLURM_JOB_NUM_NODES
    mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    plan_job "$NODES" --data
    mkdir -p "$RUN" || die "the run folder $RUN cannot be made"
    say "job $SLURM_JOB_ID on ${HOSTS[*]}: what follows is in $RUN/slurm.log"
    exec >>"$RUN/slurm.log" 2>&1
    say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on ${HOSTS[*]}, $RANKS rank(s) each"
    may_begin "$SLURM_JOB_ID"
    local fit=0
    BROKEN=
    if [[ $PREFLIGHT == 1 && $ASKED == none ]]; then
        preflight || fit=$?
    fi
    if ((fit == 1)) && [[ -z $BROKEN ]]; then
        say "failed: no node is fit for this run; nothing is requeued"
        exit 1
    fi
    if [[ $ASKED == none && $fit == 0 ]]; then
        start_ranks 0 canon_pretrain.train --config "$CONFIG" "${ARGUMENTS[@]}"
        wait_for_step
        say "srun ended with exit code $STEP_CODE"
    fi
    after_launch "$SLURM_JOB_ID"
    case $NEXT in
        requeue) if [[ -n $BROKEN ]]; then requeue_without "$BROKEN"; else requeue; fi ;;
        failed) exit 1 ;;
    esac
    exit 0
}

# pretrain_local [CONFIG] [--section.key value ...]: the same on this machine, without Slurm
pretrain_local() {
    local job
    unset SLURM_JOB_ID SLURM_RESTART_COUNT # of an interactive job, which is no link of ours
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
    mkdir -p "$RUN" || die "the run folder $RUN cannot be made"
    trap on_term INT TERM HUP
    NEXT=requeue
    while [[ $NEXT == requeue ]]; do
        may_begin "$job"
        (
            trap '' INT TERM HUP USR1 USR2 # Ctrl-C is for this script, which makes STOP
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
