#!/usr/bin/env bash
# Compiles every specialisation of the kernels that the shipped configurations can need, with NVRTC (as a start on a GPU
# machine does) and with nvcc for sm_80 and sm_90a. Prints a table of registers and shared memory. It needs no GPU: the
# compilers are pip's wheels, in a Python environment that is kept until their list changes.
#
#     scripts/compile-kernels.sh [FOLDER OF THE ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-target/ci/cuda-venv}
requirements=scripts/cuda-requirements.txt
if ! cmp -s "$requirements" "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$requirements"
    cp "$requirements" "$venv/requirements.txt"
fi
cuda=$(cd "$venv"/lib/python3*/site-packages/nvidia/cu13 && pwd)

PAGETIDE_TEST_NVRTC="$cuda/lib" cargo test --locked --test kernel_compile
# Only the table goes to standard output, so that it can be saved.
python3 scripts/compile-kernels.py "$cuda/bin/nvcc"
