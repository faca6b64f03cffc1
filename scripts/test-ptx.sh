#!/usr/bin/env bash
# Runs the tests of tests/cuda, from single kernels to whole models and exact resume, on executed PTX: nvcc compiles the
# kernels for sm_80 and sm_90a, and the interpreter of tests/ptx runs them and looks for races (docs/ptx.md). No GPU is
# needed. What nvcc makes is kept in target/tmp for the next run.
#
#     scripts/test-ptx.sh [FOLDER OF THE ENVIRONMENT THAT compile-kernels.sh MAKES] [ARGUMENTS OF THE TESTS]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-target/ci/cuda-venv}
PAGETIDE_TEST_NVRTC=$(cd "$venv"/lib/python3*/site-packages/nvidia/cu13/lib && pwd)
export PAGETIDE_TEST_NVRTC
cargo test --locked --test cuda --no-run
for arch in sm_80 sm_90a; do
    echo "-- $arch (after $SECONDS s)"
    # The module `ptx` compares both architectures itself.
    PAGETIDE_TEST_DEVICE=ptx-$arch cargo test --quiet --locked --test cuda -- --skip ptx:: "${@:2}"
done
