//! A device, and the launches on it.

use super::groups::{GroupState, LaneGroup};
use super::step::run_warp;
use super::{LaunchRun, SeededChoice, ThreadBlock, Warp, lanes_of};
use crate::counters::Counters;
use crate::divergence::ExecutionTrace;
use crate::error::{PtxError, PtxResult};
use crate::findings::{FindingKind, KernelFinding};
use crate::memory::{ByteSet, GpuMemory};
use crate::module::Module;
use crate::mufu;
use crate::program::{KernelProgram, Op};
use crate::races::{Knowledge, Shadow};
use std::collections::HashMap;

/// How kernels run.
#[derive(Clone, Copy, Debug)]
pub struct GpuOptions {
    /// Chooses the order of blocks, warps and diverged lanes. The same seed gives the same run.
    pub seed: u64,
    /// Looks for races, unwritten bytes and the like. Without, a launch is several times as fast.
    pub sanitize: bool,
    /// Thread blocks that run at a time.
    pub resident_blocks: usize,
    /// The one thread block of each grid whose cluster runs, instead of all.
    pub only_block: Option<[u32; 3]>,
    /// Warp instructions after which a launch counts as stuck.
    pub max_instructions: u64,
    /// Reports results in global memory that depend on global memory which nothing wrote. A program may compute rows
    /// that nobody takes: without, such results count as unwritten.
    pub check_results: bool,
    /// How far results of `ex2.approx` and the like are from the exact ones, from -1 to 1 times the manual's bound.
    pub approximation_error: f64,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            sanitize: true,
            resident_blocks: 3,
            only_block: None,
            max_instructions: 1 << 32,
            check_results: true,
            approximation_error: 0.0,
        }
    }
}

/// The grid of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GridLaunch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster.
    pub cluster: [u32; 3],
}

impl GridLaunch {
    /// A launch without clusters.
    pub fn new(grid: [u32; 3], block: [u32; 3], shared_bytes: u32) -> Self {
        Self { grid, block, shared_bytes, cluster: [1; 3] }
    }
}

/// What a launch did.
#[derive(Clone, Debug)]
pub struct LaunchReport {
    pub findings: Vec<KernelFinding>,
    pub counters: Counters,
}

impl LaunchReport {
    /// The findings as text, or nothing if there are none.
    pub fn failure(&self) -> Option<String> {
        let lines: Vec<String> = self.findings.iter().map(ToString::to_string).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }
}

/// A device: its memory, and the variables of the modules that were used.
#[derive(Default)]
pub struct VirtualGpu {
    pub memory: GpuMemory,
    pub options: GpuOptions,
    variables: HashMap<u64, Vec<u64>>,
    num_launches: u64,
}

impl VirtualGpu {
    pub fn new(options: GpuOptions) -> Self {
        Self { options, ..Self::default() }
    }

    /// Addresses of the module's global and constant variables, which the first use of a module allocates.
    fn load(&mut self, module: &Module) -> Vec<u64> {
        if let Some(known) = self.variables.get(&module.id()) {
            return known.clone();
        }
        let mut addresses = Vec::new();
        for variable in module.variables() {
            let address = self.memory.allocate(variable.bytes as usize);
            let mut contents = variable.initial.clone();
            contents.resize(variable.bytes as usize, 0);
            self.memory.write(address, &contents);
            addresses.push(address);
        }
        self.variables.insert(module.id(), addresses.clone());
        addresses
    }

    /// Where a global or constant variable of a module is.
    pub fn variable(&mut self, module: &Module, name: &str) -> Option<u64> {
        let index = module.variables().position(|variable| variable.name == name)?;
        Some(self.load(module)[index])
    }

    /// Runs a kernel to its end. `params` are the bytes of the kernel's parameters, as laid out by
    /// [`KernelProgram::params`](crate::program::KernelProgram).
    pub fn launch(
        &mut self,
        module: &Module,
        entry: &str,
        launch: &GridLaunch,
        params: &[u8],
    ) -> PtxResult<LaunchReport> {
        self.run(module, entry, launch, params, None).map(|(report, _)| report)
    }

    /// Runs a kernel and notes what it executes.
    pub(crate) fn traced(
        &mut self,
        module: &Module,
        entry: &str,
        launch: &GridLaunch,
        params: &[u8],
    ) -> PtxResult<(LaunchReport, ExecutionTrace)> {
        let (report, trace) = self.run(module, entry, launch, params, Some(ExecutionTrace::default()))?;
        Ok((report, trace.unwrap_or_default()))
    }

    /// The contents of memory, with the variables of these modules.
    pub(crate) fn snapshot(&mut self, modules: &[&Module]) -> Vec<(Vec<u8>, Option<ByteSet>)> {
        for module in modules {
            self.load(module);
        }
        self.memory.snapshot()
    }

    fn run(
        &mut self,
        module: &Module,
        entry: &str,
        launch: &GridLaunch,
        params: &[u8],
        trace: Option<ExecutionTrace>,
    ) -> PtxResult<(LaunchReport, Option<ExecutionTrace>)> {
        let program = module.entry(entry)?;
        let mut launch = *launch;
        if let Some(cluster) = program.cluster {
            launch.cluster = cluster;
        }
        check(program, &launch, params)?;
        let variables = self.load(module);
        self.num_launches += 1;
        let threads_per_block: u32 = launch.block.iter().product();
        let mut run = LaunchRun {
            program,
            lines: module.lines(),
            memory: &mut self.memory,
            params,
            variables: &variables,
            launch,
            options: self.options,
            random: SeededChoice(self.options.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ self.num_launches),
            findings: Vec::new(),
            known: HashMap::new(),
            counters: Counters::new(program, &launch),
            stopped: false,
            released: HashMap::new(),
            threads_per_block,
            warps_per_block: threads_per_block.div_ceil(32),
            bulk: Vec::new(),
            cluster_barriers: HashMap::new(),
            trace,
        };
        mufu::set_error(run.options.approximation_error);
        run.all_blocks();
        let report = LaunchReport { findings: run.findings, counters: run.counters };
        let trace = run.trace;
        self.memory.clear_shadows();
        Ok((report, trace))
    }
}

/// Time-outs of `mbarrier.try_wait` after which a launch counts as stuck.
const MAX_TIMEOUTS: u32 = 64;

fn check(program: &KernelProgram, launch: &GridLaunch, params: &[u8]) -> PtxResult<()> {
    let error = |message: String| Err(PtxError::new(format!("{}: {message}", program.name)));
    let GridLaunch { grid, block, shared_bytes, cluster } = *launch;
    let limits = [i32::MAX as u32, 65_535, 65_535];
    if grid.iter().zip(limits).any(|(blocks, limit)| *blocks == 0 || *blocks > limit) {
        return error(format!("grid {grid:?}: must be 1 to {limits:?}"));
    }
    let threads: u64 = block.iter().map(|extent| u64::from(*extent)).product();
    let most = program.max_threads.unwrap_or(1024).min(1024);
    if threads == 0 || threads > u64::from(most) {
        return error(format!("block {block:?}: must have 1 to {most} threads"));
    }
    if program.static_shared + shared_bytes > 228 << 10 {
        return error(format!("{shared_bytes} bytes of shared memory: a block has at most 228 KiB"));
    }
    if cluster.contains(&0) || grid.iter().zip(cluster).any(|(grid, cluster)| grid % cluster != 0) {
        return error(format!("cluster {cluster:?}: must divide the grid {grid:?}"));
    }
    if params.len() != program.param_bytes as usize {
        return error(format!("{} bytes of parameters: must be {}", params.len(), program.param_bytes));
    }
    Ok(())
}

impl LaunchRun<'_> {
    fn block(&self, id: [u32; 3]) -> ThreadBlock {
        let GridLaunch { grid, cluster, shared_bytes, .. } = self.launch;
        let linear = id[0] + grid[0] * (id[1] + grid[1] * id[2]);
        let within = [0, 1, 2].map(|axis| id[axis] % cluster[axis]);
        let of = [0, 1, 2].map(|axis| id[axis] / cluster[axis]);
        let clusters = [0, 1, 2].map(|axis| grid[axis] / cluster[axis]);
        let shared = (self.program.dynamic_shared + shared_bytes) as usize;
        let first_warp = linear * self.warps_per_block;
        let warp = |index: u32| {
            let threads = (self.threads_per_block - index * 32).min(32);
            let live = if threads == 32 { u32::MAX } else { (1 << threads) - 1 };
            let known = || Knowledge::new(first_warp + index, first_warp, self.warps_per_block as usize);
            Warp {
                index: index as usize,
                registers: vec![[0; 32]; self.program.num_registers as usize],
                predicates: vec![0; self.program.num_predicates as usize],
                live,
                groups: vec![LaneGroup { pc: 0, mask: live, state: GroupState::Ready }],
                local: vec![0; 32 * self.program.local_bytes as usize],
                knowledge: self.options.sanitize.then(known),
                ..Warp::default()
            }
        };
        ThreadBlock {
            id,
            rank: within[0] + cluster[0] * (within[1] + cluster[1] * within[2]),
            cluster: of[0] + clusters[0] * (of[1] + clusters[1] * of[2]),
            // What nothing wrote is not zero.
            shared: vec![0xff; shared],
            shared_written: ByteSet::new(shared),
            shared_undefined: None,
            has_computed_undefined: false,
            shared_shadow: Shadow::new(if self.options.sanitize { shared } else { 0 }),
            proxy_fences: vec![0; self.warps_per_block as usize],
            warps: (0..self.warps_per_block).map(warp).collect(),
            barriers: Default::default(),
            mbarriers: Default::default(),
        }
    }

    /// The ids of the blocks that run, cluster by cluster.
    fn clusters(&self) -> impl Iterator<Item = Vec<[u32; 3]>> + use<> {
        let (GridLaunch { grid, cluster, .. }, only) = (self.launch, self.options.only_block);
        let count = [0, 1, 2].map(|axis| grid[axis] / cluster[axis]);
        let ids = |extent: [u32; 3]| {
            (0..extent[2]).flat_map(move |z| (0..extent[1]).flat_map(move |y| (0..extent[0]).map(move |x| [x, y, z])))
        };
        let of_cluster =
            move |at: [u32; 3]| ids(cluster).map(move |id| [0, 1, 2].map(|axis| at[axis] * cluster[axis] + id[axis]));
        ids(count)
            .map(move |at| of_cluster(at).collect())
            .filter(move |blocks: &Vec<[u32; 3]>| only.is_none_or(|only| blocks.contains(&only)))
    }

    fn all_blocks(&mut self) {
        let mut waiting = self.clusters();
        let mut blocks: Vec<ThreadBlock> = Vec::new();
        let mut most = self.options.resident_blocks.max(1);
        // How often waits with a time limit ended without success because nothing else could go on.
        let mut timeouts = 0;
        loop {
            while blocks.len() < most {
                let Some(cluster) = waiting.next() else { break };
                // Registers of a block are used again.
                blocks.extend(cluster.into_iter().map(|id| self.block(id)));
            }
            if blocks.is_empty() || self.stopped {
                return;
            }
            let ready: Vec<(usize, usize)> = blocks
                .iter()
                .enumerate()
                .flat_map(|(b, block)| block.warps.iter().enumerate().map(move |(w, warp)| (b, w, warp)))
                .filter(|(_, _, warp)| warp.is_ready())
                .map(|(b, w, _)| (b, w))
                .collect();
            if ready.is_empty() {
                if self.finish_bulk(&mut blocks, true) {
                    continue;
                }
                // A block that is not started yet may be what the others wait for.
                let before = blocks.len();
                most += 1;
                if let Some(cluster) = waiting.next() {
                    blocks.extend(cluster.into_iter().map(|id| self.block(id)));
                }
                if blocks.len() == before {
                    timeouts += 1;
                    if timeouts > MAX_TIMEOUTS || !self.time_out(&mut blocks) {
                        self.deadlock(&blocks);
                        return;
                    }
                }
                continue;
            }
            let (b, w) = ready[self.random.below(ready.len())];
            let quantum = 1 << self.random.below(9);
            run_warp(self, &mut blocks, b, w, quantum);
            self.release_barriers(&mut blocks, b);
            if !self.bulk.is_empty() {
                self.finish_bulk(&mut blocks, false);
            }
            if self.counters.warp_instructions() > self.options.max_instructions {
                self.deadlock(&blocks);
                return;
            }
            // The blocks of a cluster end together: others may access their shared memory.
            let cluster = blocks[b].cluster;
            let ended = |block: &ThreadBlock| block.warps.iter().all(|warp| warp.live == 0);
            if blocks.iter().filter(|block| block.cluster == cluster).all(ended) {
                blocks.retain(|block| block.cluster != cluster);
            }
        }
    }

    /// Reports where the threads wait that cannot go on.
    fn deadlock(&mut self, blocks: &[ThreadBlock]) {
        let mut waiting = Vec::new();
        for block in blocks {
            let linear = block.id[0] + self.launch.grid[0] * (block.id[1] + self.launch.grid[1] * block.id[2]);
            for warp in &block.warps {
                for group in &warp.groups {
                    let lane = lanes_of(group.mask).next().unwrap_or(0);
                    waiting.push((group.pc, linear * self.warps_per_block + warp.index as u32, lane, group.state));
                }
            }
        }
        let diverged = |pc: u32, state: GroupState| {
            let at_barrier = matches!(self.program.code[pc as usize].op, Op::Barrier { .. });
            at_barrier && matches!(state, GroupState::AtWarpBarrier(_))
        };
        let divergences: Vec<_> = waiting.iter().copied().filter(|(pc, _, _, state)| diverged(*pc, *state)).collect();
        if !divergences.is_empty() {
            self.stopped = true;
            for (pc, warp, lane, _) in divergences {
                self.report(FindingKind::BarrierDivergence, (pc, warp, lane), None, || {
                    "only some lanes of the warp are at this barrier".into()
                });
            }
            return;
        }
        for (pc, warp, lane, state) in waiting {
            let message = match state {
                GroupState::Ready => "the thread goes on for too long",
                GroupState::AtBarrier(_) => "the thread waits at a barrier that others do not reach",
                GroupState::AtWarpBarrier(_) => "the lanes of the mask do not all arrive",
                GroupState::AtMbarrier(..) => "the thread waits for a phase of an mbarrier that does not complete",
                GroupState::AtCluster => "the thread waits at a barrier of its cluster that others do not reach",
            };
            self.report(FindingKind::Deadlock, (pc, warp, lane), None, || message.into());
        }
    }
}
