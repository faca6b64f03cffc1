//! The products of a chunk that was taken apart, two groups at a time.
//!
//! A product is added to a sum only when the previous one is finished. In a small register tile, the sums of one group
//! are too few to keep a processor busy that begins two products in each cycle. So the products of two groups take
//! turns. If the sums fit into 16 bits, those of both groups are scaled with one multiplication, as the halves of
//! lanes. That takes more instructions that pack them, for which AMD's processors have other ports.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

use super::super::super::simd::{LANES, Simd};
use super::super::quant_input::QuantRow;
use super::chunk::{add_block, add_products, begin};
use super::formats::{PART, PanelFormat};
use super::unpacked::{Unpacked, load_stored, write_stored};
use crate::quant::MAX_BLOCK_WEIGHTS;

/// Whether chunks in this format are multiplied that way. Larger register tiles have enough sums and no room for more.
pub(super) const fn takes_two_groups<S: Simd, F: PanelFormat, const M: usize, const P: usize>() -> bool {
    !F::IS_SMALL && !S::SUMS_IN_SHORTS && M == 4 && P == 2
}

/// As [`super::chunk::add_chunk`], for a chunk that was taken apart, and results in memory.
///
/// # Safety
/// As for [`super::chunk::add_chunk`], and there are results of `M` rows.
#[inline(always)]
pub(super) unsafe fn add_two_groups<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    format: Unpacked<F>,
    at: [*const u8; P],
    chunk: usize,
    x: QuantRow,
    results: &mut [[[f32; LANES]; P]],
) {
    assert!(const { takes_two_groups::<S, F, M, P>() && F::BLOCKS == 1 });
    let steps_of_group = const { F::GROUP / 4 };
    let mut sums = [[simd.splat(0.0); P]; M];
    // With `SUMS_FIT_SHORTS`, the same as integers.
    let mut int_sums = [[simd.splat_int(0); P]; M];
    // SAFETY: the caller's promise.
    unsafe {
        let x = x.block(false, chunk);
        for pair in 0..MAX_BLOCK_WEIGHTS / F::GROUP / 2 {
            let groups = [2 * pair, 2 * pair + 1];
            let mut ints = [[[simd.splat_int(0); P]; M]; 2];
            for i in 0..2 {
                ints[i] = begin::<S, Unpacked<F>, M, P>(simd, x, groups[i] * F::GROUP / (PART / 2));
            }
            for step in 0..steps_of_group {
                for i in 0..2 {
                    let step = groups[i] * steps_of_group + step;
                    let mut codes = [simd.table(&[0; LANES]); P];
                    for p in 0..P {
                        codes[p] = simd.load_bytes(at[p].add(4 * LANES * step));
                    }
                    add_products::<S, F, M, P>(simd, &mut ints[i], codes, x.codes(step));
                }
            }
            for p in 0..P {
                let scales = [format.scale(simd, at[p], groups[0]), format.scale(simd, at[p], groups[1])];
                if F::SUMS_FIT_SHORTS {
                    let scales = simd.pack_shorts(scales[0], scales[1]);
                    for m in 0..M {
                        let pair = simd.pack_shorts(ints[0][m][p], ints[1][m][p]);
                        int_sums[m][p] = simd.dot_short_pairs(int_sums[m][p], pair, scales);
                    }
                } else {
                    for i in 0..2 {
                        for m in 0..M {
                            let of_group = simd.to_floats(ints[i][m][p]);
                            sums[m][p] = simd.fused(of_group, simd.as_floats(scales[i]), sums[m][p]);
                        }
                    }
                }
            }
        }
        if F::SUMS_FIT_SHORTS {
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = simd.to_floats(int_sums[m][p]);
                }
            }
        }
        let mut registers = load_stored::<S, M, P>(simd, results);
        add_block(simd, format, at, 0, x, sums, &mut registers);
        write_stored(simd, results, registers);
    }
}
