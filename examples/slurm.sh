#!/usr/bin/env bash
# Hand a training to Slurm: two workers and a server, one to four nodes, requeued when a node is taken away.
#
#     examples/slurm.sh --dry-run     the script that Slurm would be given
#     examples/slurm.sh               on a host of the cluster, in a folder that all nodes share
set -euo pipefail
polyrhythm submit --engine "slurm(nodes='1-4', tasks_per_node=2, time='2:00:00', notice_s=120)" "$@" -- \
  train --data digits --model mlp --strategy "parameter_server(servers=1)" --workers 2 --epochs 20 --out runs/slurm
