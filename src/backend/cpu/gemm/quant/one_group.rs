//! The products of a chunk that was taken apart, one group at a time, for instruction sets with
//! [`Simd::SUMS_IN_SHORTS`]. The sums of the group are in registers. AVX2 has no more, so those of the block and the
//! results are in memory.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

use super::super::super::simd::{LANES, Simd};
use super::super::quant_input::QuantRow;
use super::chunk::{add_block, begin, first_of_group};
use super::formats::{PART, PanelFormat, adds_in_shorts, num_parts, scales_shorts};
use super::unpacked::{Unpacked, load_stored, write_stored};

/// Whether chunks in this format are multiplied that way. Where there are more registers, signed codes are multiplied
/// with two panels at once.
pub(super) const fn adds_one_group<S: Simd, F: PanelFormat>() -> bool {
    adds_in_shorts::<S, F>() || (S::SUMS_IN_SHORTS && S::QUANT_PANELS == 1)
}

/// As [`super::chunk::add_chunk`], for a chunk that was taken apart, and results in memory.
///
/// # Safety
/// As for [`super::chunk::add_chunk`], and there are results of `M` rows.
#[inline(always)]
pub(super) unsafe fn add_one_group<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    format: Unpacked<F>,
    at: [*const u8; P],
    chunk: usize,
    x: QuantRow,
    results: &mut [[[f32; LANES]; P]],
) {
    let steps_of_group = const { F::GROUP / 4 };
    let groups_of_block = const { num_parts::<F>() / F::BLOCKS * PART / F::GROUP };
    for block in 0..F::BLOCKS {
        // SAFETY: the caller's promise.
        unsafe {
            let x = x.block(F::IS_SMALL, chunk * F::BLOCKS + block);
            let mut sums = [[simd.splat(0.0); P]; M];
            // With `scales_shorts`, the same as integers.
            let mut int_sums = [[simd.splat_int(0); P]; M];
            for group in 0..groups_of_block {
                let mut shorts = [[simd.splat_int(0); P]; M];
                let mut ints = shorts;
                if const { !scales_shorts::<S, F>() } {
                    ints = begin::<S, Unpacked<F>, M, P>(simd, x, group * steps_of_group / STEPS_OF_HALF);
                }
                for step in 0..steps_of_group {
                    let of_block = group * steps_of_group + step;
                    let mut codes = [simd.table(&[0; LANES]); P];
                    for p in 0..P {
                        let of_chunk = block * groups_of_block * steps_of_group + of_block;
                        codes[p] = simd.load_bytes(at[p].add(4 * LANES * of_chunk));
                    }
                    for m in 0..M {
                        let word = *x.codes(of_block).add(m);
                        for p in 0..P {
                            if F::IS_SIGNED {
                                ints[m][p] = simd.dot_signed(ints[m][p], codes[p], word);
                                continue;
                            }
                            shorts[m][p] = if scales_shorts::<S, F>() && step == 0 {
                                first_of_group::<S, F>(simd, x, group, m, codes[p], word)
                            } else if step % const { short_steps::<F>() } == 0 {
                                simd.first_in_shorts(codes[p], word)
                            } else {
                                simd.dot_in_shorts(shorts[m][p], codes[p], word)
                            };
                        }
                    }
                    let is_signed_or_scaled = const { F::IS_SIGNED || scales_shorts::<S, F>() };
                    if !is_signed_or_scaled && (step + 1) % const { short_steps::<F>() } == 0 {
                        for m in 0..M {
                            for p in 0..P {
                                ints[m][p] = simd.dot_shorts(ints[m][p], shorts[m][p], PAIR_OF_ONES);
                            }
                        }
                    }
                }
                for p in 0..P {
                    let scale = format.scale(simd, at[p], group);
                    for m in 0..M {
                        if scales_shorts::<S, F>() {
                            int_sums[m][p] = simd.dot_short_pairs(int_sums[m][p], shorts[m][p], scale);
                        } else if F::IS_SMALL {
                            sums[m][p] = simd.to_floats(ints[m][p]);
                        } else {
                            sums[m][p] = simd.fused(simd.to_floats(ints[m][p]), simd.as_floats(scale), sums[m][p]);
                        }
                    }
                }
            }
            if scales_shorts::<S, F>() {
                for m in 0..M {
                    for p in 0..P {
                        sums[m][p] = simd.to_floats(int_sums[m][p]);
                    }
                }
            }
            let mut registers = load_stored::<S, M, P>(simd, results);
            add_block(simd, format, at, block, x, sums, &mut registers);
            write_stored(simd, results, registers);
        }
    }
}

/// How many steps can be added up in integers of 16 bits: one adds two products of a code with -127 to 127. They are in
/// one group.
const fn short_steps<F: PanelFormat>() -> usize {
    let most = i16::MAX as usize / (2 * F::LARGEST as usize * 127);
    let in_group = F::GROUP / 4;
    if most >= in_group || F::SUMS_FIT_SHORTS { in_group } else { 1 << most.ilog2() }
}

/// Steps of half a part.
const STEPS_OF_HALF: usize = PART / 2 / 4;

/// Two integers of 16 bits.
const PAIR_OF_ONES: u32 = 0x0001_0001;
