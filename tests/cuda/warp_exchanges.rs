//! Lanes of a warp that exchange numbers in the emulation: groups that are right, and misuse, which ends the launch.

use crate::emulation::EmulatedOptions;
use crate::support::{failure_of_broken, on_emulation};
use crate::transfers;

/// What the emulation says of the copies' kernel, with more at its beginning.
fn failure_with(statements: &str, order: u32) -> Option<String> {
    let begin = "    const uint64_t end = min(";
    let changed = format!("    {statements}\n{begin}");
    failure_of_broken("transfers.cu", begin, &changed, &EmulatedOptions::default(), |device| {
        transfers::check(&|_| device(order));
    })
}

#[test]
fn groups_of_lanes_exchange_at_the_same_time() {
    if !on_emulation() {
        return;
    }
    // Each quarter of a warp gets the number of its own fourth lane, in as many exchanges as its number.
    let in_quarters = "
        const int first = threadIdx.x % 32 / 8 * 8;
        for (int i = 0; i <= first; i += 8) {
            if (__shfl_sync(0xffu << first, int(threadIdx.x % 32), first + 3) != first + 3) {
                range.to[start] ^= 1;
            }
        }";
    for order in 0..3 {
        assert_eq!(failure_with(in_quarters, order), None);
    }
}

#[test]
fn misuse_ends_the_launch() {
    if !on_emulation() {
        return;
    }
    for (misuse, expected) in [
        ("__shfl_sync(~1u, 1, 1);", "__shfl_sync: the calling lane is not in its mask"),
        ("__shfl_sync(3u << threadIdx.x % 32 / 2 * 2, 1, (threadIdx.x + 2) % 32);", "from a lane outside of its mask"),
        ("if (threadIdx.x % 2 == 0) __syncwarp(); else __any_sync(~0u, 1);", "lanes of one warp meet in __"),
        (
            "if (threadIdx.x % 2 == 0) __shfl_sync(~0u, 1, 0); else __shfl_sync(~0u, 1.0, 0);",
            "__shfl_sync: lanes bring",
        ),
        ("if (threadIdx.x % 32 == 5) return; else __syncwarp();", "exit"),
    ] {
        for order in 0..3 {
            let failure = failure_with(misuse, order).unwrap_or_default();
            assert!(failure.contains(expected), "{misuse}, order {order}: {failure:?}");
        }
    }
}
