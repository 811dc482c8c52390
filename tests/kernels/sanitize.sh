#!/bin/sh
# Run every CUDA kernel at small shapes under compute-sanitizer: tests/kernels/sanitize.sh [memcheck racecheck ...]
# Every tensor is its own allocation, so that an access behind its end is seen.
set -e
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
small="(step_matches and (1 or 17)) or (prompt_experts and (40 or 300)) or (write_and_mix and 3-1) or (topk and (600 or 8193)) or (attention_matches and 8-4-True-128) or (reference_sampler and (0 or 1))"
for tool in ${@:-memcheck racecheck}; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 10 \
        python3 -m pytest -q -p no:cacheprovider tests/kernels/test_cuda.py tests/kernels/test_sample.py -m gpu -k "$small"
done
