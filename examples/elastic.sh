#!/usr/bin/env bash
# torchrun on "two machines" (both are this one): a rank is killed, torchrun starts its ranks again, and the run goes on.
#
#     examples/elastic.sh [FOLDER]
#
# On real machines, give the same torchrun command on each of them, with the first one's name after --rdzv-endpoint.
set -euo pipefail
out=${1:-runs/elastic}
mkdir -p "$(dirname "$out")"
port=$((20000 + RANDOM % 12000)) # below those that the system gives to outgoing connections
start() { # one torchrun a machine
  torchrun --nnodes 2 --node-rank "$1" --nproc-per-node 1 --max-restarts 3 \
    --monitor-interval 0.1 --rdzv-backend c10d --rdzv-endpoint "localhost:$port" --rdzv-id elastic \
    -m polyrhythm train --data digits --model mlp --epochs "${EPOCHS:-300}" --threads 1 \
    --resume auto --out "$out" 2>>"$out.torchrun.log" &
}
start 0; first=$!
start 1; second=$!
until grep -qs Evaluated "$out/events.jsonl"; do
  kill -0 "$first" || exit 1 # it could not start: $out.torchrun.log says why
  sleep 0.2
done
rank=$(pgrep --parent "$second" | head -1) # the second machine's only rank
echo "kill -9 $rank, the rank of the second machine"
kill -9 "$rank"
wait "$first"
wait "$second" || true # it may find that the first machine's torchrun, where they meet, has left already
grep -c '"RunStarted"' "$out/events.jsonl" | sed 's/^/times that the run began: /'
