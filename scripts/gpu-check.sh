#!/usr/bin/env bash
# Runs everything about the CUDA backend that needs a GPU, in less than nine minutes, and prints one table of checks and
# one of measurements.
#
#     scripts/gpu-check.sh pack     on the build machine: makes target/gpu-check/, which can be copied to a GPU machine
#                                   together with the checkout
#     scripts/gpu-check.sh          on the GPU machine: uses target/gpu-check/, or builds if that is missing
#     scripts/gpu-check.sh dry      anywhere: the part that needs no GPU, on the emulation and the CPU
#
# Results go to the folder $OUT (default target/gpu-check-results): a log of each check, figures as JSON, table.md.
set -uo pipefail
cd "$(dirname "$0")/.."
packed=target/gpu-check

pack() {
    set -e
    cargo build --profile dist --bin pagetide
    local tests
    tests=$(cargo test --profile dist --test cuda --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"name":"cuda".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    rm -rf "$packed" && mkdir -p "$packed"
    gzip -9 <target/dist/pagetide >"$packed/pagetide.gz"
    strip -o "$packed/cuda-tests" "$tests"
    gzip -9 "$packed/cuda-tests"
    ls -l "$packed"
}

if [ "${1:-}" = pack ]; then
    pack
    exit
fi

device=cuda
[ "${1:-}" = dry ] && device=emulation
out=${OUT:-target/gpu-check-results}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -f "$packed/pagetide.gz" ]; then
    for program in pagetide cuda-tests; do
        gunzip <"$packed/$program.gz" >"$work/$program"
    done
else
    pack >"$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
    exec "$0" "$@"
fi
chmod +x "$work"/*
export work out pagetide=$work/pagetide
export PAGETIDE_ROOT=$PWD PAGETIDE_TEST_DEVICE=$device RUST_BACKTRACE=0
# The checks share compiled kernels. The first start of the server below is timed without them.
export XDG_CACHE_HOME=$work/cache

rows=()
failed=0
# check NAME SECONDS COMMAND...: adds a row to the table: ok or not, and the last line that was printed.
check() {
    local name=$1 limit=$2 started=$SECONDS result
    shift 2
    local log=$out/${name// /-}.log
    # A shell runs the command, because it knows the functions below.
    if timeout "$limit" bash -c '"$@"' _ "$@" >"$log" 2>&1; then
        result=ok
    else
        local status=$?
        result="FAILED ($status)"
        [ $status -eq 124 ] && result="NOT DONE in $limit s"
        failed=1
        echo "--- $name"
        tail -n 25 "$log"
    fi
    rows+=("| $name | $result | $((SECONDS - started)) s | $(grep -v '^$' "$log" | tail -n 1 | tr '|' '/' | cut -c1-110) |")
}

tests() {
    "$work/cuda-tests" --test-threads 4 "$@"
}

# Times a start with an empty kernel cache, and one with a full cache.
start_time() {
    local begun ended port=18473
    for cache in empty full; do
        begun=$(date +%s%N)
        "$pagetide" serve --device cuda --port $port >"$out/serve-$cache.log" 2>&1 &
        local server=$!
        until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/ready"; do
            kill -0 $server || return 1
            sleep 0.02
        done
        ended=$(date +%s%N)
        kill $server
        wait $server
        echo "start with the kernel cache $cache: $(((ended - begun) / 1000000)) ms"
    done
}

sanitize() {
    local tool=$1
    shift
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$work/cuda-tests" --test-threads 1 "$@"
}

export -f tests start_time sanitize
# The other tests need the emulation.
resume=resume::
[ $device = cuda ] && resume=resume::same_tokens

check "doctor" 60 "$pagetide" doctor --device $([ $device = cuda ] && echo cuda || echo auto)
cat "$out/doctor.log"
check "kernels against the CPU" $([ $device = cuda ] && echo 120 || echo 600) tests attention:: rows:: sampling::
check "goldens" 60 tests goldens::
check "exact resume" 60 tests $resume
check "measuring" 60 tests bench::
if [ $device = cuda ]; then
    check "start of the server" 60 start_time
    check "pressure" 90 python3 scripts/check-pressure.py --binary "$pagetide" --device cuda
    check "memcheck" 60 sanitize memcheck rows::same_numbers sampling::many_requests attention::batch_invariant
    check "racecheck" 60 sanitize racecheck attention::batch_invariant
    check "measurements" 200 "$pagetide" bench gpu --block-sizes 16 --json "$out/figures.json"
    check "block sizes" 90 "$pagetide" bench gpu --quick --block-sizes 8,32,64,128 --json "$out/block-sizes.json"
    if python3 -c 'import torch' 2>/dev/null; then
        check "peers" 120 python3 scripts/gpu_peers.py
    fi
else
    check "pressure" 90 python3 scripts/check-pressure.py --binary "$pagetide" --device cpu
fi

{
    echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no GPU'), $(date -u +%F)"
    echo
    echo "| check | result | time | last line |"
    echo "|---|---|---|---|"
    printf '%s\n' "${rows[@]}"
    echo
    grep --no-filename '^|' "$out/measurements.log" 2>/dev/null
    grep --no-filename '^|' "$out/block-sizes.log" 2>/dev/null | tail -n +3
    echo
    grep --no-filename '^{' "$out/peers.log" 2>/dev/null
} | tee "$out/table.md"
exit $failed
