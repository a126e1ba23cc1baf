#!/bin/bash
# A study on a Slurm cluster: every job of the array runs the same command on one shared folder, takes what is missing
# and leaves alone what another job is at. Submitting it again goes on; a job that is preempted saves and stops.
#   sbatch --array=0-7 slurm.sh studies/paper.yaml /shared/study-paper [key=value ...]
#   biphase study status studies/paper.yaml --out /shared/study-paper
# The study, its shards and task data, the environment and BIPHASE_CACHE must lie where all nodes see them.
#SBATCH --job-name=biphase
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=biphase-%A-%a.log
set -euo pipefail

study=$1 folder=$2
shift 2
gpus=${SLURM_GPUS_ON_NODE:-1}

# 1. Training runs, each over all GPUs of the node; cells wait.
srun biphase study run "$study" "$@" --out "$folder" --unit train --processes "$gpus"
# 2. Fine-tunings, four to a GPU: they are small.
srun biphase study run "$study" "$@" --out "$folder" --workers-per-gpu 4
