#!/usr/bin/env bash
# Compiles every specialisation of the kernels that the shipped configurations can need, with NVRTC (as a start on a GPU
# machine does) for sm_80, sm_90a and sm_100a, and checks the machine code against the rules of
# kernels/machine-code.toml and the figures of kernels/machine-code.csv. With --update it writes the figures. It needs
# no GPU: the compilers are pip's wheels, in a Python environment that is kept until their list changes.
#
#     scripts/compile-kernels.sh [--update] [FOLDER OF THE ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/.."

update=()
if [ "${1:-}" = --update ]; then
    update=(--update)
    shift
fi
venv=${1:-target/ci/cuda-venv}
requirements=scripts/cuda-requirements.txt
scripts/make-venv.sh "$venv" "$requirements" --no-deps
cuda=$(cd "$venv"/lib/python3*/site-packages/nvidia/cu13 && pwd)

PAGETIDE_TEST_NVRTC="$cuda/lib" cargo test --locked --test kernel_compile
# Runs what NVRTC makes of the kernels: docs/ptx.md.
PAGETIDE_TEST_NVRTC="$cuda/lib" cargo test --locked --test cuda ptx::
python3 scripts/test_compile_kernels.py "$cuda/bin/nvcc"
python3 scripts/compile-kernels.py "$cuda/bin/nvcc" "${update[@]}"
