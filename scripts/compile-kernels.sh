#!/usr/bin/env bash
# Compiles every specialisation of the kernels that the shipped configurations can need, with NVRTC (as a start on a GPU
# machine does) for sm_80, sm_90a and sm_100a, and checks the machine code against the rules of
# kernels/machine-code.toml and the figures of kernels/machine-code.csv. With --update it writes the figures. It needs
# no GPU: the compilers are pip's wheels, in a Python environment that is kept until their list changes.
#
# This takes minutes, and is done only with --update or PAGETIDE_LONG=1. Without them the kernels, compilers, rules and
# figures have to be those of the last --update, whose hash is kernels/machine-code.sha256. It fails if they are not.
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

export PAGETIDE_TEST_NVRTC=$cuda/lib
all=every_specialisation_compiles_without_a_warning
cargo test --locked --test kernel_compile -- --skip "$all"
# Runs what NVRTC makes of the kernels: docs/ptx.md.
cargo test --locked --test cuda ptx::
python3 scripts/test_compile_kernels.py "$cuda/bin/nvcc"
if [ ${#update[@]} -eq 0 ] && [ "${PAGETIDE_LONG:-}" != 1 ]; then
    python3 scripts/compile-kernels.py "$cuda/bin/nvcc" --is-checked
    exit
fi
cargo test --locked --test kernel_compile "$all"
python3 scripts/compile-kernels.py "$cuda/bin/nvcc" "${update[@]}"
