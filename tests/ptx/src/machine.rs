//! Runs the blocks of a launch: warps of 32 lanes, in an order that the seed chooses.

mod access;
mod barriers;
mod bulk;
mod copies;
mod definedness;
mod fragments;
mod groups;
mod launch;
mod mbarriers;
mod moves;
mod requests;
mod step;
mod tensor;
mod warp_ops;
mod wgmma;

use crate::counters::Counters;
use crate::divergence::ExecutionTrace;
use crate::findings::{AccessPlace, FindingKind, KernelFinding};
use crate::memory::{ByteSet, GpuMemory};
use crate::program::{KernelProgram, LaneValues, WARP_SIZE};
use crate::races::{Knowledge, Released, Shadow, Stamp};
use crate::source::SourceLines;
use definedness::UndefinedLanes;
use groups::LaneGroup;
pub use launch::{GpuOptions, GridLaunch, LaunchReport, VirtualGpu};
use std::collections::{BTreeMap, HashMap};

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct SeededChoice(u64);

impl SeededChoice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// A copy that `cp.async` started.
#[derive(Clone, Debug)]
struct PendingCopy {
    lane: usize,
    /// The lane's group that it belongs to; `None`: it is not committed.
    group: Option<u32>,
    offset: usize,
    contents: [u8; 16],
    bytes: usize,
    /// Bits of the bytes whose value is undefined.
    undefined: u64,
    /// Whether the bytes are there already, although nobody may rely on it.
    is_stored: bool,
    stamp: Stamp,
}

/// A bulk copy from shared memory whose source must not change before it was waited for.
#[derive(Clone, Debug)]
struct PendingBulkRead {
    lane: usize,
    group: Option<u32>,
    offset: usize,
    bytes: usize,
    stamp: Stamp,
}

/// A product of `wgmma` that was not waited for.
#[derive(Clone, Debug)]
struct PendingProduct {
    /// The registers of the result.
    registers: Vec<u32>,
    group: Option<u32>,
    /// What it reads of its block's shared memory: offsets of 16 bytes.
    reads: Vec<usize>,
    stamp: Stamp,
}

/// A bulk copy to shared memory that is under way.
#[derive(Clone, Debug)]
struct PendingBulk {
    block: [u32; 3],
    /// The mbarrier's offset, and the bytes to report to it.
    mbarrier: u32,
    bytes: u64,
    pieces: Vec<(usize, Vec<u8>)>,
    stamp: Stamp,
    released: Released,
}

#[derive(Default)]
struct Warp {
    index: usize,
    registers: Vec<LaneValues>,
    predicates: Vec<u32>,
    /// The carry of `add.cc`.
    carry: u32,
    /// Lanes that have not ended.
    live: u32,
    groups: Vec<LaneGroup>,
    current: Option<usize>,
    /// Instructions since the current group was chosen.
    run_length: u32,
    local: Vec<u8>,
    knowledge: Option<Knowledge>,
    copies: Vec<PendingCopy>,
    /// Groups that each lane has committed.
    committed: [u32; WARP_SIZE],
    bulk_reads: Vec<PendingBulkRead>,
    bulk_committed: [u32; WARP_SIZE],
    products: Vec<PendingProduct>,
    products_committed: u32,
    /// The phase of the cluster's barrier that the warp arrived at.
    cluster_phase: u64,
    /// The `try_wait` that the warp waited at: instruction, mbarrier, phase.
    waited: Option<(u32, u32, u64)>,
    /// Ordinary writes to shared memory since the last proxy fence.
    has_generic_writes: bool,
    /// Registers and predicates with undefined lanes.
    undefined: HashMap<u32, UndefinedLanes>,
    undefined_predicates: HashMap<u32, UndefinedLanes>,
}

#[derive(Clone, Debug, Default)]
struct BlockBarrier {
    arrived: u32,
    /// Threads that the barrier waits for; `None`: all of the block.
    expected: Option<u32>,
    ones: u32,
    /// What those who arrived without waiting know.
    released: Released,
    arrivals_without_wait: u32,
}

/// An mbarrier object.
#[derive(Clone, Debug, Default)]
struct Mbarrier {
    /// Arrivals of each phase.
    expected: u32,
    pending: u32,
    /// Bytes that are expected and have not come.
    bytes: i64,
    phase: u64,
    collecting: Released,
    /// What completing the last phase passes on.
    completed: Released,
}

struct ThreadBlock {
    id: [u32; 3],
    /// The place in its cluster.
    rank: u32,
    cluster: u32,
    shared: Vec<u8>,
    shared_written: ByteSet,
    /// Bytes that hold a copy of what nothing wrote; `None`: none so far.
    shared_undefined: Option<ByteSet>,
    /// Whether some of them were computed, and not only copied.
    has_computed_undefined: bool,
    shared_shadow: Shadow,
    /// For each warp: its clock at its last proxy fence.
    proxy_fences: Vec<u32>,
    warps: Vec<Warp>,
    barriers: [BlockBarrier; 16],
    mbarriers: BTreeMap<u32, Mbarrier>,
}

/// A launch that runs.
pub(crate) struct LaunchRun<'a> {
    program: &'a KernelProgram,
    lines: &'a SourceLines,
    memory: &'a mut GpuMemory,
    params: &'a [u8],
    /// Addresses of the module's variables.
    variables: &'a [u64],
    launch: GridLaunch,
    options: GpuOptions,
    random: SeededChoice,
    findings: Vec<KernelFinding>,
    /// The findings by kind and places.
    known: HashMap<(FindingKind, u32, u32), usize>,
    counters: Counters,
    /// A fatal error ends the launch.
    stopped: bool,
    /// What fences and atomics released at addresses.
    released: HashMap<u64, Released>,
    threads_per_block: u32,
    warps_per_block: u32,
    /// Bulk copies to shared memory that are under way.
    bulk: Vec<PendingBulk>,
    cluster_barriers: HashMap<u32, ClusterBarrier>,
    /// What is executed, for the comparison with another kernel.
    trace: Option<ExecutionTrace>,
}

#[derive(Default)]
struct ClusterBarrier {
    arrived: u32,
    phase: u64,
    collecting: Released,
    completed: Released,
}

impl LaunchRun<'_> {
    fn place(&self, pc: u32, warp: u32, lane: usize) -> AccessPlace {
        let instruction = &self.program.code[pc as usize];
        let line = self.lines.describe(instruction.source);
        let block = warp / self.warps_per_block;
        let [x, y, _] = self.launch.grid;
        AccessPlace {
            line: line.unwrap_or_else(|| format!("PTX line {}", instruction.text_line)),
            instruction: instruction.row.name().into(),
            block: [block % x, block / x % y, block / (x * y)],
            thread: warp % self.warps_per_block * 32 + lane as u32,
        }
    }

    /// Reports what went wrong in a lane; once for each pair of instructions.
    fn report(
        &mut self,
        kind: FindingKind,
        (pc, warp, lane): (u32, u32, usize),
        other: Option<Stamp>,
        message: impl FnOnce() -> String,
    ) {
        self.stopped |= kind.is_fatal();
        let key = (kind, pc, other.map_or(u32::MAX, |other| other.pc));
        if let Some(index) = self.known.get(&key) {
            self.findings[*index].count += 1;
            return;
        }
        self.known.insert(key, self.findings.len());
        let at = self.place(pc, warp, lane);
        let other = other.map(|other| self.place(other.pc, other.warp(), other.lanes.trailing_zeros() as usize));
        let kernel = self.program.name.clone();
        self.findings.push(KernelFinding { kind, kernel, message: message(), at, other, count: 1 });
    }
}

/// The lanes of a mask, lowest first.
fn lanes_of(mut mask: u32) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (lane < 32).then_some(lane)
    })
}
