#!/bin/sh
# Looks for data races and undefined behaviour with Miri and ThreadSanitizer, in the copier, the thread team and the
# sampler. It needs a nightly toolchain. `tsan` or `miri` runs one of the two.
set -eu
cd "$(dirname "$0")/.."
what=${1:-all}
toolchain=${PAGETIDE_NIGHTLY:-nightly}
host=$(rustc "+$toolchain" -vV | sed -n 's/^host: //p')

need() {
    rustup component list --toolchain "$toolchain" --installed | grep -q "^$1" || rustup component add "$1" --toolchain "$toolchain"
}

need rust-src
if [ "$what" != tsan ]; then
    need miri
    # Each seed is another order of the threads, and other values that a load may see. Miri cannot interpret vector
    # instructions, so the portable kernels are chosen. Isolation is off because threads read the clock.
    MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-many-seeds=0..${PAGETIDE_MIRI_SEEDS:-8}" \
        cargo "+$toolchain" miri test --locked --package pagetide-backend --target-dir target/miri --lib -- team:: copier::
    MIRIFLAGS="-Zmiri-disable-isolation" \
        cargo "+$toolchain" miri test --locked --package pagetide-base --target-dir target/miri --lib -- sampler::row sampler::philox
fi
if [ "$what" != miri ]; then
    # The standard library is instrumented too. Otherwise its locks would look like races.
    RUSTFLAGS="-Zsanitizer=thread" TSAN_OPTIONS="halt_on_error=1" \
        cargo "+$toolchain" test --locked --package pagetide-backend --target-dir target/tsan --target "$host" \
        -Zbuild-std --lib --test kernels -- team:: copier:: blocks::
fi
