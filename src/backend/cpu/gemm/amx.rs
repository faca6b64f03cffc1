//! bfloat16 products on AMX tiles.
//!
//! A tile of weights is 16 pairs by 16 columns, which is how [`CpuMatrix`](super::CpuMatrix) lies in memory; a tile of
//! the input is up to 16 rows of 16 pairs. The arithmetic of an output element is one chain of tile products over the
//! inner dimension, whatever the number of rows: rows of a tile do not meet.
//!
//! The compiler does not know tile registers here, so all that passes between instructions through them lies within
//! one `asm!` block; only the tile configuration, which it does not touch either, outlives a block.

use super::super::memory::Shared;
use super::super::pack::BF16_K_BLOCK;
use super::super::simd::LANES;
use super::kernel::Panels;
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
struct Tiles;

impl Tiles {
    /// Rows of the first and of the second tile of input; with one tile of input, `second` is 0.
    ///
    /// # Safety
    /// AMX is available. No other `Tiles` of this thread is used after this one is made.
    unsafe fn configure(first: usize, second: usize) -> Self {
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

/// Computes the columns of `panels` for all rows.
///
/// # Safety
/// AMX is available; the weights are bfloat16; the panels exist.
pub(super) unsafe fn run(product: &Panels<'_>, panels: Range<usize>) {
    let mut row = 0;
    while row < product.rows {
        let rows = (product.rows - row).min(2 * LANES);
        // SAFETY: the caller's; rows and panels exist.
        unsafe {
            if rows > LANES {
                let _tiles = Tiles::configure(LANES, rows - LANES);
                for panel in panels.clone().step_by(2) {
                    Block { product, row, rows, panel }.two_by((panels.end - panel).min(2));
                }
            } else {
                let _tiles = Tiles::configure(rows, 0);
                for panel in panels.clone().step_by(4) {
                    Block { product, row, rows, panel }.one_by((panels.end - panel).min(4));
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
    product: &'a Panels<'a>,
    row: usize,
    rows: usize,
    panel: usize,
}

/// The loop over the inner dimension; operands are named where it is used.
macro_rules! tile_loop {
    ($($body:literal),* ; $($operands:tt)*) => {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            $($body,)*
            "add {x}, 64",
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
    fn x(&self) -> (*const u32, usize) {
        let Panels { x, x_stride, .. } = *self.product;
        // SAFETY: the row exists.
        (unsafe { x.add(self.row * x_stride) }, 4 * x_stride)
    }

    /// Weights of panel `p` of the block. Panels past the last one repeat it; their results are dropped.
    fn weights(&self, p: usize, num_panels: usize) -> *const u8 {
        let w = self.product.w;
        // SAFETY: the panel exists.
        unsafe { w.data.as_ptr().add((self.panel + p.min(num_panels - 1)) * w.panel_bytes()) }
    }

    fn steps(&self) -> usize {
        self.product.w.steps() / (BF16_K_BLOCK / 2)
    }

    /// Two tiles of rows by up to two panels.
    unsafe fn two_by(&self, num_panels: usize) {
        let mut results = Results([0.0; 4 * TILE_LEN]);
        let (x, stride) = self.x();
        unsafe {
            tile_loop!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{x1} + {stride}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {w0}, 1024",
                "add {w1}, 1024",
                "add {x1}, 64";
                x = inout(reg) x => _,
                x1 = inout(reg) x.byte_add(LANES * stride) => _,
                stride = in(reg) stride,
                w0 = inout(reg) self.weights(0, num_panels) => _,
                w1 = inout(reg) self.weights(1, num_panels) => _,
                steps = inout(reg) self.steps() => _,
                out = in(reg) results.0.as_mut_ptr(),
            );
            for p in 0..num_panels {
                self.write(&results.0[p * TILE_LEN..], self.row, LANES, self.panel + p);
                self.write(&results.0[(2 + p) * TILE_LEN..], self.row + LANES, self.rows - LANES, self.panel + p);
            }
        }
    }

    /// One tile of rows by up to four panels. Few rows: the weights come from memory, and each line is asked for
    /// well ahead.
    unsafe fn one_by(&self, num_panels: usize) {
        let mut results = Results([0.0; 4 * TILE_LEN]);
        let (x, stride) = self.x();
        unsafe {
            tile_loop!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm6, [{w0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm6, [{w2} + {line}]",
                "tdpbf16ps tmm2, tmm4, tmm6",
                "tileloadd tmm7, [{w3} + {line}]",
                "tdpbf16ps tmm3, tmm4, tmm7",
                "add {w0}, 1024",
                "add {w1}, 1024",
                "add {w2}, 1024",
                "add {w3}, 1024";
                x = inout(reg) x => _,
                stride = in(reg) stride,
                w0 = inout(reg) self.weights(0, num_panels) => _,
                w1 = inout(reg) self.weights(1, num_panels) => _,
                w2 = inout(reg) self.weights(2, num_panels) => _,
                w3 = inout(reg) self.weights(3, num_panels) => _,
                steps = inout(reg) self.steps() => _,
                out = in(reg) results.0.as_mut_ptr(),
            );
            for p in 0..num_panels {
                self.write(&results.0[p * TILE_LEN..], self.row, self.rows, self.panel + p);
            }
        }
    }

    /// Adds the bias and writes one tile of results to the output.
    unsafe fn write(&self, results: &[f32], row: usize, rows: usize, panel: usize) {
        let Panels { w, bias, out, .. } = *self.product;
        let first = panel * LANES;
        let width = LANES.min(w.n - first);
        let out: Shared<f32> = out;
        for (i, results) in results.chunks_exact(LANES).take(rows).enumerate() {
            let out = unsafe { std::slice::from_raw_parts_mut(out.get().add((row + i) * w.n + first), width) };
            match bias {
                None => out.copy_from_slice(&results[..width]),
                Some(bias) => {
                    let sums = results.iter().zip(&bias[first..first + width]).map(|(x, bias)| x + bias);
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum);
                }
            }
        }
    }
}
