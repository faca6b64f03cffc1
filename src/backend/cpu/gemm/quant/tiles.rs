//! Products with quantised weights and many rows on AMX tiles of bytes.
//!
//! A chunk of a panel is taken apart once for many rows, as for other instruction sets. The codes of a group are then
//! a tile of weights: as many lines as the group has steps, each with four codes of 16 columns. A tile of the input
//! has the codes of the group in 16 rows. Their product is the sums of products of 16 rows and 16 columns. These are
//! stored in memory, because no instruction moves a tile to vector registers, and are scaled and added up there like
//! those of other instruction sets. So a result has the same bits.

use super::super::super::pack::PanelLayout;
use super::super::super::simd::{LANES, Simd, SimdKernel, run_avx512_vnni};
use super::super::super::tile_registers::Tiles;
use super::super::part::{ProductPart, QuantOperands};
use super::super::quant_input::{QuantRow, SEGMENT, SEGMENT_BYTES};
use super::chunk::{BLOCK_ROWS, PrefetchShares, add_block, bias_of_codes, times_bias};
use super::formats::{PART, PanelFormat, num_parts};
use super::unpacked::{Unpacked, UnpackedChunk};
use std::arch::asm;
use std::ops::Range;

/// Computes all rows of a part.
///
/// # Safety
/// As for [`super::run`]. AMX is available, and [`super::has_whole_tiles`] holds.
pub(super) unsafe fn run<F: PanelFormat>(kernel: TileKernel<'_, F>) {
    let (results, x, w) = ((LANES, 4 * LANES), (LANES, F::GROUP), (F::GROUP / 4, 4 * LANES));
    // SAFETY: the caller's promise. AMX is only used with AVX-512.
    unsafe {
        let _tiles = Tiles::of([results, results, results, results, x, x, w, w]);
        run_avx512_vnni(kernel);
    }
}

pub(super) struct TileKernel<'a, F> {
    pub part: &'a ProductPart<'a>,
    pub operands: QuantOperands<'a>,
    pub panels: Range<usize>,
    pub format: F,
}

/// The sums of a group: `[rows][columns]`.
#[repr(C, align(64))]
struct GroupSums([[i32; LANES]; LANES]);

impl<F: PanelFormat> SimdKernel for TileKernel<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { part, operands, panels, format } = self;
        let layout = PanelLayout::of(F::FORMAT);
        let num_chunks = layout.num_chunks(F::FORMAT, operands.w.k());
        let mut space = UnpackedChunk::new();
        for first in part.rows.clone().step_by(BLOCK_ROWS) {
            let num_rows = BLOCK_ROWS.min(part.rows.end - first);
            let shares = PrefetchShares::new(layout.chunk_bytes, num_rows.div_ceil(LANES));
            for panel in panels.clone() {
                let mut results = [[0.0_f32; LANES]; BLOCK_ROWS];
                let at: *const u8 = operands.w.panel(panel).data.get();
                for chunk in 0..num_chunks {
                    // SAFETY: the panels exist (`ProductPart::run`), and a panel has `num_chunks` chunks. The input has
                    // whole tiles of rows, and `results` has too.
                    unsafe {
                        let stored = at.add(chunk * layout.chunk_bytes);
                        space.fill(simd, format, stored);
                        for row in (0..num_rows).step_by(LANES) {
                            let next = stored.wrapping_add(layout.chunk_bytes);
                            shares.prefetch(simd, next, row / LANES);
                            let x = operands.x.row(F::IS_SMALL, first + row);
                            add_tile(simd, Unpacked(format), &space, chunk, x, &mut results[row..row + LANES]);
                        }
                    }
                }
                for (row, result) in results[..num_rows].iter().enumerate() {
                    // SAFETY: as above; a row of results is a register.
                    unsafe { part.store(simd, first + row, panel, simd.load(result.as_ptr())) };
                }
            }
        }
    }
}

/// Adds the products of a chunk with a tile of 16 rows to their results.
///
/// # Safety
/// The input has this chunk of a whole tile of rows, of which `x` is the first. The tile registers are configured as in
/// [`run`].
#[inline(always)]
unsafe fn add_tile<S: Simd, F: PanelFormat>(
    simd: S,
    format: Unpacked<F>,
    unpacked: &UnpackedChunk,
    chunk: usize,
    x: QuantRow,
    rows: &mut [[f32; LANES]],
) {
    let groups_of_block = num_parts::<F>() / F::BLOCKS * PART / F::GROUP;
    let mut group_sums = GroupSums([[0; LANES]; LANES]);
    let mut results = [[simd.splat(0.0)]; LANES];
    // SAFETY: the caller's promise. There are 16 rows of results.
    unsafe {
        for m in 0..LANES {
            results[m][0] = simd.load(rows[m].as_ptr());
        }
        for block in 0..F::BLOCKS {
            let of_block = x.block(F::IS_SMALL, chunk * F::BLOCKS + block);
            let (mut sums, mut int_sums) = ([[simd.splat(0.0)]; LANES], [simd.splat_int(0); LANES]);
            for group_of_block in 0..groups_of_block {
                let group = block * groups_of_block + group_of_block;
                // Counted from the start of the row.
                let first = (chunk * F::BLOCKS * groups_of_block + group) * F::GROUP;
                let codes = x.by_row.add(first / SEGMENT * SEGMENT_BYTES + first % SEGMENT);
                multiply(codes, unpacked.codes_from(group * F::GROUP), &mut group_sums);
                let scale = format.scale(simd, unpacked.as_ptr(), group);
                for m in 0..LANES {
                    let mut ints = simd.load_ints(group_sums.0[m].as_ptr().cast());
                    if const { bias_of_codes::<S, F>() != 0 } {
                        let minus_sums = match F::GROUP {
                            PART => of_block.minus_sum_32(group_of_block),
                            _ => of_block.minus_sum_16(group_of_block),
                        };
                        let minus_sum = simd.splat_int(*minus_sums.add(m));
                        ints = simd.add_ints(ints, times_bias::<S, F>(simd, minus_sum));
                    }
                    if F::SUMS_FIT_SHORTS {
                        int_sums[m] = simd.add_scaled(int_sums[m], ints, scale);
                    } else if F::IS_SMALL {
                        sums[m][0] = simd.to_floats(ints);
                    } else {
                        sums[m][0] = simd.fused(simd.to_floats(ints), simd.as_floats(scale), sums[m][0]);
                    }
                }
            }
            if F::SUMS_FIT_SHORTS {
                for m in 0..LANES {
                    sums[m][0] = simd.to_floats(int_sums[m]);
                }
            }
            add_block(simd, format, [unpacked.as_ptr()], block, of_block, sums, &mut results);
        }
        for m in 0..LANES {
            simd.store(rows[m].as_mut_ptr(), results[m][0]);
        }
    }
}

/// The sums of products of a group: signed codes of the input with codes of weights that have no sign.
///
/// # Safety
/// The tile registers are configured as in [`run`], and the codes of a group are there.
#[inline(always)]
unsafe fn multiply(x: *const u8, w: *const u8, sums: &mut GroupSums) {
    // SAFETY: the caller's promise. Lines of all tiles are 64 bytes apart.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tileloadd tmm4, [{x} + {line}]",
            "tileloadd tmm6, [{w} + {line}]",
            "tdpbsud tmm0, tmm4, tmm6",
            "tilestored [{sums} + {line}], tmm0",
            x = in(reg) x,
            w = in(reg) w,
            sums = in(reg) sums,
            line = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}
