#!/usr/bin/env bash
# A RUSTC_WRAPPER that compiles Pagetide with the coverage instrumentation that libFuzzer needs, and other crates
# unchanged. All options are those of the stable compiler.
set -euo pipefail
rustc=$1
shift
for argument in "$@"; do
    if [[ ${previous:-} == --crate-name && ( $argument == pagetide || $argument == pagetide_*) ]]; then
        exec "$rustc" "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
    fi
    previous=$argument
done
exec "$rustc" "$@"
