#!/bin/bash
# Makes a folder of small images in MNIST's format and trains on it, with one process and with two:
# both runs must classify most test images correctly and write the weights.
#   run_ddp_mnist.sh CADRE DDP_MNIST MAKE_IMAGES
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 "$3" "$folder/images" 400
cd "$folder"
check() {
  local output
  rm -f net.safetensors
  output=$("$@")
  echo "$output"
  local right
  right=$(grep -o '[0-9]* of 80 images right' <<<"$output" | cut -d' ' -f1)
  if [ "${right:-0}" -lt 70 ] || [ ! -s net.safetensors ]; then
    echo "expected at least 70 of 80 images right, and net.safetensors" >&2
    exit 1
  fi
}
check "$2" images 3
check "$1" run --nproc-per-node 2 --no-python "$2" images 3
if "$2" nowhere 2>error; then exit 1; fi
grep -q 'nowhere/train-images-idx3-ubyte' error
