//! The tile products of attention. The compiler does not know tile registers here, so all that passes through them lies
//! within one `asm!` block.

use super::{SCORES, TILE_BYTES, TILE_LEN};
use crate::backend::cpu::simd::LANES;
use std::arch::asm;

/// `scores = K · Qᵀ` for [`SCORES`] positions and 16 queries: `[SCORES][16]`.
///
/// # Safety
/// `Tiles::configure(16, 16)` is in force. `queries` are `num_chunks` tiles; each of `keys` is 16 rows of as many times
/// 64 bytes, `key_bytes` apart; `scores` has room.
pub(super) unsafe fn scores(
    queries: *const u32,
    num_chunks: usize,
    keys: [*const u8; SCORES / LANES],
    key_bytes: usize,
    scores: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{queries} + {line}]",
            "tileloadd tmm5, [{k0} + {key_bytes}]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm6, [{k1} + {key_bytes}]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tileloadd tmm7, [{k2} + {key_bytes}]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tileloadd tmm5, [{k3} + {key_bytes}]",
            "tdpbf16ps tmm3, tmm5, tmm4",
            "add {queries}, 1024",
            "add {k0}, 64",
            "add {k1}, 64",
            "add {k2}, 64",
            "add {k3}, 64",
            "dec {chunks}",
            "jnz 2b",
            "tilestored [{scores} + {line}], tmm0",
            "tilestored [{scores} + {line} + 1024], tmm1",
            "tilestored [{scores} + {line} + 2048], tmm2",
            "tilestored [{scores} + {line} + 3072], tmm3",
            line = in(reg) 64usize,
            queries = inout(reg) queries => _,
            k0 = inout(reg) keys[0] => _,
            k1 = inout(reg) keys[1] => _,
            k2 = inout(reg) keys[2] => _,
            k3 = inout(reg) keys[3] => _,
            key_bytes = in(reg) key_bytes,
            chunks = inout(reg) num_chunks => _,
            scores = in(reg) scores,
            options(nostack),
        );
    }
}

/// `acc = acc + weights · V` for 16 queries: `num_tiles` tiles of 16 dimensions each, an even number.
///
/// # Safety
/// `Tiles::configure(16, 16)` is in force. `weights` are `steps` tiles, at least one, `values` are `num_tiles` for each
/// of them.
pub(super) unsafe fn add_values(
    weights: *const u32,
    steps: usize,
    values: *const u32,
    num_tiles: usize,
    acc: *mut f32,
) {
    let value_bytes = num_tiles * TILE_BYTES;
    let mut tile = 0;
    // SAFETY: the caller's.
    unsafe {
        while tile + 4 <= num_tiles {
            asm!(
                "tileloadd tmm0, [{acc} + {line}]",
                "tileloadd tmm1, [{acc} + {line} + 1024]",
                "tileloadd tmm2, [{acc} + {line} + 2048]",
                "tileloadd tmm3, [{acc} + {line} + 3072]",
                "2:",
                "tileloadd tmm4, [{weights} + {line}]",
                "tileloadd tmm5, [{values} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{values} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm7, [{values} + {line} + 2048]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tileloadd tmm5, [{values} + {line} + 3072]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                "add {weights}, 1024",
                "add {values}, {value_bytes}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{acc} + {line}], tmm0",
                "tilestored [{acc} + {line} + 1024], tmm1",
                "tilestored [{acc} + {line} + 2048], tmm2",
                "tilestored [{acc} + {line} + 3072], tmm3",
                line = in(reg) 64usize,
                acc = in(reg) acc.add(tile * TILE_LEN),
                weights = inout(reg) weights => _,
                values = inout(reg) values.add(tile * TILE_LEN) => _,
                value_bytes = in(reg) value_bytes,
                steps = inout(reg) steps => _,
                options(nostack),
            );
            tile += 4;
        }
        if tile < num_tiles {
            asm!(
                "tileloadd tmm0, [{acc} + {line}]",
                "tileloadd tmm1, [{acc} + {line} + 1024]",
                "2:",
                "tileloadd tmm4, [{weights} + {line}]",
                "tileloadd tmm5, [{values} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{values} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "add {weights}, 1024",
                "add {values}, {value_bytes}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{acc} + {line}], tmm0",
                "tilestored [{acc} + {line} + 1024], tmm1",
                line = in(reg) 64usize,
                acc = in(reg) acc.add(tile * TILE_LEN),
                weights = inout(reg) weights => _,
                values = inout(reg) values.add(tile * TILE_LEN) => _,
                value_bytes = in(reg) value_bytes,
                steps = inout(reg) steps => _,
                options(nostack),
            );
        }
    }
}
