#!/usr/bin/env bash
# Train one run on several hosts, without a scheduler. Give the same command on each of them:
#
#   launch/hosts.sh 2 node1:29500 --config-file train_configs/fineweb_500m.yaml
#
# First the number of hosts, then the host (any one of them) and the port where they meet; the rest goes to
# torchtitan_ext.train. Ctrl-C or SIGTERM on one host saves a checkpoint and stops all; the same command continues.
#
# Settings, from the environment:
#   NPROC_PER_NODE  processes on this host (default: one per GPU)
#   MAX_RESTARTS    how often failed processes are started again, from the last checkpoint (default: 3)
#   LOG_FOLDER      where each process's output goes, in a folder per host (default: logs)
#   PYTHON          the Python that has torchtitan-ext (default: python)
set -euo pipefail

if (($# < 3)) || ! [[ $1 =~ ^[1-9][0-9]*$ && $2 =~ ^.+:[0-9]+$ ]]; then
    echo "error: usage: launch/hosts.sh HOSTS HEAD:PORT --config-file RUN_FILE …" >&2
    exit 2
fi
hosts=$1
meeting_point=$2
shift 2

# What all hosts of this launch, and no other launch, have in common. Restarted processes are known by it, too.
identity=${RENDEZVOUS_ID:-$(cksum <<<"$meeting_point $*" | cut -d ' ' -f 1)}

# Restarted processes meet in a store of their own: in the one they would share, addresses of dead processes are left.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# For the record alone: the run starts without it too.
"${PYTHON:-python}" -m launch.machine "${LOG_FOLDER:-logs}" "${NPROC_PER_NODE:-auto}" "$hosts" ||
    echo "warning: this machine could not be noted in ${LOG_FOLDER:-logs}" >&2

# torchrun gives processes that were asked to stop 30 seconds by default: too few to save a large model.
exec "${PYTHON:-python}" -m launch.elastic \
    --nnodes "$hosts" --nproc-per-node "${NPROC_PER_NODE:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "$meeting_point" --rdzv-id "$identity" \
    --max-restarts "${MAX_RESTARTS:-3}" --shutdown-timeout 240 \
    --local-ranks-filter 0 --tee 3 --log-dir "${LOG_FOLDER:-logs}/${SLURMD_NODENAME:-$(hostname)}" \
    --log-line-prefix-template "[rank\${rank}]: " \
    -m torchtitan_ext.train "$@"
