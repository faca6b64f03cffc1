//! AMX instructions by themselves, with the `unsafe` that they need.
//!
//! The compiler uses no tile registers here, so that results may wait in them from one `asm!` block to the next. Each
//! tile is 16 rows of 64 bytes; a product of two is 2 · 16 · 16 · 32 operations.

use crate::{Case, Work};
use memmap2::{MmapMut, MmapOptions};
use std::arch::asm;
use std::marker::PhantomData;
use std::rc::Rc;

const TILE_BYTES: usize = 1024;
/// Floating-point operations of one tile product.
const TILE_FLOPS: usize = 2 * 16 * 16 * 32;

/// The calling thread's tile registers, all of the same shape.
struct Tiles(PhantomData<*const ()>);

#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Zeroed memory in huge pages, where there are any, that begins with one.
struct Memory {
    start: *mut u8,
    bytes: usize,
    _map: MmapMut,
}

impl Memory {
    fn new(bytes: usize) -> Self {
        const HUGE_PAGE_BYTES: usize = 2 << 20;
        // The kernel gives zeroes, but only one page of them until they are written.
        let mut map = MmapOptions::new().len(bytes + HUGE_PAGE_BYTES).map_anon().expect("memory for the operands");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // without them it is slower, and no less true
        map.fill(0);
        let offset = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        Self { start: map.as_mut_ptr().wrapping_add(offset), bytes, _map: map }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.bytes);
        self.start.wrapping_add(offset)
    }
}

/// How the loop of two by two tiles gets its operands.
#[derive(Clone, Copy)]
enum Way {
    Load,
    LoadT1,
    /// [`Way::LoadT1`], each line asked for two steps before.
    AskedFor,
    /// [`Way::LoadT1`], and the lines that the results go to asked for meanwhile.
    AskedForResults,
    /// Both.
    AskedForAll,
    /// [`Way::LoadT1`], and as many lines of something far asked for in each step as the backend's products do.
    AskedForFar,
    /// Half of them.
    AskedForHalf,
}

/// Input and weights as the backend's products lay them out: 16 rows, and panels of 16 columns, of `steps` tiles each.
#[derive(Clone, Copy)]
struct Shape {
    row_tiles: usize,
    panels: usize,
    steps: usize,
}

/// Where the operands begin.
#[derive(Clone, Copy)]
struct Operands {
    x: *const u8,
    w: *const u8,
    /// Where the results go, if they are stored, and the bytes from row to row.
    out: Option<(*mut u8, usize)>,
    /// What [`Way::AskedForFar`] asks for: something that is not in L2.
    far: *const u8,
}

impl Shape {
    /// From 16 rows to the next, and from panel to panel: see the gaps of the backend's layouts.
    fn strides(self) -> (usize, usize) {
        let bytes = self.steps * TILE_BYTES;
        (bytes.next_multiple_of(32 << 10) + (16 << 10), bytes + bytes / 64 / TILE_BYTES * TILE_BYTES)
    }

    fn products(self) -> usize {
        self.row_tiles * self.panels * self.steps
    }
}

/// The lines of the tile that lies some bytes behind an address.
macro_rules! ask_for {
    ($address:literal) => {
        concat!(
            ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960\nprefetcht0 [",
            $address,
            " + 2048 + \\line]\n.endr"
        )
    };
}

/// The loop of two tiles of rows by two panels, as the backend has it: results stay in tiles 0 to 3.
macro_rules! two_by_two {
    ($load:literal, [$x0:expr, $w0:expr, $w1:expr, $x1:expr], [$($step:expr),*] $($operands:tt)*) => {
        asm!(
            concat!($load, " tmm4, [{x0} + {line}]"),
            concat!($load, " tmm6, [{w0} + {line}]"),
            concat!($load, " tmm7, [{w1} + {line}]"),
            concat!($load, " tmm5, [{x1} + {line}]"),
            "dec {steps}",
            "jz 3f",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            $x0,
            "tdpbf16ps tmm1, tmm4, tmm7",
            concat!($load, " tmm4, [{x0} + {line} + 1024]"),
            $w0,
            "tdpbf16ps tmm2, tmm5, tmm6",
            concat!($load, " tmm6, [{w0} + {line} + 1024]"),
            $w1,
            "tdpbf16ps tmm3, tmm5, tmm7",
            concat!($load, " tmm7, [{w1} + {line} + 1024]"),
            $x1,
            concat!($load, " tmm5, [{x1} + {line} + 1024]"),
            "add {x0}, 1024",
            "add {x1}, 1024",
            "add {w0}, 1024",
            "add {w1}, 1024",
            $($step,)*
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            $($operands)*
            line = in(reg) 64usize,
            options(nostack),
        )
    };
}

// SAFETY (all blocks in this impl): a `Tiles` is made on this thread only where there is AMX, and its registers are
// configured while it lives.
impl Tiles {
    /// Where AMX is available, which the caller has seen.
    fn configure() -> Self {
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: a valid configuration. It sets all tiles to zero.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags)) };
        Self(PhantomData)
    }

    /// `4 * runs` products in four chains.
    fn products(&self, runs: usize) {
        unsafe {
            asm!(
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {runs}",
                "jnz 2b",
                runs = inout(reg) runs => _,
                options(nostack),
            );
        }
    }

    /// Loads the first tiles of the memory, a multiple of 8 of them, in order.
    fn loads(&self, memory: &Memory, tiles: usize) {
        assert!(tiles.is_multiple_of(8) && tiles * TILE_BYTES <= memory.bytes);
        unsafe {
            asm!(
                "2:",
                "tileloadd tmm0, [{at} + {line}]",
                "tileloadd tmm1, [{at} + {line} + 1024]",
                "tileloadd tmm2, [{at} + {line} + 2048]",
                "tileloadd tmm3, [{at} + {line} + 3072]",
                "tileloadd tmm4, [{at} + {line} + 4096]",
                "tileloadd tmm5, [{at} + {line} + 5120]",
                "tileloadd tmm6, [{at} + {line} + 6144]",
                "tileloadd tmm7, [{at} + {line} + 7168]",
                "add {at}, 8192",
                "dec {runs}",
                "jnz 2b",
                at = inout(reg) memory.start => _,
                runs = inout(reg) tiles / 8 => _,
                line = in(reg) 64usize,
                options(nostack),
            );
        }
    }

    /// All rows by all panels, two by two; all panels for the first rows, then for the next.
    ///
    /// # Safety
    /// The memory is there, and nobody else uses what is written.
    unsafe fn block(&self, shape: Shape, way: Way, operands: Operands) {
        let Shape { row_tiles, panels, steps } = shape;
        let Operands { x, w, out, mut far } = operands;
        let (row_stride, panel_stride) = shape.strides();
        for row in (0..row_tiles).step_by(2) {
            for panel in (0..panels).step_by(2) {
                // SAFETY: the caller's, and see above.
                unsafe {
                    let x = [x.add(row * row_stride), x.add((row + 1) * row_stride)];
                    let w = [w.add(panel * panel_stride), w.add((panel + 1) * panel_stride)];
                    if out.is_some() {
                        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack));
                    }
                    // Without results to ask for, an address that stays.
                    let (results, stride) = out.map_or((x[0].cast_mut(), 0), |(out, stride)| {
                        (out.add(row * 16 * stride + panel * 64), stride)
                    });
                    macro_rules! run {
                        ($load:literal, $between:tt, $step:tt $($operands:tt)*) => {
                            two_by_two!(
                                $load, $between, $step
                                x0 = inout(reg) x[0] => _,
                                x1 = inout(reg) x[1] => _,
                                w0 = inout(reg) w[0] => _,
                                w1 = inout(reg) w[1] => _,
                                steps = inout(reg) steps => _,
                                $($operands)*
                            )
                        };
                    }
                    match way {
                        Way::Load => run!("tileloadd", ["", "", "", ""], []),
                        Way::LoadT1 => run!("tileloaddt1", ["", "", "", ""], []),
                        Way::AskedFor => run!(
                            "tileloaddt1",
                            [ask_for!("{x0}"), ask_for!("{w0}"), ask_for!("{w1}"), ask_for!("{x1}")],
                            []
                        ),
                        Way::AskedForAll => run!(
                            "tileloaddt1",
                            [ask_for!("{x0}"), ask_for!("{w0}"), ask_for!("{w1}"), ask_for!("{x1}")],
                            ["test {steps}, 1", "jnz 4f", "prefetchw [{results}]", "prefetchw [{results} + 64]", "add {results}, {stride}", "4:"]
                            results = inout(reg) results => _,
                            stride = in(reg) stride,
                        ),
                        Way::AskedForFar => run!(
                            "tileloaddt1",
                            ["", "", "", ""],
                            [
                                "prefetcht1 [{far}]",
                                "prefetcht1 [{far} + 64]",
                                "prefetcht1 [{far} + 128]",
                                "prefetcht1 [{far} + 192]",
                                "prefetcht1 [{far} + 256]",
                                "prefetcht1 [{far} + 320]",
                                "add {far}, 384"
                            ]
                            far = inout(reg) far => far,
                        ),
                        Way::AskedForHalf => run!(
                            "tileloaddt1",
                            ["", "", "", ""],
                            [
                                "prefetcht1 [{far}]",
                                "prefetcht1 [{far} + 64]",
                                "prefetcht1 [{far} + 128]",
                                "add {far}, 192"
                            ]
                            far = inout(reg) far => far,
                        ),
                        Way::AskedForResults => run!(
                            "tileloaddt1",
                            ["", "", "", ""],
                            ["test {steps}, 1", "jnz 4f", "prefetchw [{results}]", "prefetchw [{results} + 64]", "add {results}, {stride}", "4:"]
                            results = inout(reg) results => _,
                            stride = in(reg) stride,
                        ),
                    }
                    if out.is_some() {
                        asm!(
                            "tilestored [{upper} + {stride}], tmm0",
                            "tilestored [{upper} + {stride} + 64], tmm1",
                            "tilestored [{lower} + {stride}], tmm2",
                            "tilestored [{lower} + {stride} + 64], tmm3",
                            upper = in(reg) results,
                            lower = in(reg) results.add(16 * stride),
                            stride = in(reg) stride,
                            options(nostack),
                        );
                    }
                }
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Everything that is measured here, on one thread of a machine that has AMX. The first one is the peak.
pub fn cases() -> Vec<Case> {
    let mut cases = vec![Case::alone("tile products, from registers", flops(4 * 1024), || {
        Tiles::configure().products(1024);
    })];
    let memory = Rc::new(Memory::new(16 << 20));
    for (place, tiles, passes) in [("L1", 32, 64), ("L2", 1024, 4), ("L3", 16 << 10, 1)] {
        let memory = memory.clone();
        cases.push(Case::alone(format!("tile loads, {place}"), Work::Tiles((passes * tiles) as f64), move || {
            let registers = Tiles::configure();
            (0..passes).for_each(|_| registers.loads(&memory, tiles));
        }));
    }
    cases.extend(loops());
    cases
}

fn flops(products: usize) -> Work {
    Work::Flops((products * TILE_FLOPS) as f64)
}

/// The loop of two by two tiles with its operands in several places.
fn loops() -> Vec<Case> {
    const WEIGHTS_BYTES: usize = 256 << 20;
    // Rows as far apart as those of a result of 2048 columns, and more of them than a cache holds.
    const OUT_STRIDE: usize = 8 << 10;
    const OUT_ROWS: usize = 4096;
    // What a call asks for at most, in turn of more than L2 holds.
    const FAR_BYTES: usize = 1 << 20;
    const FAR_PARTS: usize = 16;
    let x = Rc::new(Memory::new(1 << 20));
    let w = Rc::new(Memory::new(WEIGHTS_BYTES));
    let out = Rc::new(Memory::new(OUT_ROWS * OUT_STRIDE));
    let plain = (Way::Load, "tileloadd");
    let t1 = (Way::LoadT1, "tileloaddt1");
    let asked_for = (Way::AskedFor, "t1 + prefetcht0");
    let results = (Way::AskedForResults, "t1 + prefetchw");
    let all = (Way::AskedForAll, "t1 + t0 + prefetchw");

    let ahead = (Way::AskedForFar, "t1, 6 far lines a step");
    let ahead_half = (Way::AskedForHalf, "t1, 3 far lines a step");

    let in_l1 = Shape { row_tiles: 2, panels: 2, steps: 8 };
    let in_l2 = Shape { row_tiles: 8, panels: 8, steps: 64 };
    // Each panel is read once for two tiles of rows: of a product's weights so much comes from memory for its first
    // rows alone.
    let far = Shape { row_tiles: 2, panels: 64, steps: 64 };
    let far_bytes = far.panels * far.strides().1;
    let places = [
        ("all in L1", in_l1, 64, 1, false, &[plain, t1, asked_for][..]),
        ("all in L2", in_l2, 1, 1, false, &[plain, t1, asked_for, ahead, ahead_half]),
        ("all in L2, stores", in_l2, 1, 1, true, &[t1, asked_for, results, all]),
        ("weights in L3", far, 1, 4, false, &[t1, asked_for]),
        ("weights in memory", far, 1, WEIGHTS_BYTES / far_bytes, false, &[t1, asked_for]),
    ];
    let mut cases = Vec::new();
    for (place, shape, passes, num_parts, stores, ways) in places {
        for &(way, how) in ways {
            let (x, w, out, mut part, mut row, mut turn) = (x.clone(), w.clone(), out.clone(), 0, 0, 0);
            let name = format!("2x2 loop, {place}, {how}");
            cases.push(Case::alone(name, flops(passes * shape.products()), move || {
                let registers = Tiles::configure();
                let operands = Operands {
                    x: x.at(0),
                    w: w.at(part * far_bytes),
                    out: stores.then(|| (out.at(row * OUT_STRIDE), OUT_STRIDE)),
                    far: w.at(FAR_BYTES + turn % FAR_PARTS * FAR_BYTES),
                };
                // SAFETY: there is as much memory, and the row is the first of as many as the shape has.
                (0..passes).for_each(|_| unsafe { registers.block(shape, way, operands) });
                turn += 1;
                part = (part + 1) % num_parts;
                row = (row + 16 * shape.row_tiles) % OUT_ROWS;
            }));
        }
    }
    cases
}
