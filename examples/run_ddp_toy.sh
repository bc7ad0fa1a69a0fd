#!/bin/bash
# Runs ddp_toy on two processes and checks that both report a loss and the same weights.
#   run_ddp_toy.sh CADRE DDP_TOY
set -euo pipefail
output=$("$1" run --nproc-per-node 2 --no-python "$2")
echo "$output"
weights=$(grep -o 'weights [0-9.]*' <<<"$output" | sort | uniq -c | tr -s ' ')
if [ "$(wc -l <<<"$weights")" != 1 ] || [[ "$weights" != " 2 "* ]]; then
  echo "the two ranks do not hold the same weights: $weights" >&2
  exit 1
fi
