#!/usr/bin/env bash
# Fuzzes everything that reads untrusted bytes:
#
#     scripts/fuzz.sh [--seconds N] [--inputs N] [--timeout N] [TARGET...]
#
# Each target runs for N seconds (default 60), with 2 GiB of memory. An input may take 5 seconds; on a busy machine give
# more with --timeout. --inputs bounds the number of inputs of a target, which are then the same every time. Without
# TARGET all targets run. Use --seconds 3600 for an hour each. Findings are in target/fuzz/artifacts/TARGET. Fix the bug
# and keep the input as fuzz/corpus/TARGET/regression-NAME, which `cargo test --test fuzz_corpus` replays.
#
# It needs a Rust toolchain and a C++ compiler. Only Pagetide is instrumented; dependencies that were already built are
# taken from `target`. `cargo fuzz run TARGET` instruments them too, and takes much longer to build.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=60
timeout=5
same=()
targets=()
while [ $# -gt 0 ]; do
    case $1 in
        --seconds) seconds=$2; shift 2 ;;
        --inputs) same=("-runs=$2" -seed=1); shift 2 ;;
        --timeout) timeout=$2; shift 2 ;;
        --help | -h) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        -*) echo "$0: there is no option $1" >&2; exit 2 ;;
        *) targets+=("$1"); shift ;;
    esac
done
if [ ${#targets[@]} -eq 0 ]; then
    for folder in fuzz/corpus/*/; do
        targets+=("$(basename "$folder")")
    done
fi

# The settings of this build, whatever the caller has set.
export CARGO_TARGET_DIR=$PWD/target CARGO_INCREMENTAL=0 RUSTC_WRAPPER=$PWD/fuzz/instrument.sh
started=$SECONDS
cargo build --quiet --locked --manifest-path fuzz/Cargo.toml --bin all
echo "built in $((SECONDS - started)) s"

failed=()
for target in "${targets[@]}"; do
    if [ ! -d "fuzz/corpus/$target" ]; then
        echo "$0: there is no target '$target'; there are: $(ls fuzz/corpus | tr '\n' ' ')" >&2
        exit 2
    fi
    # New inputs go into the first folder, which belongs to this machine alone.
    found=target/fuzz/corpus/$target artifacts=target/fuzz/artifacts/$target/ log=target/fuzz/$target.log
    mkdir -p "$found" "$artifacts"
    dictionary=()
    [ -f "fuzz/dictionaries/$target.dict" ] && dictionary=(-dict="fuzz/dictionaries/$target.dict")
    if PAGETIDE_FUZZ_TARGET=$target nice target/debug/all "$found" "fuzz/corpus/$target" "${dictionary[@]}" \
        "${same[@]}" -max_total_time="$seconds" -timeout="$timeout" -rss_limit_mb=2048 -max_len=65536 -artifact_prefix="$artifacts" \
        -print_final_stats=1 >"$log" 2>&1; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
        covered=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
        peak=$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")
        echo "$target: ${runs:-?} inputs, ${covered:-?} edges, ${peak:-?} MiB at most"
    else
        failed+=("$target")
        echo "$target: FAILED; the end of $log:"
        tail -25 "$log"
        ls -l "$artifacts"
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
