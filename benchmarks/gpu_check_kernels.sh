#!/usr/bin/env bash
# The kernels' tests and benchmark on a machine with a GPU: bash benchmarks/gpu_check_kernels.sh [folder for results]
set -u
out="${1:-${OUT:-benchmarks/results}}"
mkdir -p "$out"
export OMP_NUM_THREADS=4 PYTHONPATH="$PWD"
tests="${TESTS:-tests/ops tests/optimizers tests/precision/test_fused_updates.py tests/precision/test_precision_gpu.py}"
timeout 110 python3 -m pytest $tests -m gpu -q --timeout 60 --maxfail 25 --tb short --durations 5 > "$out/kernels-tests.log" 2>&1
grep -E "^(E  |FAILED|ERROR|[0-9]+ passed|.* (passed|failed))" "$out/kernels-tests.log" | head -n 60 | cut -c 1-180
timeout 110 python3 benchmarks/optimizers.py --out "$out/optimizers.json" 2>&1 | tee "$out/optimizers.txt"
