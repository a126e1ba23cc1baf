#!/bin/bash
# A study on a Slurm cluster: every job of the array runs the same command on one shared folder, takes missing work,
# and waits (keeping its GPUs) while only work that other jobs are doing is left. Submit it again to continue; a job that
# is preempted saves and stops.
#   sbatch --array=0-7 slurm.sh studies/paper.yaml /shared/study-paper [key=value ...]
#   biphase study status studies/paper.yaml --folder /shared/study-paper
# The study, its shards and task data, the environment and BIPHASE_CACHE must be on storage that all nodes see.
#SBATCH --job-name=biphase
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=biphase-%A-%a.log
set -euo pipefail

study=$1 folder=$2
shift 2
gpus=${SLURM_GPUS_ON_NODE:-1} code=0
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # by default, srun uses one CPU
export BIPHASE_GRACE_SECONDS=110 # seconds to save in, out of the 120 of --signal

# 1. Training runs, each over all GPUs of the node. If one fails, still evaluate the others; after a stop, do not.
srun biphase study run "$study" "$@" --folder "$folder" --unit train --processes "$gpus" || code=$?
case $code in 130 | 143) exit "$code" ;; esac
# 2. Fine-tunings of the trained models, four per GPU, because they are small.
srun biphase study run "$study" "$@" --folder "$folder" --unit cells --workers-per-gpu 4 || code=$((code ? code : $?))
exit "$code"
