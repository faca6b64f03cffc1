//! What an emulated GPU is like.

use super::compile;
use super::ptx::{self, Architecture};
use std::path::PathBuf;

/// How eager each stream is: the chance, in percent, that an operation is done when it is enqueued and not only when
/// something waits for it.
#[derive(Clone, Copy, Debug)]
pub struct Eagerness {
    pub compute: u32,
    pub copy_out: u32,
    pub copy_in: u32,
}

impl Eagerness {
    pub const EAGER: Self = Self { compute: 100, copy_out: 100, copy_in: 100 };
}

#[derive(Clone, Debug)]
pub struct EmulatedOptions {
    /// The folder of the kernels.
    pub kernels: PathBuf,
    pub total_memory: usize,
    /// Multiprocessors. Each runs two thread blocks at a time.
    pub num_sms: u32,
    /// Thread blocks that run at a time, if that is something else.
    pub resident_blocks: Option<u32>,
    pub eagerness: Eagerness,
    pub seed: u64,
    /// Streams do not wait for each other's events, as if the backend had forgotten to ask for it.
    pub ignores_waits: bool,
    /// In which order threads run: 0, 1 or 2 (`Order` of the emulation).
    pub thread_order: u32,
    /// A kernel that is not run, because it would write all of a sparse allocation.
    pub leaves_out: Option<&'static str>,
    /// The one thread block of each grid that runs, for grids whose other blocks would read all of a sparse allocation.
    pub only_block: Option<[u32; 3]>,
    /// Kernels run as PTX for this architecture instead of as C++.
    pub ptx: Option<Architecture>,
    /// With PTX: each kernel is compared with that of this folder, and the device fails where they part.
    pub against: Option<PathBuf>,
    /// With PTX: the counters of all launches are kept.
    pub counts: bool,
    /// Milliseconds of a launch and of a matrix product. Without them the device cannot time its work.
    pub clock: Option<(f32, f32)>,
    /// With PTX: races, unwritten bytes and the like are looked for.
    pub sanitizes: bool,
    /// With PTX: results that depend on memory which was never written are no failure.
    pub takes_unwritten: bool,
}

impl Default for EmulatedOptions {
    fn default() -> Self {
        Self {
            kernels: compile::kernels(),
            total_memory: 1 << 30,
            num_sms: 4,
            resident_blocks: None,
            eagerness: Eagerness::EAGER,
            seed: 1,
            ignores_waits: false,
            // The threads of a warp run one after the other, so that their stacks stay in the cache.
            thread_order: 1,
            leaves_out: None,
            only_block: None,
            ptx: ptx::asked_for(),
            against: None,
            counts: false,
            clock: None,
            sanitizes: true,
            takes_unwritten: false,
        }
    }
}
