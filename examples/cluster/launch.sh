#!/bin/bash
# HOSTS: how many. HEAD: host:port of the first. RANKS: on each host. ID: the same on all hosts, another for every job.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}       # threads of each rank: its share of the cores
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240          # seconds that ranks have to save after a signal; default: 30
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1        # without it, torchrun does not let a host that was replaced join again
export MACROBATCH_CACHE=${MACROBATCH_CACHE:-/tmp/macrobatch-$UID}  # prepared data, on a disk of the host
# If hosts have several networks, name the one to use:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# export NCCL_DEBUG=INFO                           # prints which network NCCL has chosen
exec torchrun --nnodes "$HOSTS" --nproc-per-node "$RANKS" --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$ID" \
  --max-restarts 3 --no-python bash /shared/train.sh
