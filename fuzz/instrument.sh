#!/usr/bin/env bash
# As RUSTC_WRAPPER: compiles Pagetide itself with what libFuzzer follows, and everything else as it is. These are
# options of the stable compiler.
set -euo pipefail
rustc=$1
shift
for argument in "$@"; do
    if [ "${previous:-}" = --crate-name ] && [ "$argument" = pagetide ]; then
        exec "$rustc" "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
    fi
    previous=$argument
done
exec "$rustc" "$@"
