#!/bin/sh
# The kernels' tests with the kernels compiled under AddressSanitizer: a read or write out of bounds ends the process.
# Arguments are those of the test program, a filter for example.
set -eu
cd "$(dirname "$0")/.."
library=$("${CXX:-c++}" -print-file-name=libasan.so)
program=$(cargo test --test cuda --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
# Kernels that are broken on purpose may do what ends the process. Leaks are the emulated device's own concern, which
# counts its memory.
PAGETIDE_KERNEL_SANITIZER=address LD_PRELOAD="$library" \
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:verify_asan_link_order=0 exec "$program" --skip broken_kernels "$@"
