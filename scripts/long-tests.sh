#!/usr/bin/env bash
# Runs the tests that take too long for every change: all bombs, 1,000 failed steps, 100 times kill -9, many requests
# made from the API description, the CPU's kernels with checks of each pointer, those of AMX in emulation, all tests of
# CUDA kernels under AddressSanitizer and on executed PTX, the machine code of all CUDA kernels, kernels of peers on the
# PTX interpreter, the whole program on an emulated aarch64, ten minutes of soak. They take some two hours on two cores.
# PAGETIDE_BIN names the program (default: target/release/pagetide). PYTHON names a Python with the packages of
# tests/client/requirements.txt (default: that of .ci/run). Reports go to target/long-tests.
set -euo pipefail
cd "$(dirname "$0")/.."

binary=$(realpath "${PAGETIDE_BIN:-target/release/pagetide}")
python=${PYTHON:-target/ci/client-venv/bin/python}
reports=target/long-tests
mkdir -p "$reports"

failed=0
run() {
    echo "== $1 (after ${SECONDS} s)"
    shift
    "$@" || failed=1
}

run "victims" env PAGETIDE_BIN="$binary" PAGETIDE_LONG=1 PAGETIDE_VICTIMS_REPORT="$reports/victims.md" \
    "$python" -m pytest -q -p no:cacheprovider --tb=short tests/client/test_victims.py
run "faults" env PAGETIDE_BIN="$binary" PAGETIDE_LONG=1 \
    "$python" -m pytest -q -p no:cacheprovider --tb=short tests/client/test_faults.py tests/client/test_hub_lies.py
run "requests made from the API description" env PAGETIDE_BIN="$binary" PAGETIDE_LONG=1 \
    "$python" -m pytest -q -p no:cacheprovider --tb=short tests/client/test_schema.py
run "kernels with checks of pointers" cargo test --locked --package pagetide-backend --test kernels \
    --config profile.dev.package.pagetide-backend.debug-assertions=true
run "kernels on tiles" env KERNEL_ISA=amx cargo test --locked --package pagetide-backend --test kernels
run "kernels under AddressSanitizer" scripts/test-kernels-asan.sh
run "machine code of all kernels" env PAGETIDE_LONG=1 scripts/compile-kernels.sh
run "executed PTX" scripts/test-ptx.sh --all
run "kernels of peers on the PTX interpreter" scripts/peer-kernels.sh
run "aarch64" scripts/test-aarch64.sh all
run "soak" python3 scripts/soak.py --minutes "${SOAK_MINUTES:-10}" --binary "$binary" --report "$reports/soak"
exit "$failed"
