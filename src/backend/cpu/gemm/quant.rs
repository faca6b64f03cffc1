//! Products with quantised weights on register tiles, written once over [`Simd`].
//!
//! Sums of products of bytes within a group are exact integers. Where they and the scales are integers of 16 bits
//! ([`PanelFormat::SUMS_FIT_SHORTS`]), the groups of a block are scaled and added up as integers. All else is
//! multiplied with scales and added up in float32, in order, with operations that are rounded once. So a result has the
//! same bits on every instruction set, and for any number of rows.
//!
//! With few rows the codes are used as they are read, because memory is the limit. With many rows the codes and scales
//! of a chunk are first taken apart, once for all these rows. That takes longer than it saves with small blocks and
//! VNNI. There, many rows are multiplied with two panels at once, so that each word of the input is loaded for both.
//! How many rows are many is measured (`many_rows`). AMX multiplies weights that were taken apart on tiles.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

mod chunk;
mod formats;
mod one_group;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod two_groups;
mod unpacked;

use super::super::isa::Isa;
use super::super::pack::PanelLayout;
use super::super::processor::WeightPrefetch;
use super::super::simd::{LANES, PrefetchDistances, Simd, SimdKernel};
use super::many_rows::{ManyRows, many_rows};
use super::part::{ProductPart, QuantOperands};
use super::quant_input::{MAX_TILE_ROWS, QuantRow};
use crate::quant::QuantFormat;
use chunk::{BLOCK_ROWS, PrefetchShares, add_chunk, has_pairs};
use formats::{Iq4Nl, Iq4Xs, Mxfp4, PanelFormat, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use one_group::{add_one_group, adds_one_group};
use std::ops::Range;
#[cfg(target_arch = "x86_64")]
use tiles::TileKernel;
use two_groups::{add_two_groups, takes_two_groups};
use unpacked::{Unpacked, UnpackedChunk, load_stored, write_stored};

/// Calls a macro with the type of a format.
macro_rules! for_format {
    ($format:expr, $call:ident) => {
        match $format {
            QuantFormat::Q4_0 => $call!(Q4_0),
            QuantFormat::Q4_1 => $call!(Q4_1),
            QuantFormat::Q5_0 => $call!(Q5_0),
            QuantFormat::Q5_1 => $call!(Q5_1),
            QuantFormat::Q8_0 => $call!(Q8_0),
            QuantFormat::Q2_K => $call!(Q2K),
            QuantFormat::Q3_K => $call!(Q3K),
            QuantFormat::Q4_K => $call!(Q4K),
            QuantFormat::Q5_K => $call!(Q5K),
            QuantFormat::Q6_K => $call!(Q6K),
            QuantFormat::IQ4_NL => $call!(Iq4Nl),
            QuantFormat::IQ4_XS => $call!(Iq4Xs),
            QuantFormat::MXFP4 => $call!(Mxfp4),
        }
    };
}

/// Computes a part, panels of one format after those of another.
///
/// # Safety
/// As for [`ProductPart::run`]; the panels exist.
pub(super) unsafe fn run(part: &ProductPart<'_>, operands: QuantOperands<'_>, isa: Isa) {
    let mut panels = part.panels.clone();
    while !panels.is_empty() {
        let format = operands.w.panel(panels.start).format;
        let end = panels.clone().find(|panel| operands.w.panel(*panel).format != format).unwrap_or(panels.end);
        let panels_of_format = panels.start..end;
        panels.start = end;
        let many_rows_of = |isa| operands.many_rows.unwrap_or_else(|| many_rows(isa, format));
        // With AMX, rows that are too few for tiles are computed as with AVX-512.
        let is_on_tiles = isa == Isa::Amx && has_whole_tiles(&part.rows, many_rows_of(isa).from);
        let isa = if isa == Isa::Amx && !is_on_tiles { Isa::Avx512 } else { isa };
        let many_rows = many_rows_of(isa);
        macro_rules! run {
            ($format:ident) => {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: the caller's promise; the instruction set was checked when it was chosen.
                    Isa::Amx => unsafe {
                        tiles::run(TileKernel { part, operands, panels: panels_of_format, format: $format })
                    },
                    _ => isa.run(QuantKernel { part, operands, panels: panels_of_format, many_rows, format: $format }),
                }
            };
        }
        for_format!(format, run);
    }
}

/// How many rows the register tiles of many rows may have at most, the most first. Empty if many rows are computed like
/// few.
pub fn heights_of_many_rows(isa: Isa, format: QuantFormat) -> &'static [usize] {
    kernel_of_many_rows(isa, format).heights
}

/// Whether many rows are multiplied with two panels at once, as they are stored.
pub fn reads_two_panels(isa: Isa, format: QuantFormat) -> bool {
    kernel_of_many_rows(isa, format).reads_two_panels
}

/// The fewest rows that can be computed as many.
pub fn fewest_many_rows(isa: Isa, format: QuantFormat) -> usize {
    kernel_of_many_rows(isa, format).fewest
}

/// How an instruction set computes many rows.
struct ManyRowsKernel {
    heights: &'static [usize],
    reads_two_panels: bool,
    fewest: usize,
}

fn kernel_of_many_rows(isa: Isa, format: QuantFormat) -> ManyRowsKernel {
    macro_rules! kernel {
        ($format:ident) => {
            isa.run(FindKernel($format))
        };
    }
    if isa == Isa::Amx {
        ManyRowsKernel { heights: &[MAX_TILE_ROWS], reads_two_panels: false, fewest: MAX_TILE_ROWS }
    } else {
        for_format!(format, kernel)
    }
}

struct FindKernel<F>(F);

impl<F: PanelFormat> SimdKernel for FindKernel<F> {
    type Output = ManyRowsKernel;
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) -> ManyRowsKernel {
        let heights: &[usize] = match const { (is_taken_apart::<S, F>(), height_of_many_rows::<S>()) } {
            (true, 8) => const { if S::QUANT_PANELS == 2 { &[8, 4] } else { &[8] } },
            (true, 4) => &[4],
            (true, _) => &[2],
            (false, _) => const { if takes_two_panels::<S, F>() { &[8] } else { &[] } },
        };
        ManyRowsKernel {
            heights,
            reads_two_panels: const { takes_two_panels::<S, F>() },
            fewest: if takes_low_tiles::<S>() { heights[0] } else { MAX_TILE_ROWS },
        }
    }
}

/// Whether the rows of a part begin with a tile of the input and are at least this many.
fn has_whole_tiles(rows: &Range<usize>, many_rows: usize) -> bool {
    rows.len() >= many_rows.max(MAX_TILE_ROWS) && rows.start.is_multiple_of(MAX_TILE_ROWS)
}

struct QuantKernel<'a, F> {
    part: &'a ProductPart<'a>,
    operands: QuantOperands<'a>,
    panels: Range<usize>,
    many_rows: ManyRows,
    format: F,
}

impl<F: PanelFormat> SimdKernel for QuantKernel<'_, F> {
    type Output = ();
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Range { start, end } = self.part.rows;
        for row in (start..end).step_by(BLOCK_ROWS) {
            let rows = row..end.min(row + BLOCK_ROWS);
            let mut panel = self.panels.start;
            while panel < self.panels.end {
                let left = self.panels.end - panel;
                let (mut width, mut first_left) = (1, row);
                if const { is_taken_apart::<S, F>() } {
                    // (The bounds are constants, so that no code is made for tiles that an instruction set does not
                    // use.)
                    if const { height_of_many_rows::<S>() == 4 && S::QUANT_PANELS == 2 } && left >= 2 {
                        width = 2;
                        first_left = self.many_rows::<S, 4, 2>(simd, &rows, panel);
                    } else if const { S::QUANT_ROWS == 8 && S::QUANT_PANELS == 2 } && left >= 2 {
                        // Tiles of eight rows load fewer operands, and those of four keep all sums in registers. Where
                        // the former are faster, so are two panels at once for eight rows that are few.
                        width = 2;
                        first_left = if self.many_rows.max_height >= 8 {
                            let first_left = self.many_rows::<S, 8, 2>(simd, &rows, panel);
                            self.two_panels(simd, first_left..rows.end, panel)
                        } else {
                            self.many_rows::<S, 4, 2>(simd, &rows, panel)
                        };
                    } else if const { S::QUANT_ROWS == 8 } {
                        first_left = self.many_rows::<S, 8, 1>(simd, &rows, panel);
                    } else if const { S::QUANT_ROWS == 4 } {
                        first_left = self.many_rows::<S, 4, 1>(simd, &rows, panel);
                    } else {
                        first_left = self.many_rows::<S, 2, 1>(simd, &rows, panel);
                    }
                } else if const { takes_two_panels::<S, F>() } && left >= 2 && self.are_many::<S, 8>(&rows) {
                    width = 2;
                    first_left = self.two_panels(simd, rows.clone(), panel);
                }
                for panel in panel..panel + width {
                    self.few_rows(simd, first_left..rows.end, panel);
                }
                panel += width;
            }
        }
    }
}

/// Whether panels in this format are taken apart for many rows. With small blocks it is only faster if one group is
/// multiplied at a time.
const fn is_taken_apart<S: Simd, F: PanelFormat>() -> bool {
    !F::IS_SMALL || adds_one_group::<S, F>()
}

/// Whether many rows are multiplied with two panels of this format at once, as they are stored.
const fn takes_two_panels<S: Simd, F: PanelFormat>() -> bool {
    S::QUANT_PANELS == 2 && !is_taken_apart::<S, F>()
}

/// Whether the way of many rows takes tiles of the input of less than 16 rows. Instruction sets with products of bytes
/// wait for the memory with so few rows, the others for their own decoding of the codes.
const fn takes_low_tiles<S: Simd>() -> bool {
    S::SUMS_IN_SHORTS
}

/// Rows of the tiles of many rows, where panels are taken apart. Sums in 16 bits take registers of their own.
const fn height_of_many_rows<S: Simd>() -> usize {
    if S::QUANT_PANELS == 2 && S::SUMS_IN_SHORTS { 4 } else { S::QUANT_ROWS }
}

impl<F: PanelFormat> QuantKernel<'_, F> {
    /// Computes all whole tiles of `M` rows of `P` panels if the rows are many, and of two panels also a tile of four
    /// rows behind them. Returns the first row that is left.
    #[inline(always)]
    fn many_rows<S: Simd, const M: usize, const P: usize>(&self, simd: S, rows: &Range<usize>, panel: usize) -> usize {
        // The rows of a register tile are in one tile of the input.
        if !self.are_many::<S, M>(rows) {
            return rows.start;
        }
        let unit = const { last_height::<M, P>() };
        let rows = rows.start..rows.start + rows.len() / unit * unit;
        let end = rows.end;
        simd.call(UnpackedTiles::<F, M, P> { kernel: self, rows, panel });
        end
    }

    /// Computes all whole tiles of eight rows of two panels, as they are stored. Returns the first row that is left.
    #[inline(always)]
    fn two_panels<S: Simd>(&self, simd: S, rows: Range<usize>, panel: usize) -> usize {
        // The rows of a register tile are in one tile of the input.
        if !rows.start.is_multiple_of(8) {
            return rows.start;
        }
        let end = rows.start + rows.len() / 8 * 8;
        for row in (rows.start..end).step_by(8) {
            simd.call(RowTile::<F, 8, 2> { kernel: self, row, stored: row..row + 8, panel });
        }
        end
    }

    /// Whether the rows are many, enough for tiles of `M`, and begin with a tile of the input that
    /// [`takes_low_tiles`] allows: the rows of a register tile are in one.
    #[inline(always)]
    fn are_many<S: Simd, const M: usize>(&self, rows: &Range<usize>) -> bool {
        rows.len() >= self.many_rows.from.max(M)
            && rows.start.is_multiple_of(MAX_TILE_ROWS)
            && (takes_low_tiles::<S>() || self.operands.x.tile_height(F::IS_SMALL) == MAX_TILE_ROWS)
    }

    /// Some rows of a panel.
    #[inline(always)]
    fn few_rows<S: Simd>(&self, simd: S, Range { start: mut row, end }: Range<usize>, panel: usize) {
        while row < end {
            // The rows of a register tile are in one tile of the input.
            let rest = (end - row).min(MAX_TILE_ROWS - row % MAX_TILE_ROWS).min(S::QUANT_ROWS);
            // One row less than a register tile has is computed with such a tile, which is faster than with two smaller
            // ones. (The bounds are constants, so that no code is made for tiles that an instruction set does not use.)
            row = match rest {
                1 if self.operands.x.tile_height(F::IS_SMALL) == 1 => {
                    simd.call(RowTile::<F, 1, 1> { kernel: self, row, stored: row..row + 1, panel });
                    row + 1
                }
                7.. if const { S::QUANT_ROWS >= 8 } => self.row_tile::<S, 8>(simd, row, rest, panel),
                5.. if const { S::QUANT_ROWS >= 8 } => self.row_tile::<S, 6>(simd, row, rest, panel),
                3.. if const { S::QUANT_ROWS >= 4 } => self.row_tile::<S, 4>(simd, row, rest.min(4), panel),
                // The kernel of a single row takes its words side by side, which saves address arithmetic. So a row
                // that has others in its tile of the input is computed with one of these.
                _ => self.row_tile::<S, 2>(simd, row, rest.min(2), panel),
            };
        }
    }

    /// `num_rows` rows of a panel, up to `M`, which are in one tile of the input. That tile has `M` rows or more, and
    /// all can be read. Returns the row behind them.
    #[inline(always)]
    fn row_tile<S: Simd, const M: usize>(&self, simd: S, row: usize, num_rows: usize, panel: usize) -> usize {
        let in_tile = row % MAX_TILE_ROWS;
        let first = row - in_tile + in_tile.min(self.operands.x.tile_height(F::IS_SMALL) - M);
        simd.call(RowTile::<F, M, 1> { kernel: self, row: first, stored: row..row + num_rows, panel });
        row + num_rows
    }

    /// Writes the results of rows of a tile of the input that are in memory.
    ///
    /// # Safety
    /// The rows and the panels exist.
    #[inline(always)]
    unsafe fn store_tile<S: Simd, const M: usize, const P: usize>(
        &self,
        simd: S,
        row: usize,
        panel: usize,
        results: &mut [[[f32; LANES]; P]],
    ) {
        // SAFETY: the caller's promise; a row of results is a register for each panel.
        unsafe {
            if const { has_pairs::<S, M>() } {
                for [even, odd] in results.as_chunks_mut().0 {
                    for (even, odd) in even.iter_mut().zip(odd) {
                        let pair = [simd.load(even.as_ptr()), simd.load(odd.as_ptr())];
                        let [of_even, of_odd] = simd.rows_of_pair(pair);
                        simd.store(even.as_mut_ptr(), of_even);
                        simd.store(odd.as_mut_ptr(), of_odd);
                    }
                }
            }
            for p in 0..P {
                self.part.store_rows(simd, row, panel + p, results.iter().map(|row| &row[p]));
            }
        }
    }

    /// Writes the results of some rows of a register tile.
    ///
    /// # Safety
    /// The rows and the panels exist.
    #[inline(always)]
    unsafe fn store<S: Simd, const M: usize, const P: usize>(
        &self,
        simd: S,
        row: usize,
        stored: Range<usize>,
        panel: usize,
        mut results: [[S::V; P]; M],
    ) {
        if const { has_pairs::<S, M>() } {
            for m in (0..M).step_by(2) {
                for p in 0..P {
                    [results[m][p], results[m + 1][p]] = simd.rows_of_pair([results[m][p], results[m + 1][p]]);
                }
            }
        }
        for m in 0..M {
            for p in 0..P {
                if stored.contains(&(row + m)) {
                    // SAFETY: the caller's promise.
                    unsafe { self.part.store(simd, row + m, panel + p, results[m][p]) };
                }
            }
        }
    }
}

/// Rows of the last register tile of `P` panels, where the others have `M`.
const fn last_height<const M: usize, const P: usize>() -> usize {
    if P == 2 { 4 } else { M }
}

/// Whole tiles of `M` rows of `P` panels, from a whole tile of the input on, and perhaps one of [`last_height`] behind
/// them. The panels are taken apart once for all of them. The rows and the panels are those of the part.
struct UnpackedTiles<'k, 'a, F, const M: usize, const P: usize> {
    kernel: &'k QuantKernel<'a, F>,
    rows: Range<usize>,
    panel: usize,
}

impl<F: PanelFormat, const M: usize, const P: usize> SimdKernel for UnpackedTiles<'_, '_, F, M, P> {
    type Output = ();
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { kernel, rows, panel } = self;
        let QuantKernel { operands, format, .. } = kernel;
        let layout = PanelLayout::of(F::FORMAT);
        const { assert!(F::BLOCKS == PanelLayout::of(F::FORMAT).blocks) };
        let whole = rows.len() / M * M;
        let mut results = [[[0.0_f32; LANES]; P]; BLOCK_ROWS];
        let mut space = [const { UnpackedChunk::new() }; P];
        // SAFETY: the panels exist (`ProductPart::run`), no row is past the part's last, and a panel has `num_chunks`
        // chunks.
        unsafe {
            let num_chunks = layout.num_chunks(F::FORMAT, operands.w.k());
            let shares = PrefetchShares::new(layout.chunk_bytes, whole / M);
            for chunk in 0..num_chunks {
                let (mut at, mut next) = ([std::ptr::null(); P], [std::ptr::null(); P]);
                for p in 0..P {
                    let data: *const u8 = operands.w.panel(panel + p).data.get();
                    let stored = data.add(chunk * layout.chunk_bytes);
                    space[p].fill(simd, *format, stored);
                    at[p] = space[p].as_ptr();
                    // Behind the last chunk of these panels is the first one of the next panels.
                    let chunks_between = if chunk + 1 < num_chunks { 0 } else { (P - 1) * num_chunks };
                    next[p] = stored.wrapping_add((chunks_between + 1) * layout.chunk_bytes);
                }
                for tile in (0..rows.len()).step_by(MAX_TILE_ROWS) {
                    let mut x = operands.x.row(F::IS_SMALL, rows.start + tile);
                    debug_assert!(takes_low_tiles::<S>() || x.stride == MAX_TILE_ROWS);
                    for first in (tile..whole.min(tile + MAX_TILE_ROWS)).step_by(M) {
                        for next in next {
                            shares.prefetch(simd, next, first / M);
                        }
                        let results = &mut results[first..];
                        if const { takes_low_tiles::<S>() } && x.stride < MAX_TILE_ROWS {
                            add_to_stored::<S, F, M, P>(simd, *format, at, chunk, x, results);
                        } else {
                            x.stride = MAX_TILE_ROWS; // so that the compiler knows it
                            add_to_stored::<S, F, M, P>(simd, *format, at, chunk, x, results);
                        }
                        x = x.behind(M);
                    }
                    if const { last_height::<M, P>() < M } && whole < rows.len() && whole < tile + MAX_TILE_ROWS {
                        add_to_stored::<S, F, 4, P>(simd, *format, at, chunk, x, &mut results[whole..]);
                    }
                    if chunk + 1 == num_chunks {
                        let results = &mut results[tile..rows.len().min(tile + MAX_TILE_ROWS)];
                        kernel.store_tile::<S, M, P>(simd, rows.start + tile, panel, results);
                    }
                }
            }
        }
    }
}

/// Adds the products of a chunk with `M` rows to results in memory.
///
/// # Safety
/// The chunk was taken apart, and the input has this chunk of these rows.
#[inline(always)]
unsafe fn add_to_stored<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    format: F,
    at: [*const u8; P],
    chunk: usize,
    x: QuantRow,
    results: &mut [[[f32; LANES]; P]],
) {
    let format = Unpacked(format);
    // SAFETY: the caller's promise.
    unsafe {
        if const { adds_one_group::<S, F>() } {
            add_one_group::<S, F, M, P>(simd, format, at, chunk, x, results);
        } else if const { takes_two_groups::<S, F, M, P>() } {
            add_two_groups::<S, F, M, P>(simd, format, at, chunk, x, results);
        } else {
            let mut registers = load_stored::<S, M, P>(simd, results);
            add_chunk(simd, format, at, chunk, PrefetchDistances::TWO_LEVELS, x, &mut registers);
            write_stored(simd, results, registers);
        }
    }
}

/// A register tile: `M` rows of `P` panels, all in one tile of the input, of which some are stored. A single row is
/// alone in its tile of the input. The stored rows and the panels are those of the part.
struct RowTile<'k, 'a, F, const M: usize, const P: usize> {
    kernel: &'k QuantKernel<'a, F>,
    row: usize,
    stored: Range<usize>,
    panel: usize,
}

impl<F: PanelFormat, const M: usize, const P: usize> SimdKernel for RowTile<'_, '_, F, M, P> {
    type Output = ();
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { kernel, row, stored, panel } = self;
        let QuantKernel { operands, format, .. } = kernel;
        let layout = PanelLayout::of(F::FORMAT);
        let mut results = [[simd.splat(0.0); P]; M];
        // SAFETY: the panels exist (`ProductPart::run`) and have `num_chunks` chunks. A row of the input is as long,
        // with zeros behind its end. No stored row is past the part's last.
        unsafe {
            let mut at = [std::ptr::null::<u8>(); P];
            for p in 0..P {
                at[p] = operands.w.panel(panel + p).data.get();
            }
            let mut x = operands.x.row(F::IS_SMALL, row);
            if M == 1 {
                debug_assert_eq!(x.stride, 1);
                x.stride = 1; // so that the compiler knows it
            }
            let num_chunks = layout.num_chunks(F::FORMAT, operands.w.k());
            let PrefetchDistances { near, far } = WeightPrefetch::best().quantized;
            for chunk in 0..num_chunks {
                // What is read behind the end of the first panel is the second one, and then what follows both.
                let in_panels = |distance: usize| {
                    let is_behind = P == 2 && chunk + distance / layout.chunk_bytes >= num_chunks;
                    distance + if is_behind { num_chunks * layout.chunk_bytes } else { 0 }
                };
                let distances = PrefetchDistances { near: in_panels(near), far: in_panels(far) };
                add_chunk(simd, *format, at, chunk, distances, x, &mut results);
                for at in &mut at {
                    *at = at.add(layout.chunk_bytes);
                }
            }
            kernel.store(simd, row, stored, panel, results);
        }
    }
}
