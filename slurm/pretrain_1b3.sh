#!/bin/bash
# Train one run on 1 to N nodes, link after link, until RUN/DONE.
#
#   sbatch [--nodes N] [sbatch flags] slurm/pretrain_1b3.sh [CONFIG] [--section.key value ...]
#   bash slurm/submit.sh [--nodes N] [sbatch flags] slurm/pretrain_1b3.sh [CONFIG] [...]
#   bash slurm/pretrain_1b3.sh --local [CONFIG] [--section.key value ...]
#   bash slurm/pretrain_1b3.sh --help
#
# CONFIG is a TOML file (default: train_configs/nope_canon.toml of this repository); what follows is
# canon_pretrain.train's. The run folder is the config's job.dump_folder, or --job.dump_folder; the
# job writes to its slurm.log. slurm/submit.sh reads slurm/cluster.env, refuses a number of nodes
# that does not divide the global batch before anything is queued, and calls sbatch; with sbatch
# itself such a job ends in its first seconds, with the same message, and gets what the #SBATCH lines
# below ask for: whole nodes of 8 GPUs. --local does all this on this machine, without Slurm.
#
# The run's code is copied to RUN/code when it begins, and each later link is launched from there,
# with the CONFIG that its job began with: what a git pull changes meanwhile changes no run.
# --run.allow_changes code resumes with this repository's code, and --checkpoint.fresh begins with it.
#
# In the environment, or in slurm/cluster.env (see cluster.env.example beside this script):
#   GPUS_PER_NODE=8      GPUs that slurm/submit.sh asks for on each node; a rank each
#   SHARED_NODES=1       take these GPUs' share of a node (CPUS_PER_GPU, MEM_PER_GPU), not all of it
#   GPU_FLAG             the flag that asks for GPUs, such as --gres=gpu:
#   CANON_CPU=1          train on CPUs, RANKS_PER_NODE=2 ranks on each node
#   PREFLIGHT=0          leave out the checks of each node before each launch
#   MAX_RESTARTS_WITHOUT_PROGRESS=3   failed restarts in a row, without a new checkpoint, that end it
#   CANON_CLUSTER_ENV    another file than slurm/cluster.env
#   CANON_REPO           this repository, where the job is submitted from outside of it
#
# The time limit (--time): 300 s before it the trainer saves and stops, and the job is requeued;
# sbatch --signal=B:USR1@600 makes that earlier. Preemption, a failed node, a crash: requeued as well.
# A config that is refused, RUN/STOP, scancel, or too many failed restarts: not requeued.
#SBATCH --job-name=canon-pretrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

# Slurm runs a copy of this script: the repository is CANON_REPO, or around it, or around where the
# job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error: submit from inside the repository, or set CANON_REPO to it" >&2 && exit 2; }

entry pretrain_1b3.sh pretrain_local pretrain_job "$@"
