#!/usr/bin/env bash
# Runs the tests of tests/cuda, from single kernels to whole models and exact resume, on executed PTX: NVRTC compiles
# the kernels, and the interpreter of tests/ptx runs them and looks for races (docs/ptx.md). No GPU is needed. What
# NVRTC makes is kept in target/tmp for the next run. For sm_90a the tests of single kernels run, and one of whole
# models: the others of models, of exact resume, of starts and of measurements are about the host's code, which the
# emulation has run, and scripts/serve-on-ptx.sh serves on executed PTX. One test is left out that adds up 131,072 keys.
# For sm_80 those tests of attention run that compare its kernels with the CPU in all their forms, because its tiles and
# kernels are other ones there. How launches mix sequences and share prefixes is the same for both. With --all
# everything runs.
#
#     scripts/test-ptx.sh [--all] [FOLDER OF THE ENVIRONMENT THAT compile-kernels.sh MAKES] [ARGUMENTS OF THE TESTS]
set -euo pipefail
cd "$(dirname "$0")/.."

on_sm_80=(attention::every_head attention::elements attention::both_kernels attention::random_cases attention::chunks
    attention::batch_invariant kv_codes::)
slow=(--skip sums_do_not_drift_over_many_tiles --skip every_family_in_float32 --skip resume:: --skip loader::
    --skip bench::)
if [ "${1:-}" = --all ]; then
    on_sm_80=()
    slow=()
    shift
fi
venv=${1:-target/ci/cuda-venv}
PAGETIDE_TEST_NVRTC=$(cd "$venv"/lib/python3*/site-packages/nvidia/cu13/lib && pwd)
export PAGETIDE_TEST_NVRTC
cargo test --locked --test cuda --no-run
# The module `ptx` compares both architectures itself.
run() {
    local arch=$1
    shift
    echo "-- $arch (after $SECONDS s)"
    PAGETIDE_TEST_DEVICE=ptx-$arch cargo test --quiet --locked --test cuda -- --skip ptx:: "${slow[@]}" "$@"
}
run sm_80 "${on_sm_80[@]}" "${@:2}"
run sm_90a "${@:2}"
