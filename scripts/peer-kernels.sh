#!/usr/bin/env bash
# Runs kernels of FlashInfer, CUTLASS, SGLang and Liger Kernel, unmodified, on the PTX interpreter, and compares what
# they compute with float64 references. The kernels come from PyPI and are compiled here, without a GPU; nothing of them
# is kept in the repository.
#
#     scripts/peer-kernels.sh [FOLDER OF THE ENVIRONMENT THAT compile-kernels.sh MAKES]
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc=$(cd "${1:-target/ci/cuda-venv}"/lib/python3*/site-packages/nvidia/cu13/bin && pwd)/nvcc
venv=target/ci/peer-kernels-venv
requirements=scripts/peer_kernels/requirements.txt
scripts/make-venv.sh "$venv" "$requirements" --no-deps
kernels=$PWD/target/tmp/peer-kernels
"$venv/bin/python" -W ignore scripts/peer_kernels/make.py "$nvcc" "$kernels"
PAGETIDE_TEST_PEER_KERNELS="$kernels" cargo test --locked -p ptx-interpreter --test peers
