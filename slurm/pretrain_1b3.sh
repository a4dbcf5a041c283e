#!/bin/bash
# Train one run on 1 to N nodes, requeued until RUN/DONE.
#
#   sbatch [--nodes N] [sbatch flags] slurm/pretrain_1b3.sh [CONFIG] [--section.key value ...]
#   bash slurm/submit.sh [--nodes N] [sbatch flags] slurm/pretrain_1b3.sh [CONFIG] [...]
#   bash slurm/pretrain_1b3.sh --local [CONFIG] [--section.key value ...]
#   bash slurm/pretrain_1b3.sh --help
#
# CONFIG is a TOML file (default: train_configs/nope_canon.toml of this repository); the options are
# those of canon_pretrain.train. The job writes to RUN/slurm.log, where RUN is job.dump_folder.
# slurm/submit.sh reads slurm/cluster.env and checks the job before it is queued. With sbatch itself
# the job is checked when it starts, and gets the resources of the #SBATCH lines below: whole nodes
# of 8 GPUs. --local trains on this machine, without Slurm.
#
# The code is copied to RUN/code at the first launch. Later launches use it, and restarts use the
# CONFIG that their job started with: a git pull does not affect a run. Resume with --run.allow_changes
# code, or start over with --checkpoint.fresh, to use this repository's code.
#
# In the environment, or in slurm/cluster.env (see cluster.env.example beside this script):
#   GPUS_PER_NODE=8      GPUs per node that slurm/submit.sh requests; one rank each
#   SHARED_NODES=1       request these GPUs' part of a node (CPUS_PER_GPU, MEM_PER_GPU), not all of it
#   GPU_FLAG             sbatch's flag for GPUs, such as --gres=gpu:
#   CANON_CPU=1          train on CPUs with RANKS_PER_NODE=2 ranks per node
#   PREFLIGHT=0          skip the checks of all nodes before each launch
#   MAX_RESTARTS_WITHOUT_PROGRESS=3   consecutive failed restarts without a new checkpoint
#   CANON_CLUSTER_ENV    file to read instead of slurm/cluster.env
#   CANON_REPO           this repository, if the job is submitted from elsewhere
#
# 300 s before the time limit (--time) the trainer saves and stops, and the job is requeued; change
# that with sbatch --signal=B:USR1@600. It is also requeued after preemption, a node failure or a
# crash, but not after an invalid config, RUN/STOP, scancel or too many failed restarts. Errors print
# a code and exit with 2.
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

# Slurm runs a copy of this script: the repository is CANON_REPO, or contains the script, or contains
# the folder in which the job was submitted
repo=${CANON_REPO:-${BASH_SOURCE[0]%/*}/..}
if [[ -z ${CANON_REPO:-} && ! -f $repo/slurm/lib.sh ]]; then repo=${SLURM_SUBMIT_DIR:-$PWD}; fi
until [[ -n ${CANON_REPO:-} || -z $repo || -f $repo/slurm/lib.sh ]]; do repo=${repo%/*}; done
# shellcheck source=slurm/lib.sh
source "$repo/slurm/lib.sh" || { echo "error[slurm.repository]: submit in the repository, or set CANON_REPO to it" >&2 && exit 2; }

entry pretrain_1b3.sh pretrain_local pretrain_job "$@"
