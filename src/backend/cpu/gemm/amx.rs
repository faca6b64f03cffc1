//! bfloat16 products on AMX tiles.
//!
//! A tile of weights is 16 pairs by 16 columns, which is the layout of [`CpuMatrix`](super::CpuMatrix) in memory. A
//! tile of the input is up to 16 rows of 16 pairs. An output element is one chain of tile products over the inner
//! dimension. The number of rows does not matter, because the rows of a tile do not affect each other.
//!
//! With many rows the inner dimension is split into blocks too, so that input and weights come from the caches. Between
//! two blocks the float32 results are stored in memory, which does not change the chain.
//!
//! The compiler does not know about tile registers. So all instructions that pass values through them are within one
//! `asm!` block. Only the tile configuration, which the compiler does not touch either, outlives a block.

use super::super::isa::Isa;
use super::super::pack::BF16_K_BLOCK;
use super::super::simd::{LANES, Simd, SimdKernel};
use super::super::tile_registers::Tiles;
use super::part::{PlainOperands, PlainPart};
use std::arch::asm;
use std::arch::x86_64::_rdtsc;
use std::cell::Cell;
use std::ops::Range;

/// Bytes of a tile of weights.
const TILE_BYTES: usize = 1024;
/// Floats of a tile of results.
const TILE_LEN: usize = LANES * LANES;

/// Floating-point operations of one run of [`run_from_registers`].
pub(in super::super) const PEAK_FLOPS: usize = 4 * 2 * LANES * LANES * BF16_K_BLOCK;

/// Runs tile products that load and store nothing, which is the peak of the tile unit.
///
/// # Safety
/// AMX is available.
pub(in super::super) unsafe fn run_from_registers(runs: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let _tiles = Tiles::configure(LANES, LANES);
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {runs}",
            "jnz 2b",
            runs = inout(reg) runs.max(1) => _,
            options(nostack),
        );
    }
}

/// The most rows and panels of a part.
pub(super) const MAX_ROWS: usize = 512;
pub(super) const MAX_PANELS: usize = 16;
/// Floats of scratch memory that [`run`] needs.
pub(super) const SCRATCH_LEN: usize = MAX_ROWS * MAX_PANELS * LANES;
/// Rows of two tiles.
const BLOCK_ROWS: usize = 2 * LANES;
/// Steps of a block of the inner dimension: 16 panels of this length stay in the second-level cache.
const BLOCK_STEPS: usize = 64;

/// Computes a part of a product.
///
/// # Safety
/// AMX is available, the weights are bfloat16, the panels exist, and the input has room for whole blocks of rows.
/// Nothing else uses the target or `scratch`, which has [`SCRATCH_LEN`] floats and is 64-byte-aligned.
pub(super) unsafe fn run(part: &PlainPart<'_>, scratch: *mut f32) {
    let steps = part.operands.w.steps() / (BF16_K_BLOCK / 2);
    let (rows, panels) = (&part.rows, &part.panels);
    assert!(rows.len() <= MAX_ROWS && panels.len() <= MAX_PANELS);
    let block_steps = if rows.len() > 2 * BLOCK_ROWS { BLOCK_STEPS.min(steps) } else { steps };
    let mut tiles = None;
    for first_step in (0..steps).step_by(block_steps) {
        let block_steps = first_step..steps.min(first_step + block_steps);
        // Weights of the next block of steps. After the last block, this member continues with the next panels.
        let is_last = block_steps.end == steps;
        let next = if is_last { (panels.end, 0) } else { (panels.start, block_steps.end) };
        let mut next_weights = Ahead::weights(&part.operands, next, block_steps.len());
        for row in rows.clone().step_by(BLOCK_ROWS) {
            let num_rows = BLOCK_ROWS.min(rows.end - row);
            let next_row = row + BLOCK_ROWS;
            let next = if next_row < rows.end { (next_row, first_step) } else { (rows.start, block_steps.end) };
            let mut next_x = Ahead::input(&part.operands, next, block_steps.len());
            if tiles.as_ref().is_none_or(|(configured, _)| *configured != num_rows) {
                drop(tiles.take());
                let (first, second) = (num_rows.min(LANES), num_rows.saturating_sub(LANES));
                // SAFETY: the caller's promise; the `Tiles` of other rows have been dropped.
                tiles = Some((num_rows, unsafe { Tiles::configure(first, second) }));
            }
            // One tile of rows is combined with four panels: four streams from memory side by side.
            let max_panels = if num_rows > LANES { 2 } else { 4 };
            for panel in panels.clone().step_by(max_panels) {
                let block = Block { part, row, num_rows, panel, num_panels: max_panels.min(panels.end - panel) };
                // SAFETY: the caller's promise; the scratch memory has room for blocks of 32 rows by 2 panels, or of 16
                // by 4.
                unsafe {
                    let results = block.begin(max_panels, scratch, first_step);
                    match (num_rows > LANES, row == 0) {
                        (false, _) => block.one_by(block_steps.clone(), results),
                        // Weights come from memory for the first rows, and from the cache for the others.
                        (true, true) => block.two_by_streamed(block_steps.clone(), results),
                        (true, false) => {
                            block.two_by(block_steps.clone(), results, [next_x.advance(), next_weights.advance()]);
                        }
                    }
                    if is_last {
                        block.end(results);
                    }
                }
            }
        }
    }
}

/// Where a block's results are stored between blocks of steps.
#[derive(Clone, Copy)]
struct TileResults {
    at: *mut f32,
    /// Floats from row to row.
    stride: usize,
    /// Chains start with the stored results instead of zero.
    go_on: bool,
    /// The results are in scratch memory and have to be written to the target at the end.
    apart: bool,
}

/// Tiles to prefetch, in pieces: one call of [`Block::two_by`] prefetches one piece. Tiles come in runs of as many
/// tiles as the call has steps.
struct Ahead {
    run: *const u8,
    run_to_run: usize,
    in_run: usize,
    piece_bytes: usize,
    run_bytes: usize,
}

impl Ahead {
    /// Weights of the panels starting with `panel`.
    fn weights(product: &PlainOperands<'_>, (panel, step): (usize, usize), steps: usize) -> Self {
        let run_to_run = product.w.panel_bytes();
        let run = product.w.as_ptr().wrapping_add(panel * run_to_run + step * TILE_BYTES);
        Self { run, run_to_run, in_run: 0, piece_bytes: steps * WEIGHTS_AHEAD, run_bytes: steps * TILE_BYTES }
    }

    /// Input of the rows starting with `row`.
    fn input(product: &PlainOperands<'_>, (row, step): (usize, usize), steps: usize) -> Self {
        let run_to_run = 4 * product.layout.tile;
        let run = product.x.cast::<u8>().wrapping_add(row / LANES * run_to_run + step * TILE_BYTES);
        Self { run, run_to_run, in_run: 0, piece_bytes: steps * INPUT_AHEAD, run_bytes: steps * TILE_BYTES }
    }

    /// The piece to prefetch now. Past the end the address is arbitrary: a prefetched address need not exist.
    fn advance(&mut self) -> *const u8 {
        let piece = self.run.wrapping_add(self.in_run);
        self.in_run += self.piece_bytes;
        if self.in_run == self.run_bytes {
            self.in_run = 0;
            self.run = self.run.wrapping_add(self.run_to_run);
        }
        piece
    }
}

/// Bytes of input and of weights that a step of [`Block::two_by`] prefetches: parts of a tile.
const INPUT_AHEAD: usize = TILE_BYTES / 4;
const WEIGHTS_AHEAD: usize = TILE_BYTES / 8;

/// Rows and panels that are computed together: up to 32 rows by 2 panels, or 16 by 4.
struct Block<'a> {
    part: &'a PlainPart<'a>,
    row: usize,
    num_rows: usize,
    panel: usize,
    num_panels: usize,
}

/// Whether to prefetch tiles some steps before they are loaded. The better choice depends on the core's other hardware
/// thread. If it is idle, the core overlaps loads and products, and prefetches cost a quarter of the speed. If it is
/// busy, the core does not overlap them, and without prefetches a product takes half as long again. So each thread
/// tries the other choice from time to time and keeps the better one.
#[derive(Clone, Copy)]
struct Pace {
    prefetches: bool,
    calls: u32,
    /// Ticks of a step in the call before a trial.
    ticks: f32,
}

impl Pace {
    const CALLS_PER_TRIAL: u32 = 64;

    /// Calls `block(prefetches)`, which runs `steps` steps.
    #[inline(always)]
    fn choose(steps: usize, block: impl Fn(bool)) {
        thread_local! {
            static PACE: Cell<Pace> = const { Cell::new(Pace { prefetches: true, calls: 0, ticks: 0.0 }) };
        }
        let mut pace = PACE.get();
        pace.calls = (pace.calls + 1) % Self::CALLS_PER_TRIAL;
        // SAFETY: every processor with tiles has a time-stamp counter.
        let now = || unsafe { _rdtsc() };
        let timed = |prefetches| {
            let start = now();
            block(prefetches);
            (now() - start) as f32 / steps as f32
        };
        match pace.calls {
            0 => pace.ticks = timed(pace.prefetches),
            1 if timed(!pace.prefetches) < 0.9 * pace.ticks => pace.prefetches = !pace.prefetches,
            1 => (),
            _ => block(pace.prefetches),
        }
        PACE.set(pace);
    }
}

/// Prefetches the tile that lies some bytes behind an address.
macro_rules! prefetch {
    ($address:literal, $bytes:literal) => {
        concat!(
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960\n",
            "prefetcht0 [",
            $address,
            " + ",
            $bytes,
            " + \\line]\n",
            ".endr"
        )
    };
}

/// Sets the results of two tiles of rows by two panels to zero, or, if the chains continue, to the results stored at
/// `out`.
macro_rules! begin_two_by {
    () => {
        "tilezero tmm0
        tilezero tmm1
        tilezero tmm2
        tilezero tmm3
        test {go_on}, {go_on}
        jz 4f
        lea {go_on}, [{out} + 8 * {stride}]
        lea {go_on}, [{go_on} + 8 * {stride}]
        tileloadd tmm0, [{out} + {stride}]
        tileloadd tmm1, [{out} + {stride} + 64]
        tileloadd tmm2, [{go_on} + {stride}]
        tileloadd tmm3, [{go_on} + {stride} + 64]
        4:"
    };
}

/// Stores them there.
macro_rules! end_two_by {
    () => {
        "tilestored [{out} + {stride}], tmm0
        tilestored [{out} + {stride} + 64], tmm1
        lea {out}, [{out} + 8 * {stride}]
        lea {out}, [{out} + 8 * {stride}]
        tilestored [{out} + {stride}], tmm2
        tilestored [{out} + {stride} + 64], tmm3"
    };
}

/// The loop of two tiles of rows by two panels. A tile is loaded right after the last product that reads the same
/// register. So a processor with few registers to rename tiles to (one whose other hardware thread is busy) does not
/// wait for the load. The loads carry a hint (`tileloaddt1`) not to evict the contents of the first-level cache: the
/// next blocks read the same tiles from the second level, which makes them 1.2 times as fast. `$x0`, `$w0`, `$x1`,
/// `$w1` are inserted between the products, and `$step` after each step.
macro_rules! two_by {
    ([$x0:expr, $w0:expr, $w1:expr, $x1:expr], [$($step:expr),*] ; $($operands:tt)*) => {
        asm!(
            begin_two_by!(),
            "tileloaddt1 tmm4, [{x} + {line}]",
            "tileloaddt1 tmm6, [{w0} + {line}]",
            "tileloaddt1 tmm7, [{w1} + {line}]",
            "tileloaddt1 tmm5, [{x1} + {line}]",
            "dec {steps}",
            "jz 3f",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            $x0,
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloaddt1 tmm4, [{x} + {line} + 1024]",
            $w0,
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloaddt1 tmm6, [{w0} + {line} + 1024]",
            $w1,
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloaddt1 tmm7, [{w1} + {line} + 1024]",
            $x1,
            "tileloaddt1 tmm5, [{x1} + {line} + 1024]",
            "add {x}, 1024",
            "add {x1}, 1024",
            "add {w0}, 1024",
            "add {w1}, 1024",
            $($step,)*
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            $w0,
            "tdpbf16ps tmm2, tmm5, tmm6",
            $w1,
            "tdpbf16ps tmm3, tmm5, tmm7",
            end_two_by!(),
            line = in(reg) 64usize,
            $($operands)*
            options(nostack),
        )
    };
}

/// [`Block::two_by`] with instructions inserted between the products.
macro_rules! two_by_block {
    ($block:expr, $steps:expr, $results:expr, $ahead:expr, $between:tt) => {
        two_by!(
            $between,
            [
                "prefetcht1 [{ahead0}]",
                "prefetcht1 [{ahead0} + 64]",
                "prefetcht1 [{ahead0} + 128]",
                "prefetcht1 [{ahead0} + 192]",
                "prefetcht1 [{ahead1}]",
                "prefetcht1 [{ahead1} + 64]",
                "add {ahead0}, 256",
                "add {ahead1}, 128"
            ];
            x = inout(reg) $block.x($steps.start) => _,
            x1 = inout(reg) $block.x($steps.start).add($block.part.operands.layout.tile) => _,
            w0 = inout(reg) $block.weights(0, $steps.start) => _,
            w1 = inout(reg) $block.weights(1, $steps.start) => _,
            ahead0 = inout(reg) $ahead[0] => _,
            ahead1 = inout(reg) $ahead[1] => _,
            steps = inout(reg) $steps.len() => _,
            go_on = inout(reg) usize::from($results.go_on) => _,
            out = inout(reg) $results.at => _,
            stride = in(reg) 4 * $results.stride,
        )
    };
}

// SAFETY (all blocks in this impl): AMX is available and configured for the block's rows. Rows and panels exist, `x`
// has whole tiles of pairs (`k` is padded), and a tile load touches only its configured rows. The results have room for
// these rows and all panels of the call.
impl Block<'_> {
    /// The first tile of input, starting at `step`.
    unsafe fn x(&self, step: usize) -> *const u32 {
        let PlainOperands { x, layout, .. } = self.part.operands;
        // SAFETY: row and step exist.
        unsafe { x.add(self.row / LANES * layout.tile + step * layout.chunk) }
    }

    /// Weights of panel `p` of the block, starting at `step`. Panels past the last one repeat it, and their results are
    /// dropped.
    unsafe fn weights(&self, p: usize, step: usize) -> *const u8 {
        let w = self.part.operands.w;
        // SAFETY: panel and step exist.
        unsafe { w.as_ptr().add((self.panel + p.min(self.num_panels - 1)) * w.panel_bytes() + step * TILE_BYTES) }
    }

    /// Chooses where the results are stored: in the target itself if it has room for whole tiles and the results need
    /// no further work. A chain whose results are added to the target starts with the target's contents.
    unsafe fn begin(&self, max_panels: usize, scratch: *mut f32, first_step: usize) -> TileResults {
        let (target, part) = (&self.part.target, self.part);
        let first = (self.panel - target.panel) * LANES;
        let go_on = first_step > 0 || target.adds;
        unsafe {
            let at = target.at.get().add((self.row - target.row) * target.stride + first);
            let is_whole = self.num_panels == max_panels && first + max_panels * LANES <= target.cols;
            if is_whole && part.product.bias.is_none() {
                return TileResults { at, stride: target.stride, go_on, apart: false };
            }
            let stride = max_panels * LANES;
            let block = (self.row - part.rows.start) / BLOCK_ROWS * part.panels.len().div_ceil(max_panels)
                + (self.panel - part.panels.start) / max_panels;
            let results = TileResults { at: scratch.add(block * 4 * TILE_LEN), stride, go_on, apart: true };
            if target.adds && first_step == 0 {
                let width = (target.cols - first).min(self.num_panels * LANES);
                for row in 0..self.num_rows {
                    let to = results.at.add(row * stride);
                    std::ptr::write_bytes(to, 0, stride);
                    std::ptr::copy_nonoverlapping(at.add(row * target.stride), to, width);
                }
            }
            results
        }
    }

    /// Writes results from scratch memory to the target, with the bias.
    unsafe fn end(&self, results: TileResults) {
        if results.apart {
            Isa::Amx.run(WriteBlock { block: self, results });
        }
    }

    /// Two tiles of rows by up to two panels. `ahead` are addresses of input and weights from which each step
    /// prefetches some lines.
    unsafe fn two_by(&self, steps: Range<usize>, results: TileResults, ahead: [*const u8; 2]) {
        // SAFETY: see above.
        Pace::choose(steps.len(), |prefetches| unsafe {
            match prefetches {
                true => two_by_block!(
                    self,
                    steps,
                    results,
                    ahead,
                    [prefetch!("{x}", 2048), prefetch!("{w0}", 2048), prefetch!("{w1}", 2048), prefetch!("{x1}", 2048)]
                ),
                false => two_by_block!(self, steps, results, ahead, ["", "", "", ""]),
            }
        });
    }

    /// [`Block::two_by`] for weights that come from memory. They are prefetched some tiles ahead; at the end of the
    /// panels, those of the next panels are.
    unsafe fn two_by_streamed(&self, steps: Range<usize>, results: TileResults) {
        const TILES_AHEAD: usize = 4;
        unsafe {
            let (x, w0, w1) = (self.x(steps.start), self.weights(0, steps.start), self.weights(1, steps.start));
            let panel_bytes = self.part.operands.w.panel_bytes();
            let jump = 2 * panel_bytes - steps.len() * TILE_BYTES;
            let first = if steps.len() > TILES_AHEAD { TILES_AHEAD * TILE_BYTES } else { 2 * panel_bytes };
            two_by!(
                [
                    prefetch!("{x}", 2048),
                    prefetch!("{ahead0}", 0),
                    prefetch!("{ahead1}", 0),
                    prefetch!("{x1}", 2048)
                ],
                [
                    "add {ahead0}, 1024",
                    "add {ahead1}, 1024",
                    "cmp {steps}, 4",
                    "jne 5f",
                    "add {ahead0}, {jump}",
                    "add {ahead1}, {jump}",
                    "5:"
                ];
                x = inout(reg) x => _,
                x1 = inout(reg) x.add(self.part.operands.layout.tile) => _,
                w0 = inout(reg) w0 => _,
                w1 = inout(reg) w1 => _,
                ahead0 = inout(reg) w0.wrapping_add(first) => _,
                ahead1 = inout(reg) w1.wrapping_add(first) => _,
                jump = in(reg) jump,
                steps = inout(reg) steps.len() => _,
                go_on = inout(reg) usize::from(results.go_on) => _,
                out = inout(reg) results.at => _,
                stride = in(reg) 4 * results.stride,
            );
        }
    }

    /// One tile of rows by up to four panels: several streams from memory side by side.
    unsafe fn one_by(&self, steps: Range<usize>, results: TileResults) {
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {go_on}, {go_on}",
                "jz 2f",
                "tileloadd tmm0, [{out} + {stride}]",
                "tileloadd tmm1, [{out} + {stride} + 64]",
                "tileloadd tmm2, [{out} + {stride} + 128]",
                "tileloadd tmm3, [{out} + {stride} + 192]",
                "2:",
                "tileloadd tmm4, [{x} + {line}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                prefetch!("{w0}", 4096),
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                prefetch!("{w1}", 4096),
                "tileloadd tmm6, [{w2} + {line}]",
                "tdpbf16ps tmm2, tmm4, tmm6",
                prefetch!("{w2}", 4096),
                "tileloadd tmm7, [{w3} + {line}]",
                "tdpbf16ps tmm3, tmm4, tmm7",
                prefetch!("{w3}", 4096),
                "add {w0}, 1024",
                "add {w1}, 1024",
                "add {w2}, 1024",
                "add {w3}, 1024",
                "add {x}, {x_step}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{out} + {stride}], tmm0",
                "tilestored [{out} + {stride} + 64], tmm1",
                "tilestored [{out} + {stride} + 128], tmm2",
                "tilestored [{out} + {stride} + 192], tmm3",
                x = inout(reg) self.x(steps.start) => _,
                x_step = in(reg) 4 * self.part.operands.layout.chunk,
                w0 = inout(reg) self.weights(0, steps.start) => _,
                w1 = inout(reg) self.weights(1, steps.start) => _,
                w2 = inout(reg) self.weights(2, steps.start) => _,
                w3 = inout(reg) self.weights(3, steps.start) => _,
                steps = inout(reg) steps.len() => _,
                go_on = in(reg) usize::from(results.go_on),
                out = in(reg) results.at,
                stride = in(reg) 4 * results.stride,
                line = in(reg) 64usize,
                options(nostack),
            );
        }
    }
}

struct WriteBlock<'a> {
    block: &'a Block<'a>,
    results: TileResults,
}

impl SimdKernel for WriteBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { block, results } = self;
        for row in 0..block.num_rows {
            for panel in 0..block.num_panels {
                // SAFETY: the block has these rows and panels, and as many results.
                unsafe {
                    let sum = simd.load(results.at.add(row * results.stride + panel * LANES));
                    let (row, panel) = (block.row + row, block.panel + panel);
                    let (at, width) = block.part.at(row, panel);
                    simd.store_first(at, block.part.with_bias(simd, panel, sum), width);
                }
            }
        }
    }
}
