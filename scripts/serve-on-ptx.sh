#!/usr/bin/env bash
# Tests the program on executed PTX: `pagetide serve --device cuda` over a driver that runs on the CPU what NVRTC makes
# of the kernels (tests/driver/serve.rs). No GPU is needed.
#
#     scripts/serve-on-ptx.sh [FOLDER OF THE ENVIRONMENT THAT compile-kernels.sh MAKES]
set -euo pipefail
cd "$(dirname "$0")/.."

PAGETIDE_TEST_NVRTC=$(cd "${1:-target/ci/cuda-venv}"/lib/python3*/site-packages/nvidia/cu13/lib && pwd)
PAGETIDE_TEST_PTX_DRIVER=$PWD/target/debug/libptx_driver.so
export PAGETIDE_TEST_NVRTC PAGETIDE_TEST_PTX_DRIVER
cargo build --locked -p ptx-driver
cargo test --locked --test driver serve
