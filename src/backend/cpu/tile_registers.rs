//! The tile registers of AMX: whether this process may use them, and how they are configured.

use super::simd::LANES;
use std::arch::asm;
use std::sync::atomic::{AtomicBool, Ordering};

static ARE_EMULATED: AtomicBool = AtomicBool::new(false);

/// Takes AMX to be available from now on. For tests on processors without AMX.
///
/// # Safety
/// The process emulates the instructions on tiles.
pub unsafe fn assume_tiles() {
    ARE_EMULATED.store(true, Ordering::Relaxed);
}

/// Whether a test emulates the instructions.
pub(super) fn are_emulated() -> bool {
    ARE_EMULATED.load(Ordering::Relaxed)
}

/// Whether AMX with products of bfloat16 and of bytes can be used.
pub(super) fn is_available() -> bool {
    are_emulated() || is_supported()
}

/// Whether the processor and the operating system support it and this process may use it.
#[cfg(target_os = "linux")]
fn is_supported() -> bool {
    use std::sync::OnceLock;
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const AMX_INT8: u32 = 1 << 25;
        const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        let wanted = AMX_BF16 | AMX_TILE | AMX_INT8;
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        // SAFETY: the call takes two numbers and changes nothing but the process's permission to use tiles.
        features & wanted == wanted
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
    })
}

/// Tiles need the operating system's permission. Only Linux's way to ask for it is implemented.
#[cfg(not(target_os = "linux"))]
fn is_supported() -> bool {
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

/// The configured tile registers. They are released on drop, so that the system need not save them when it switches
/// threads.
pub(super) struct Tiles;

impl Tiles {
    /// Rows of the first and of the second tile of input; with one tile of input, `second` is 0.
    ///
    /// # Safety
    /// As for [`Tiles::of`].
    pub(super) unsafe fn configure(first: usize, second: usize) -> Self {
        let results = if second == 0 { [first; 4] } else { [first, first, second, second] };
        let mut shapes = [(LANES, 64); 8];
        for (shape, rows) in shapes.iter_mut().zip(results.into_iter().chain([first, second.max(1)])) {
            shape.0 = rows;
        }
        // SAFETY: the caller's promise.
        unsafe { Self::of(shapes) }
    }

    /// Rows of each tile register, 1 to 16, and bytes of a row, up to 64.
    ///
    /// # Safety
    /// AMX is available. No other `Tiles` of this thread is used after this one is made.
    pub(super) unsafe fn of(shapes: [(usize, usize); 8]) -> Self {
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (tile, (rows, row_bytes)) in shapes.into_iter().enumerate() {
            assert!((1..=LANES).contains(&rows) && row_bytes <= 64);
            config.row_bytes[tile] = row_bytes as u16;
            config.rows[tile] = rows as u8;
        }
        // SAFETY: AMX is available, and the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags)) };
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `Tiles` exists only if AMX is available.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}
