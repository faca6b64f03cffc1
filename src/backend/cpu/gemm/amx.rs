//! bfloat16 products on AMX tiles.
//!
//! A tile of weights is 16 pairs by 16 columns, which is how [`CpuMatrix`](super::CpuMatrix) lies in memory; a tile of
//! the input is up to 16 rows of 16 pairs. The arithmetic of an output element is one chain of tile products over the
//! inner dimension, whatever the number of rows: rows of a tile do not meet.
//!
//! Many rows are cut into blocks of the inner dimension too, so that input and weights come from the caches; between
//! two blocks the float32 results wait in memory, which changes nothing about the chain.
//!
//! The compiler does not know tile registers here, so all that passes between instructions through them lies within
//! one `asm!` block; only the tile configuration, which it does not touch either, outlives a block.

use super::super::isa::{Isa, Kernel};
use super::super::pack::BF16_K_BLOCK;
use super::super::simd::{LANES, Simd};
use super::kernel::{Panels, Part};
use std::arch::asm;
use std::ops::Range;

/// Bytes of a tile of weights.
const TILE_BYTES: usize = 1024;
/// Floats of a tile of results.
const TILE_LEN: usize = LANES * LANES;

/// Whether processor and operating system have AMX with bfloat16, and let this process use it.
#[cfg(target_os = "linux")]
pub(in super::super) fn is_available() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        let wanted = AMX_BF16 | AMX_TILE;
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        // SAFETY: the call takes two numbers and changes nothing but the process's permission to use tiles.
        features & wanted == wanted
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    })
}

/// Tiles need the operating system's permission, which is asked for in Linux's way only.
#[cfg(not(target_os = "linux"))]
pub(in super::super) fn is_available() -> bool {
    false
}

/// The layout that `ldtilecfg` reads. Tiles 0–3 are results, 4 and 5 input, 6 and 7 weights.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tile registers in use; released at the end, so that switching threads need not save them.
pub(in super::super) struct Tiles;

impl Tiles {
    /// Rows of the first and of the second tile of input; with one tile of input, `second` is 0.
    ///
    /// # Safety
    /// AMX is available. No other `Tiles` of this thread is used after this one is made.
    pub(in super::super) unsafe fn configure(first: usize, second: usize) -> Self {
        let results = if second == 0 { [first; 4] } else { [first, first, second, second] };
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let input = [first, second.max(1)];
        for (tile, rows) in results.into_iter().chain(input).chain([LANES; 2]).enumerate() {
            config.row_bytes[tile] = 64;
            config.rows[tile] = rows as u8;
        }
        // SAFETY: AMX is available, and the configuration is valid: at most 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags)) };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: AMX is available, or there were no `Tiles`.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Floating-point operations of one run of [`run_from_registers`].
pub(in super::super) const PEAK_FLOPS: usize = 4 * 2 * LANES * LANES * BF16_K_BLOCK;

/// Tile products that load and store nothing: the most that the tiles can do.
///
/// # Safety
/// AMX is available.
pub(in super::super) unsafe fn run_from_registers(runs: usize) {
    // SAFETY: the caller's.
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

/// Rows and panels of a part at most.
pub(super) const MAX_ROWS: usize = 512;
pub(super) const MAX_PANELS: usize = 16;
/// Floats of scratch memory that [`run`] needs.
pub(super) const SCRATCH_LEN: usize = MAX_ROWS * MAX_PANELS * LANES;
/// Rows of two tiles.
const BLOCK_ROWS: usize = 2 * LANES;
/// Steps of a block of the inner dimension: 16 panels of it stay in the second-level cache.
const BLOCK_STEPS: usize = 64;

/// Computes a part of a product.
///
/// # Safety
/// AMX is available; the weights are bfloat16; the panels exist; the input has room for whole blocks of rows; the
/// target is the caller's; `scratch` has [`SCRATCH_LEN`] floats, 64-byte-aligned, and the part is within the maxima
/// above.
pub(super) unsafe fn run(part: &Part<'_>, scratch: *mut f32) {
    let steps = part.product.w.steps() / (BF16_K_BLOCK / 2);
    // SAFETY: the caller's.
    unsafe {
        if steps > BLOCK_STEPS && part.rows.len() > 2 * BLOCK_ROWS {
            run_blocked(part, steps, scratch);
        } else {
            run_whole(part, steps);
        }
    }
}

/// [`run`] with the results of unfinished chains in `scratch`.
///
/// # Safety
/// As for [`run`].
unsafe fn run_blocked(part: &Part<'_>, steps: usize, scratch: *mut f32) {
    let (rows, panels) = (&part.rows, &part.panels);
    assert!(rows.len() <= MAX_ROWS && panels.len() <= MAX_PANELS);
    let num_pairs = panels.len().div_ceil(2);
    let blocks = |row: usize, pair: usize| {
        let block = Block { part, row, rows: BLOCK_ROWS.min(rows.end - row), panel: panels.start + 2 * pair };
        let results = (row - rows.start) / BLOCK_ROWS * num_pairs + pair;
        // SAFETY: as many blocks of four tiles as `scratch` has room for.
        (block, (panels.len() - 2 * pair).min(2), unsafe { scratch.add(results * 4 * TILE_LEN) })
    };
    // SAFETY: the caller's. Rows of a block past the last one are read and computed too, and then dropped.
    unsafe {
        let _tiles = Tiles::configure(LANES, LANES);
        for first_step in (0..steps).step_by(BLOCK_STEPS) {
            let next_step = first_step + BLOCK_STEPS;
            let mut next_weights = NextTiles::weights(part.product, panels.start, next_step);
            for row in rows.clone().step_by(BLOCK_ROWS) {
                let next_row = row + BLOCK_ROWS;
                let next = if next_row < rows.end { (next_row, first_step) } else { (rows.start, next_step) };
                let mut next_x = NextTiles::input(part.product, next.0, next.1);
                for pair in 0..num_pairs {
                    let (block, num_panels, results) = blocks(row, pair);
                    let ahead = [next_x.advance(), next_weights.advance()];
                    block.two_by(num_panels, first_step..steps.min(next_step), results, ahead);
                    if next_step >= steps {
                        block.write_two_by(num_panels, results);
                    }
                }
            }
        }
    }
}

/// Tiles that will be needed soon, in pieces that one call of [`Block::two_by`] asks for: runs of [`BLOCK_STEPS`] tiles,
/// some bytes apart.
struct NextTiles {
    run: *const u8,
    run_to_run: usize,
    in_run: usize,
}

impl NextTiles {
    const PIECE_BYTES: usize = BLOCK_STEPS * 256;

    /// Weights of the panels from `panel` on.
    fn weights(product: &Panels<'_>, panel: usize, step: usize) -> Self {
        let panel_bytes = product.w.panel_bytes();
        let run = product.w.as_ptr().wrapping_add(panel * panel_bytes + step * TILE_BYTES);
        Self { run, run_to_run: panel_bytes, in_run: 0 }
    }

    /// Input of the rows from `row` on.
    fn input(product: &Panels<'_>, row: usize, step: usize) -> Self {
        let tile_bytes = 4 * product.layout.tile;
        let run = product.x.cast::<u8>().wrapping_add(row / LANES * tile_bytes + step * TILE_BYTES);
        Self { run, run_to_run: tile_bytes, in_run: 0 }
    }

    /// The piece to ask for now. Past the end it is anywhere: an address that is only asked for need not exist.
    fn advance(&mut self) -> *const u8 {
        let piece = self.run.wrapping_add(self.in_run);
        self.in_run += Self::PIECE_BYTES;
        if self.in_run == BLOCK_STEPS * TILE_BYTES {
            self.in_run = 0;
            self.run = self.run.wrapping_add(self.run_to_run);
        }
        piece
    }
}

/// [`run`] where each chain is computed at once.
///
/// # Safety
/// As for [`run`], but for the maxima and `scratch`.
unsafe fn run_whole(part: &Part<'_>, steps: usize) {
    let mut results = Results([0.0; 4 * TILE_LEN]);
    let (results, panels) = (results.0.as_mut_ptr(), &part.panels);
    let mut row = part.rows.start;
    while row < part.rows.end {
        let rows = (part.rows.end - row).min(BLOCK_ROWS);
        // SAFETY: the caller's; rows and panels exist.
        unsafe {
            if rows > LANES {
                let _tiles = Tiles::configure(LANES, rows - LANES);
                let mut next_x = NextTiles::input(part.product, row + BLOCK_ROWS, 0);
                for panel in panels.clone().step_by(2) {
                    let (block, num_panels) = (Block { part, row, rows, panel }, (panels.end - panel).min(2));
                    // The weights come from memory for the first rows, and for the others from the cache.
                    match row == part.rows.start {
                        true => block.two_by_streamed(num_panels, steps, results),
                        false => {
                            let ahead = [next_x.advance(), next_x.advance()];
                            block.two_by(num_panels, 0..steps, results, ahead);
                        }
                    }
                    block.write_two_by(num_panels, results);
                }
            } else {
                let _tiles = Tiles::configure(rows, 0);
                for panel in panels.clone().step_by(4) {
                    let block = Block { part, row, rows, panel };
                    block.one_by((panels.end - panel).min(4), steps, results);
                }
            }
        }
        row += rows;
    }
}

/// Results of four tiles.
#[repr(C, align(64))]
struct Results([f32; 4 * TILE_LEN]);

/// Rows `row .. row + rows` of the columns that begin with `panel`.
struct Block<'a> {
    part: &'a Part<'a>,
    row: usize,
    rows: usize,
    panel: usize,
}

/// Asks for the tile that lies 4 KiB behind an address.
macro_rules! prefetch {
    ($address:literal) => {
        concat!(
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960\n",
            "prefetcht0 [",
            $address,
            " + 4096 + \\line]\n",
            ".endr"
        )
    };
}

/// The loop over the inner dimension, which begins with zeros or goes on from the results at `out`; the operands of the
/// body are named where it is used.
macro_rules! tile_loop {
    ($($body:expr),* ; $($operands:tt)*) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {go_on}, {go_on}",
            "jz 2f",
            "tileloadd tmm0, [{out} + {line}]",
            "tileloadd tmm1, [{out} + {line} + 1024]",
            "tileloadd tmm2, [{out} + {line} + 2048]",
            "tileloadd tmm3, [{out} + {line} + 3072]",
            "2:",
            $($body,)*
            "dec {steps}",
            "jnz 2b",
            "tilestored [{out} + {line}], tmm0",
            "tilestored [{out} + {line} + 1024], tmm1",
            "tilestored [{out} + {line} + 2048], tmm2",
            "tilestored [{out} + {line} + 3072], tmm3",
            line = in(reg) 64usize,
            $($operands)*
            options(nostack),
        )
    };
}

// SAFETY (all blocks in this impl): AMX is available and configured for `rows`; rows and panels exist, `x` has whole
// tiles of pairs (`k` is padded), and a tile load touches no more than its configured rows.
impl Block<'_> {
    /// The first tile of input from `step` on, and the bytes from tile to tile.
    fn x(&self, step: usize) -> (*const u32, usize) {
        let Panels { x, layout, .. } = *self.part.product;
        // SAFETY: row and step exist.
        (unsafe { x.add(self.row / LANES * layout.tile + step * layout.chunk) }, 4 * layout.chunk)
    }

    /// Weights of panel `p` of the block from `step` on. Panels past the last one repeat it; their results are
    /// dropped.
    unsafe fn weights(&self, p: usize, num_panels: usize, step: usize) -> *const u8 {
        let w = self.part.product.w;
        // SAFETY: panel and step exist.
        unsafe { w.as_ptr().add((self.panel + p.min(num_panels - 1)) * w.panel_bytes() + step * TILE_BYTES) }
    }

    /// Two tiles of rows by up to two panels. Results are left at `results`; unless `steps` begins at 0, they go on
    /// from what is there. `ahead` are addresses of input and weights from which four lines per step are asked for.
    unsafe fn two_by(&self, num_panels: usize, steps: Range<usize>, results: *mut f32, ahead: [*const u8; 2]) {
        let (x, _) = self.x(steps.start);
        unsafe {
            tile_loop!(
                "tileloadd tmm4, [{x} + {line}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "prefetcht1 [{ahead0}]",
                "prefetcht1 [{ahead0} + 64]",
                "prefetcht1 [{ahead0} + 128]",
                "prefetcht1 [{ahead0} + 192]",
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{x1} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "prefetcht1 [{ahead1}]",
                "prefetcht1 [{ahead1} + 64]",
                "prefetcht1 [{ahead1} + 128]",
                "prefetcht1 [{ahead1} + 192]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {x}, 1024",
                "add {x1}, 1024",
                "add {w0}, 1024",
                "add {w1}, 1024",
                "add {ahead0}, 256",
                "add {ahead1}, 256";
                x = inout(reg) x => _,
                x1 = inout(reg) x.add(self.part.product.layout.tile) => _,
                w0 = inout(reg) self.weights(0, num_panels, steps.start) => _,
                w1 = inout(reg) self.weights(1, num_panels, steps.start) => _,
                ahead0 = inout(reg) ahead[0] => _,
                ahead1 = inout(reg) ahead[1] => _,
                steps = inout(reg) steps.len() => _,
                go_on = in(reg) steps.start,
                out = in(reg) results,
            );
        }
    }

    /// [`Block::two_by`] of whole chains, for weights that come from memory.
    unsafe fn two_by_streamed(&self, num_panels: usize, steps: usize, results: *mut f32) {
        let (x, _) = self.x(0);
        unsafe {
            tile_loop!(
                "tileloadd tmm4, [{x} + {line}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                prefetch!("{w0}"),
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                prefetch!("{w1}"),
                "tileloadd tmm5, [{x1} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {x}, 1024",
                "add {x1}, 1024",
                "add {w0}, 1024",
                "add {w1}, 1024";
                x = inout(reg) x => _,
                x1 = inout(reg) x.add(self.part.product.layout.tile) => _,
                w0 = inout(reg) self.weights(0, num_panels, 0) => _,
                w1 = inout(reg) self.weights(1, num_panels, 0) => _,
                steps = inout(reg) steps => _,
                go_on = in(reg) 0usize,
                out = in(reg) results,
            );
        }
    }

    /// Writes the results of [`Block::two_by`] to the output.
    unsafe fn write_two_by(&self, num_panels: usize, results: *const f32) {
        for p in 0..num_panels {
            unsafe {
                self.write(results.add(p * TILE_LEN), self.row, LANES.min(self.rows), self.panel + p);
                let more_rows = self.rows.saturating_sub(LANES);
                self.write(results.add((2 + p) * TILE_LEN), self.row + LANES, more_rows, self.panel + p);
            }
        }
    }

    /// One tile of rows by up to four panels: several streams from memory side by side.
    unsafe fn one_by(&self, num_panels: usize, steps: usize, results: *mut f32) {
        let (x, x_step) = self.x(0);
        unsafe {
            tile_loop!(
                "tileloadd tmm4, [{x} + {line}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                prefetch!("{w0}"),
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                prefetch!("{w1}"),
                "tileloadd tmm6, [{w2} + {line}]",
                "tdpbf16ps tmm2, tmm4, tmm6",
                prefetch!("{w2}"),
                "tileloadd tmm7, [{w3} + {line}]",
                "tdpbf16ps tmm3, tmm4, tmm7",
                prefetch!("{w3}"),
                "add {w0}, 1024",
                "add {w1}, 1024",
                "add {w2}, 1024",
                "add {w3}, 1024",
                "add {x}, {x_step}";
                x = inout(reg) x => _,
                x_step = in(reg) x_step,
                w0 = inout(reg) self.weights(0, num_panels, 0) => _,
                w1 = inout(reg) self.weights(1, num_panels, 0) => _,
                w2 = inout(reg) self.weights(2, num_panels, 0) => _,
                w3 = inout(reg) self.weights(3, num_panels, 0) => _,
                steps = inout(reg) steps => _,
                go_on = in(reg) 0usize,
                out = in(reg) results,
            );
            for p in 0..num_panels {
                self.write(results.add(p * TILE_LEN), self.row, self.rows, self.panel + p);
            }
        }
    }

    /// Adds the bias and writes `rows` rows of a tile of results to the output.
    unsafe fn write(&self, results: *const f32, row: usize, rows: usize, panel: usize) {
        Isa::Amx.run(WriteTile { part: self.part, results, row, rows, panel });
    }
}

struct WriteTile<'a> {
    part: &'a Part<'a>,
    results: *const f32,
    row: usize,
    rows: usize,
    panel: usize,
}

impl Kernel for WriteTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for i in 0..self.rows {
            // SAFETY: a tile has 16 rows of 16 results; the rows and the panel exist.
            unsafe {
                self.part.store(simd, self.row + i, self.panel, simd.load(self.results.add(i * LANES)));
            }
        }
    }
}
