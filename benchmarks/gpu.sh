#!/usr/bin/env bash
# What docs/performance.md says of GPUs, measured on one GPU in less than ten minutes: the 500M size in bf16, compiled,
# control_block and block_hybrid_memory in turns with standard; the depth read alone by every backend that is installed;
# and the tests of the operations, those that need a GPU among them.
#
#   benchmarks/gpu.sh [--dry] [OUT]
#
# Writes OUT/rows.md, lines for the table of goals, and what they come from (OUT: runs/gpu-<time>). --dry, or no GPU: the
# same path at a small size on the CPU, to see that it works. PYTHON names another interpreter than .venv's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
dry=
if [ "${1:-}" = --dry ]; then
    dry=1
    shift
fi
out=${1:-runs/gpu-$(date +%Y-%m-%d-%H%M%S)}

"$python" benchmarks/gpu_rows.py --check
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU is visible: trying the same path on the CPU, at a small size"
    dry=1
fi

size=(--size 500M --seq-len 2048 --micro-batch 8 --turns 8 --steps-per-turn 5)
read=(--tokens 16384 --width 1536 --turns 20)
if [ -n "$dry" ]; then
    export CUDA_VISIBLE_DEVICES=
    size=(--size debug --seq-len 128 --micro-batch 2 --vocab-size 512 --turns 1 --steps-per-turn 1)
    read=(--tokens 128 --width 64 --turns 1)
fi

bench() { timeout "$1" "$python" -m torchtitan_ext.cli bench "${@:2}"; }
bench 420 --variants control_block block_hybrid_memory --precision bf16 --compile --checkpoint none \
    "${size[@]}" --out "$out/models"
"$python" benchmarks/gpu_rows.py "$out"
bench 120 --operation depth_read --dtype bfloat16 "${read[@]}" --out "$out/depth_read"
timeout 180 "$python" -m pytest -q tests/ops
