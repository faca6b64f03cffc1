#!/usr/bin/env bash
# Checks and measures the CUDA backend on a GPU machine. Two calls of at most ten minutes each: the first has what tells
# the most, the second the rest. What is found survives a cut at any second: each result is appended to results.tsv,
# table.md is written again every few seconds, and with each result all logs go into results.tar.gz.
#
#     scripts/gpu-check.sh pack     on the build machine: makes target/gpu-check/, at most 64 MiB, which is copied to
#                                   the GPU machine together with the checkout
#     scripts/gpu-check.sh          on the GPU machine: the first call. It needs what `pack` made, bash and coreutils.
#     scripts/gpu-check.sh more     the second call: peers (with torch), pressure (with Python), block sizes, HTTP load
#     scripts/gpu-check.sh dry      both calls without a GPU, on the emulation and the CPU, with the programs of `cargo
#                                   test`
#
# $OUT is the folder of the results (default target/gpu-check-results), $GPU_CHECK_SECONDS the limit of a call (600).
set -uo pipefail
cd "$(dirname "$0")/.."
packed=target/gpu-check
max_packed_bytes=$((64 << 20))

# The test program `cuda` of a cargo profile.
test_program() {
    cargo test --locked "$@" --test cuda --no-run --message-format=json |
        sed -n 's/.*"name":"cuda".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

pack() {
    set -e
    # The profile `dist` takes twice as long to build.
    cargo build --locked --release --bin pagetide
    local tests
    tests=$(test_program --release)
    rm -rf "$packed" && mkdir -p "$packed"
    strip -o "$packed/pagetide" target/release/pagetide
    strip -o "$packed/cuda-tests" "$tests"
    gzip -9 "$packed"/*
    ls -l "$packed"
    local bytes
    bytes=$(cat "$packed"/* | wc -c)
    [ "$bytes" -le $max_packed_bytes ] || { echo "$packed has $bytes bytes, more than $max_packed_bytes" >&2; exit 1; }
}

mode=${1:-first}
case $mode in
    pack) pack; exit ;;
    first | more | dry) ;;
    *) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2; exit 2 ;;
esac

device=cuda
[ "$mode" = dry ] && device=emulation
limit=${GPU_CHECK_SECONDS:-600}
out=${OUT:-target/gpu-check-results}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ "$mode" = dry ]; then
    # `cli` makes the program too. `cargo build` would compile much of it again, with other features of the libraries.
    ln -s "$(test_program --test cli)" "$work/cuda-tests"
    ln -s "$PWD/target/debug/pagetide" "$work/pagetide"
elif [ -f "$packed/pagetide.gz" ]; then
    for program in pagetide cuda-tests; do
        gunzip <"$packed/$program.gz" >"$work/$program"
    done
    chmod +x "$work"/*
else
    echo "there is no $packed: call $0 pack on the build machine, and copy the folder here" >&2
    exit 1
fi
export work out pagetide=$work/pagetide
export PAGETIDE_ROOT=$PWD PAGETIDE_TEST_DEVICE=$device RUST_BACKTRACE=0
# The checks share compiled kernels. The first start of the server below is timed without them.
export XDG_CACHE_HOME=$work/cache

# Writes table.md from what there is: the rows, the figures so far, and what peers measured.
write_table() {
    local name result seconds last
    {
        echo "$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null |
            head -n 1 || echo 'no GPU'), $(date -u +'%F %H:%M:%S') UTC"
        echo
        echo "| check | result | time | last line |"
        echo "|---|---|---|---|"
        while IFS=$'\t' read -r name result seconds last; do
            echo "| $name | $result | $seconds s | $last |"
        done <"$out/results.tsv"
        echo
        cat "$out"/measurements.log "$out"/block-sizes.log 2>/dev/null | grep '^|' | awk '!seen[$0]++'
        echo
        grep --no-filename '^{' "$out/peers.log" 2>/dev/null
    } >"$out/table.new"
    mv "$out/table.new" "$out/table.md"
}

# One file of everything. It is replaced when it is whole.
write_archive() {
    # tar fails if the folder changes while it reads it.
    tar -C "$out" --exclude results.tar.gz -czf "$work/results.tar.gz" . &&
        cp "$work/results.tar.gz" "$out/results.new" && mv "$out/results.new" "$out/results.tar.gz"
}

failed=0
# check NAME SECONDS COMMAND...: runs a command within the time that is left, and adds a row: ok or not, and the last
# line that it printed. In a dry run, whose machine may be slow and busy, each command has ten minutes.
check() {
    local name=$1 most=$2 started=$SECONDS result last
    shift 2
    local log=$out/${name// /-}.log left=$((limit - SECONDS))
    [ $device = cuda ] || most=600
    [ "$most" -gt "$left" ] && most=$left
    if [ "$most" -lt 2 ]; then
        result="NOT BEGUN" last="the $limit s of this call are over"
        failed=1
    else
        # A shell runs the command, because it knows the functions below.
        timeout --kill-after 5 "$most" bash -c '"$@"' _ "$@" >"$log" 2>&1 &
        local running=$! status=0
        while kill -0 $running 2>/dev/null; do
            write_table
            sleep "${GPU_CHECK_TICK:-2}" &
            wait -n $running $!
        done
        wait $running || status=$?
        case $status in
            0) result=ok ;;
            124 | 137) result="NOT DONE in $most s" ;;
            *) result="FAILED ($status)" ;;
        esac
        if [ $status -ne 0 ]; then
            failed=1
            echo "--- $name"
            tail -n 25 "$log"
        fi
        last=$(grep -v '^$' "$log" | tail -n 1 | tr '|\t' '/ ' | cut -c1-110)
    fi
    printf '%s\t%s\t%s\t%s\n' "$name" "$result" $((SECONDS - started)) "$last" >>"$out/results.tsv"
    echo "$name: $result, $((SECONDS - started)) s"
    write_table
    write_archive
}

tests() {
    "$work/cuda-tests" --test-threads 4 "$@"
}

# Device, clocks and link.
describe_device() {
    nvidia-smi
    local clocks=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem
    nvidia-smi --query-gpu=$clocks,power.limit,pcie.link.gen.current,pcie.link.width.current --format=csv
}

# Times a start with an empty kernel cache, and one with a full cache.
start_time() {
    local begun ended port=18473
    for cache in empty full; do
        begun=$(date +%s%N)
        XDG_CACHE_HOME=$work/start-cache "$pagetide" serve --device "$1" --port $port >"$out/serve-$cache.log" 2>&1 &
        local server=$!
        until "$pagetide" health --ready --port $port --timeout 1 >/dev/null 2>&1; do
            kill -0 $server || return 1
            sleep 0.02
        done
        ended=$(date +%s%N)
        kill $server
        wait $server
        echo "start with the kernel cache $cache: $(((ended - begun) / 1000000)) ms"
    done
}

# The kernels of the graph of one decode step, by Nsight Compute: each of them in step.ncu-rep, a table of them here.
profile_a_step() {
    ncu --profile-from-start off --graph-profiling node --set basic --force-overwrite --export "$out/step" \
        "$pagetide" bench gpu --block-sizes 16 --profile-step 32 &&
        ncu --import "$out/step.ncu-rep" --print-summary per-kernel
}

sanitize() {
    local tool=$1
    shift
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$work/cuda-tests" --test-threads 1 "$@"
}

# Is a program there? Without it the row says so.
has() {
    command -v "$1" >/dev/null
}

export -f tests describe_device start_time profile_a_step sanitize

first_call() {
    if [ $device = cuda ]; then
        check "device" 20 describe_device
        check "doctor" 40 "$pagetide" doctor --device cuda
        check "first kernels against the CPU" 40 tests transfers:: attention::batch_invariant rows::same_numbers
        check "measurements" 240 "$pagetide" bench gpu --block-sizes 16 --json "$out/figures.json"
    else
        check "doctor" 60 "$pagetide" doctor --device auto
        check "first kernels against the CPU" 300 tests transfers:: attention::batch_invariant rows::same_numbers
        check "measurements" 300 tests bench::
    fi
    check "an illegal access" 60 tests transfers::an_illegal_access
    # `cargo test` has all of them on the emulation.
    local kernels=(rows:: sampling::)
    [ $device = cuda ] && kernels=(attention:: kv_codes:: few_rows:: quantized:: "${kernels[@]}")
    check "kernels against the CPU" 120 tests "${kernels[@]}"
    # The other tests of resume need the emulation.
    check "exact resume" 60 tests $([ $device = cuda ] && echo resume::same_tokens || echo resume::graphs)
    check "goldens" 60 tests goldens:: experts:: fp8
    check "start of the server" 40 start_time $([ $device = cuda ] && echo cuda || echo cpu)
    if [ $device = cuda ]; then
        has ncu && check "profile of a step" 90 profile_a_step
        has compute-sanitizer && check "memcheck" 60 sanitize memcheck rows::same_numbers transfers::both_directions
        has compute-sanitizer && check "racecheck" 60 sanitize racecheck attention::batch_invariant
    fi
}

second_call() {
    local on=cpu few=(--num 4 --fixed 16:8)
    [ $device = cuda ] && on=cuda few=(--num 512)
    if [ $device = cuda ]; then
        python3 -c 'import torch' 2>/dev/null && check "peers" 150 python3 scripts/gpu_peers.py
        check "block sizes" 150 "$pagetide" bench gpu --quick --block-sizes 8,32,64,128 --json "$out/block-sizes.json"
    fi
    has python3 && check "pressure" 120 python3 scripts/check-pressure.py --binary "$pagetide" --device $on
    check "HTTP load" 120 "$pagetide" bench serve --device $on "${few[@]}"
}

# The time of a dry run does not count what cargo built. The second call adds to the results of the first.
SECONDS=0
if [ "$mode" = more ]; then
    touch "$out/results.tsv"
else
    rm -f "$out"/*.log "$out"/*.json
    : >"$out/results.tsv"
fi
[ "$mode" != more ] && first_call
[ "$mode" != first ] && second_call
cat "$out/table.md"
exit $failed
