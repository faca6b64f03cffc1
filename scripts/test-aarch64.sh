#!/bin/sh
# Tests the program for aarch64 on another machine: cross-compiled, and run in an emulator (QEMU). Without arguments the
# tests of the sampler and of the CPU backend's kernels run on NEON, which is cheap enough for every change. With "all"
# clippy checks the whole program, it is built, and the backend's unit tests, the goldens and exact resume run too.
# On Debian and Ubuntu the script installs what it needs.
set -eu
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu

missing=""
command -v aarch64-linux-gnu-gcc >/dev/null || missing="$missing gcc-aarch64-linux-gnu"
command -v aarch64-linux-gnu-g++ >/dev/null || missing="$missing g++-aarch64-linux-gnu"
[ -e /usr/aarch64-linux-gnu/lib/crt1.o ] || missing="$missing libc6-dev-arm64-cross"
command -v qemu-aarch64-static >/dev/null || missing="$missing qemu-user-static"
if [ -n "$missing" ]; then
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
fi
if command -v rustup >/dev/null; then
    rustup target list --installed | grep -qx "$target" || rustup target add "$target"
fi

# A folder of its own, so that this can be built while something else is.
export CARGO_TARGET_DIR=$PWD/target/aarch64
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-D warnings"
# With std's checks of each pointer, which other tests of the kernels do without.
checked="--config profile.dev.package.pagetide-backend.debug-assertions=true"

[ "${1:-}" != all ] || cargo clippy --locked --workspace --bins --lib --target "$target" -- -D warnings
# The emulator is a few times slower than a processor. So there are fewer cases, and none that this machine tests as
# well.
KERNEL_ISA=neon KERNEL_CASES=0..20 cargo test $checked --locked --package pagetide-backend --target "$target" \
    --test kernels -- --skip a_row_does_not_see_its_company --skip quant::
cargo test $checked --locked --package pagetide-base --target "$target" --lib
# Dot and matrix products of bytes are only used with quantised weights. Their results have the same bits on all
# instruction sets, plain Rust among them.
cargo test $checked --locked --package pagetide-backend --target "$target" --test kernels quant
if [ "${1:-}" = all ]; then
    cargo test $checked --locked --package pagetide-backend --target "$target" --lib
    cargo test $checked --locked --target "$target" --lib --test model --test exact_resume
fi
