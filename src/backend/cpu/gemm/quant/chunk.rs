//! The products of a chunk of panels with the rows of a register tile.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

use super::super::super::pack::PanelLayout;
use super::super::super::simd::{LANES, PrefetchDistances, Simd};
use super::super::quant_input::{MAX_TILE_ROWS, QuantBlock, QuantRow, SUMS_16_TIMES};
use super::formats::{PART, PanelFormat, adds_in_shorts, num_parts, parts_of_block, scales_shorts};
use crate::quant::MAX_BLOCK_WEIGHTS;
use std::ops::Range;

/// Whether the rows `2i` and `2i + 1` of a register tile are a pair ([`Simd::PAIRS_ROWS`]). For two rows, bringing the
/// weights into order takes as many instructions as it saves.
pub(super) const fn has_pairs<S: Simd, const M: usize>() -> bool {
    S::PAIRS_ROWS && M >= 4
}

/// Numbers of the columns, for all rows or for the two registers of each pair.
#[inline(always)]
fn for_rows<S: Simd, const M: usize>(simd: S, of_columns: S::V) -> [S::V; 2] {
    if const { has_pairs::<S, M>() } { simd.pair_rows([of_columns; 2]) } else { [of_columns; 2] }
}

/// Prefetches what these steps, of the 8 of a part, need of later chunks. Where the panel is in a cache already, this
/// costs little.
#[inline(always)]
fn prefetch<S: Simd, F: PanelFormat>(
    simd: S,
    chunk: *const u8,
    distances: PrefetchDistances,
    part: usize,
    steps: Range<usize>,
) {
    if !F::IS_UNPACKED {
        const { assert!(PanelLayout::of(F::FORMAT).chunk_bytes.is_multiple_of(CACHE_LINE)) }
        let part_bytes = PanelLayout::of(F::FORMAT).chunk_bytes / num_parts::<F>();
        let num_lines = part_bytes.div_ceil(CACHE_LINE);
        for line in steps.start * num_lines / 8..steps.end * num_lines / 8 {
            let at = chunk.wrapping_add(part * part_bytes + line * CACHE_LINE);
            simd.prefetch_weights(at, distances);
        }
    }
}

/// How the next chunk is prefetched while this one is multiplied. The processor handles only a few misses at a time, so
/// they are spread over the register tiles.
#[derive(Clone, Copy)]
pub(super) struct PrefetchShares {
    num_lines: usize,
    lines_of_tile: usize,
}

impl PrefetchShares {
    pub fn new(chunk_bytes: usize, num_tiles: usize) -> Self {
        let num_lines = chunk_bytes / CACHE_LINE;
        Self { num_lines, lines_of_tile: num_lines.div_ceil(num_tiles) }
    }

    /// Prefetches what belongs to a register tile.
    #[inline(always)]
    pub fn prefetch<S: Simd>(self, simd: S, next: *const u8, tile: usize) {
        let first = tile * self.lines_of_tile;
        for line in first..self.num_lines.min(first + self.lines_of_tile) {
            simd.prefetch(next.wrapping_add(line * CACHE_LINE));
        }
    }
}

/// Adds the products of a chunk of `P` panels with `M` rows, or with pairs of rows ([`has_pairs`]). `distances`
/// are to the chunks that are prefetched, whatever panels they belong to.
///
/// # Safety
/// `at` are chunks in this format, and the input has this chunk of these rows.
#[inline(always)]
pub(super) unsafe fn add_chunk<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    format: F,
    at: [*const u8; P],
    chunk: usize,
    distances: PrefetchDistances,
    x: QuantRow,
    results: &mut [[S::V; P]; M],
) {
    for block in 0..F::BLOCKS {
        // SAFETY: the caller's promise.
        let x = unsafe { x.block(F::IS_SMALL, chunk * F::BLOCKS + block) };
        let mut sums = [[simd.splat(0.0); P]; M];
        // With `SUMS_FIT_SHORTS`, the same as integers.
        let mut int_sums = [[simd.splat_int(0); P]; M];
        for part in block * parts_of_block::<F>()..(block + 1) * parts_of_block::<F>() {
            // With few rows, the prefetches of a part are spread over its steps: the processor handles only a few
            // misses at a time. With many rows they are together, because the compiler moves no load of an operand
            // across one.
            let are_together = M > 2;
            if are_together {
                for at in at {
                    prefetch::<S, F>(simd, at, distances, part, 0..8);
                }
            }
            let part_in_block = part - block * parts_of_block::<F>();
            let mut ints = [[simd.splat_int(0); P]; M];
            // With `scales_shorts`, the same in the halves of lanes.
            let mut shorts = ints;
            // SAFETY: the caller's promise.
            unsafe {
                let words = |step: usize| x.codes(part_in_block * (PART / 4) + step);
                macro_rules! four_steps {
                    ($half:literal: $($step:literal)*; $($even:literal $odd:literal),*) => {
                        let is_first = const { $half * HALF % F::GROUP == 0 };
                        if is_first && !const { scales_shorts::<S, F>() } {
                            ints = begin::<S, F, M, P>(simd, x, 2 * part_in_block + $half);
                        }
                        if const { adds_in_shorts::<S, F>() } {
                            let mut codes = [[simd.table(&[0; LANES]); 4]; P];
                            $(
                                if !are_together {
                                    prefetch::<S, F>(simd, at[0], distances, part, $step..$step + 1);
                                }
                                for p in 0..P {
                                    codes[p][$step % 4] = format.codes::<S, $step>(simd, at[p], part);
                                }
                            )*
                            for m in 0..M {
                                let word = |step: usize| *words(4 * $half + step).add(m);
                                let of_row = [word(0), word(1), word(2), word(3)];
                                for p in 0..P {
                                    if const { scales_shorts::<S, F>() } {
                                        let group = (PART * part_in_block + $half * HALF) / F::GROUP;
                                        for step in 0..4 {
                                            let (codes, word) = (codes[p][step], of_row[step]);
                                            shorts[m][p] = if is_first && step == 0 {
                                                first_of_group::<S, F>(simd, x, group, m, codes, word)
                                            } else {
                                                simd.dot_in_shorts(shorts[m][p], codes, word)
                                            };
                                        }
                                    } else {
                                        ints[m][p] = simd.dot_four(ints[m][p], codes[p], of_row, F::LARGEST);
                                    }
                                }
                            }
                        } else if const { has_pairs::<S, M>() } {
                            $(
                                for p in 0..P {
                                    let even = format.codes::<S, $even>(simd, at[p], part);
                                    let odd = format.codes::<S, $odd>(simd, at[p], part);
                                    let codes =
                                        if F::IS_UNPACKED { [even, odd] } else { simd.pair_steps([even, odd]) };
                                    for m in (0..M).step_by(2) {
                                        let word = |step: usize| words(step).add(m).cast::<u64>();
                                        let of_rows = [word($even).read_unaligned(), word($odd).read_unaligned()];
                                        let pair = [ints[m][p], ints[m + 1][p]];
                                        [ints[m][p], ints[m + 1][p]] = simd.dot_two_rows(pair, codes, of_rows);
                                    }
                                }
                            )*
                        } else {
                            $(
                                if !are_together {
                                    prefetch::<S, F>(simd, at[0], distances, part, $step..$step + 1);
                                }
                                let mut codes = [simd.table(&[0; LANES]); P];
                                for p in 0..P {
                                    codes[p] = format.codes::<S, $step>(simd, at[p], part);
                                }
                                add_products::<S, F, M, P>(simd, &mut ints, codes, words($step));
                            )*
                        }
                        let group = (part * PART + $half * HALF) / F::GROUP;
                        if const { ($half + 1) * HALF % F::GROUP == 0 } {
                            for p in 0..P {
                                let scale = format.scale(simd, at[p], group);
                                if const { scales_shorts::<S, F>() } {
                                    let scale = simd.pack_shorts(scale, scale);
                                    for m in 0..M {
                                        int_sums[m][p] = simd.dot_short_pairs(int_sums[m][p], shorts[m][p], scale);
                                    }
                                } else {
                                    let scales = for_rows::<S, M>(simd, simd.as_floats(scale));
                                    for m in 0..M {
                                        let (ints, scale) = (ints[m][p], scales[m % 2]);
                                        if F::SUMS_FIT_SHORTS {
                                            int_sums[m][p] =
                                                simd.add_scaled(int_sums[m][p], ints, simd.as_ints(scale));
                                        } else if F::IS_SMALL {
                                            sums[m][p] = simd.to_floats(ints);
                                        } else {
                                            sums[m][p] = simd.fused(simd.to_floats(ints), scale, sums[m][p]);
                                        }
                                    }
                                }
                            }
                        }
                    };
                }
                four_steps!(0: 0 1 2 3; 0 1, 2 3);
                four_steps!(1: 4 5 6 7; 4 5, 6 7);
            }
        }
        if F::SUMS_FIT_SHORTS {
            for m in 0..M {
                for p in 0..P {
                    sums[m][p] = simd.to_floats(int_sums[m][p]);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { add_block(simd, format, at, block, x, sums, results) };
    }
}

/// Scales the sums of the groups of a weight block, and adds them to the results.
///
/// # Safety
/// As for [`add_chunk`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn add_block<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    format: F,
    at: [*const u8; P],
    block: usize,
    x: QuantBlock,
    sums: [[S::V; P]; M],
    results: &mut [[S::V; P]; M],
) {
    // SAFETY: the caller's promise.
    unsafe {
        for p in 0..P {
            let minima = minima::<S, F, M>(simd, format, at[p], x);
            let [factor, minimum_factor] = format.factors(simd, at[p], block);
            let factors = for_rows::<S, M>(simd, factor);
            let minimum_factors = for_rows::<S, M>(simd, minimum_factor);
            for m in 0..M {
                let mut result = simd.mul(factors[m % 2], sums[m][p]);
                if F::HAS_MINIMUM {
                    result = simd.fused(minimum_factors[m % 2], minima[m], result);
                }
                let scale = x.scale().add(m);
                let scale = if const { has_pairs::<S, M>() } {
                    simd.as_floats(simd.splat_two_rows(*scale.sub(m % 2).cast::<[u32; 2]>()))
                } else {
                    simd.splat(*scale)
                };
                results[m][p] = simd.fused(result, scale, results[m][p]);
            }
        }
    }
}

/// What codes as they are multiplied are larger than they should be: 0 or a power of two.
pub(super) const fn bias_of_codes<S: Simd, F: PanelFormat>() -> i32 {
    if F::IS_SIGNED && S::ADDS_128 { 128 } else { F::BIAS }
}

/// Minus the sum of the input of a group, as the input has it, times the bias of the codes, which is not 0.
#[inline(always)]
pub(super) fn times_bias<S: Simd, F: PanelFormat>(simd: S, minus_sum: S::Ints) -> S::Ints {
    let times = if F::GROUP == HALF { SUMS_16_TIMES } else { 1 };
    let bias = bias_of_codes::<S, F>();
    // Shifts, because they take their operand from memory.
    match bias.trailing_zeros().checked_sub(times.trailing_zeros()) {
        Some(0) => minus_sum,
        Some(up) => simd.or_shifted(simd.splat_int(0), minus_sum, up),
        None => simd.move_signed(minus_sum, 0, times.trailing_zeros() - bias.trailing_zeros()),
    }
}

/// The integer sums of a group before its first step: they make up for the bias of the codes. The group begins with
/// half a part, counted from the start of the block.
///
/// # Safety
/// The input has these rows.
#[inline(always)]
pub(super) unsafe fn begin<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    x: QuantBlock,
    half: usize,
) -> [[S::Ints; P]; M] {
    let bias = bias_of_codes::<S, F>();
    let mut ints = [[simd.splat_int(0); P]; M];
    if bias != 0 {
        for m in 0..M {
            // SAFETY: the caller's promise.
            let minus_sum = unsafe {
                let minus_sums = match F::GROUP {
                    HALF => x.minus_sum_16(half).add(m),
                    _ => x.minus_sum_32(half / 2).add(m),
                };
                if const { has_pairs::<S, M>() } {
                    simd.splat_two_rows(*minus_sums.sub(m % 2).cast::<[u32; 2]>())
                } else {
                    simd.splat_int(*minus_sums)
                }
            };
            let start = times_bias::<S, F>(simd, minus_sum);
            for p in 0..P {
                ints[m][p] = start;
            }
        }
    }
    ints
}

/// The sums of a group with [`scales_shorts`] after its first step, of row `m`.
///
/// # Safety
/// The input has this group of the row.
#[inline(always)]
pub(super) unsafe fn first_of_group<S: Simd, F: PanelFormat>(
    simd: S,
    x: QuantBlock,
    group: usize,
    m: usize,
    codes: S::Bytes,
    word: u32,
) -> S::Ints {
    if F::BIAS == 0 {
        return simd.first_in_shorts(codes, word);
    }
    assert!(const { F::GROUP == HALF });
    // SAFETY: the caller's promise.
    let minus_sums = simd.splat_int(unsafe { *x.minus_sum_16_in_parts(group).add(m) } as i32);
    let shift = SUMS_16_TIMES.trailing_zeros().saturating_sub(F::BIAS.trailing_zeros());
    let start = if shift == 0 { minus_sums } else { simd.shorts_down(minus_sums, shift) };
    simd.dot_in_shorts(start, codes, word)
}

/// Adds the products of four weights of each column.
///
/// # Safety
/// The words exist.
#[inline(always)]
pub(super) unsafe fn add_products<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    ints: &mut [[S::Ints; P]; M],
    codes: [S::Bytes; P],
    words: *const u32,
) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let word = unsafe { *words.add(m) };
        for p in 0..P {
            ints[m][p] = match F::IS_SIGNED {
                true => simd.dot_signed(ints[m][p], codes[p], word),
                false => simd.dot_bytes(ints[m][p], codes[p], word),
            };
        }
    }
}

/// The sums that belong to the second of [`PanelFormat::factors`], for each row or as pairs of rows.
///
/// # Safety
/// As for [`add_chunk`].
#[inline(always)]
unsafe fn minima<S: Simd, F: PanelFormat, const M: usize>(
    simd: S,
    format: F,
    at: *const u8,
    x: QuantBlock,
) -> [S::V; M] {
    let mut floats = [simd.splat(0.0); M];
    if !F::HAS_MINIMUM {
        return floats;
    }
    let mut sums = [simd.splat_int(0); M];
    // SAFETY: the caller's promise.
    unsafe {
        if F::IS_SMALL {
            for m in 0..M {
                sums[m] = simd.splat_int(*x.minus_sum_32(0).add(m));
            }
        } else {
            let num_pairs = MAX_BLOCK_WEIGHTS / F::GROUP / 2;
            for pair in 0..num_pairs {
                let minima = format.minima(simd, at, pair);
                for m in 0..M {
                    let of_rows = if F::GROUP == HALF { x.sums_16(pair) } else { x.sums_32(pair) };
                    sums[m] = simd.dot_shorts(sums[m], minima, *of_rows.add(m));
                }
            }
        }
    }
    for m in 0..M {
        floats[m] = simd.to_floats(sums[m]);
    }
    if const { has_pairs::<S, M>() } {
        for m in (0..M).step_by(2) {
            [floats[m], floats[m + 1]] = simd.pair_rows([floats[m], floats[m + 1]]);
        }
    }
    floats
}

/// Weights of a column in half of a part.
const HALF: usize = PART / 2;

/// Rows that are computed for all panels before the next ones: as many as stay in the second-level cache with the
/// panels of a task. Tiles of the input begin at multiples of it.
pub(super) const BLOCK_ROWS: usize = 8 * MAX_TILE_ROWS;

/// Bytes of a line of the caches.
const CACHE_LINE: usize = 64;
