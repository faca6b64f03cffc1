#!/bin/sh
# Runs the tests of the CUDA kernels on the CPU, with the kernels compiled under AddressSanitizer: a read or write out
# of bounds ends the process. Arguments go to the test program, for example a filter.
set -eu
cd "$(dirname "$0")/.."
library=$("${CXX:-c++}" -print-file-name=libasan.so)
program=$(cargo test --test cuda --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"name":"cuda".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
# Kernels that are broken on purpose may end the process, so they are skipped. Leaks are not checked, because the
# emulated device counts its memory itself.
PAGETIDE_KERNEL_SANITIZER=address LD_PRELOAD="$library" \
    ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:verify_asan_link_order=0 exec "$program" --skip broken_kernels "$@"
