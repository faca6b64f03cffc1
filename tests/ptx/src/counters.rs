//! What a profiler counts, by instruction.

use crate::machine::GridLaunch;
use crate::program::KernelProgram;
use crate::source::SourceLine;
use crate::table::{InstructionRow, Unit};

/// Counts of one instruction of a kernel over a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstructionCounts {
    /// Issue slots: times that a warp issued it.
    pub warps: u64,
    /// Lanes that took part.
    pub threads: u64,
    /// Requests to global memory, the 32-byte sectors that they touch, and the bytes that lanes asked for.
    pub requests: u64,
    pub sectors: u64,
    pub global_bytes: u64,
    /// Accesses of shared memory: the passes that they take, and those that they would take without bank conflicts.
    pub shared_passes: u64,
    pub ideal_shared_passes: u64,
    pub shared_bytes: u64,
    /// Operations of tensor cores: a multiplication and an addition are two.
    pub tensor_operations: u64,
}

/// The words that a pass over shared memory asks for, by bank.
#[derive(Default)]
struct BankWords {
    /// The first word of each bank, plus 1.
    first: [u64; 32],
    /// Words in whose bank another one is first.
    others: Vec<u64>,
}

impl BankWords {
    fn insert(&mut self, word: u64) {
        let first = &mut self.first[(word % 32) as usize];
        if *first == 0 {
            *first = word + 1;
        } else if *first != word + 1 {
            self.others.push(word);
        }
    }

    /// The passes that the words need, of which none is left.
    fn take_passes(&mut self) -> u64 {
        let any = u64::from(self.first.iter().any(|first| *first != 0));
        self.first = [0; 32];
        if self.others.is_empty() {
            return any;
        }
        self.others.sort_unstable();
        self.others.dedup();
        let mut more = [0; 32];
        self.others.drain(..).for_each(|word| more[(word % 32) as usize] += 1);
        any + more.into_iter().max().unwrap_or(0)
    }
}

/// Counts of a launch.
#[derive(Clone, Debug)]
pub struct Counters {
    pub kernel: String,
    pub launch: GridLaunch,
    /// By instruction of the kernel.
    instructions: Vec<InstructionCounts>,
    kinds: Vec<(&'static InstructionRow, SourceLine)>,
    issued: u64,
    waits: u64,
}

impl Counters {
    pub(crate) fn new(program: &KernelProgram, launch: &GridLaunch) -> Self {
        Self {
            kernel: program.name.clone(),
            launch: *launch,
            instructions: vec![InstructionCounts::default(); program.code.len()],
            kinds: program.code.iter().map(|instruction| (instruction.row, instruction.source)).collect(),
            issued: 0,
            waits: 0,
        }
    }

    pub(crate) fn issue(&mut self, pc: u32, lanes: u32) {
        let counts = &mut self.instructions[pc as usize];
        counts.warps += 1;
        counts.threads += u64::from(lanes.count_ones());
        self.issued += 1;
    }

    /// An instruction waited and will be issued again.
    pub(crate) fn wait(&mut self, pc: u32, lanes: u32) {
        let counts = &mut self.instructions[pc as usize];
        counts.warps -= 1;
        counts.threads -= u64::from(lanes.count_ones());
        self.waits += 1;
    }

    /// Grows with everything that is executed, apart from waits.
    pub(crate) fn progress(&self) -> u64 {
        self.issued - self.waits
    }

    /// Accesses of global memory by the lanes of a warp: addresses, of `bytes` bytes each.
    pub(crate) fn global(&mut self, pc: u32, addresses: impl Iterator<Item = u64> + Clone, bytes: u64) {
        // Mostly the addresses ascend, and a sector that was seen is the last one.
        let (mut num_sectors, mut last, mut ascends, mut num_accesses) = (0, None, true, 0);
        for address in addresses.clone() {
            num_accesses += 1;
            let (first, end) = (address / 32, (address + bytes - 1) / 32);
            let new_from = match last {
                Some(last) if first < last => {
                    ascends = false;
                    break;
                }
                Some(last) if first == last => first + 1,
                _ => first,
            };
            num_sectors += end + 1 - new_from;
            last = Some(end);
        }
        if !ascends {
            let mut sectors: Vec<u64> =
                addresses.clone().flat_map(|address| address / 32..=(address + bytes - 1) / 32).collect();
            sectors.sort_unstable();
            sectors.dedup();
            num_sectors = sectors.len() as u64;
            num_accesses = addresses.count() as u64;
        }
        let counts = &mut self.instructions[pc as usize];
        counts.requests += 1;
        counts.sectors += num_sectors;
        counts.global_bytes += num_accesses * bytes;
    }

    /// Accesses of shared memory, lanes and offsets, of `bytes` bytes each: a pass serves 32 banks of 4 bytes, and
    /// lanes that read the same word share it. Accesses of 8 and 16 bytes are served by half and by quarter warps.
    pub(crate) fn shared(&mut self, pc: u32, accesses: impl Iterator<Item = (usize, u64)>, bytes: u64) {
        let lanes_of_pass = (128 / bytes.clamp(4, 128)) as usize;
        let (mut passes, mut ideal, mut num_accesses) = (0, 0, 0);
        let mut words = BankWords::default();
        let mut served = None;
        for (lane, offset) in accesses {
            num_accesses += 1;
            if served != Some(lane / lanes_of_pass) {
                served = Some(lane / lanes_of_pass);
                passes += words.take_passes();
                ideal += 1;
            }
            (offset / 4..(offset + bytes).div_ceil(4)).for_each(|word| words.insert(word));
        }
        passes += words.take_passes();
        let counts = &mut self.instructions[pc as usize];
        counts.shared_passes += passes;
        counts.ideal_shared_passes += ideal;
        counts.shared_bytes += num_accesses * bytes;
    }

    pub(crate) fn tensor(&mut self, pc: u32, operations: u64) {
        self.instructions[pc as usize].tensor_operations += operations;
    }

    pub(crate) fn bulk(&mut self, pc: u32, bytes: u64) {
        let counts = &mut self.instructions[pc as usize];
        counts.requests += 1;
        counts.sectors += bytes.div_ceil(32);
        counts.global_bytes += bytes;
    }

    /// Issue slots of all warps.
    pub fn warp_instructions(&self) -> u64 {
        self.progress()
    }

    /// Instructions that threads executed.
    pub fn thread_instructions(&self) -> u64 {
        self.instructions.iter().map(|counts| counts.threads).sum()
    }

    /// All counts together.
    pub fn total(&self) -> InstructionCounts {
        self.sum(|_| true)
    }

    /// Counts of the instructions whose row of the table is as asked.
    pub fn sum(&self, wanted: impl Fn(&InstructionRow) -> bool) -> InstructionCounts {
        let mut total = InstructionCounts::default();
        for (counts, (row, _)) in self.instructions.iter().zip(&self.kinds) {
            if !wanted(row) {
                continue;
            }
            total.warps += counts.warps;
            total.threads += counts.threads;
            total.requests += counts.requests;
            total.sectors += counts.sectors;
            total.global_bytes += counts.global_bytes;
            total.shared_passes += counts.shared_passes;
            total.ideal_shared_passes += counts.ideal_shared_passes;
            total.shared_bytes += counts.shared_bytes;
            total.tensor_operations += counts.tensor_operations;
        }
        total
    }

    pub fn of_unit(&self, unit: Unit) -> InstructionCounts {
        self.sum(|row| row.unit == unit)
    }

    /// Counts of instructions with this name: `ld`, `mma`.
    pub fn of_name(&self, name: &str) -> InstructionCounts {
        self.sum(|row| row.name() == name)
    }

    /// Each instruction's counts, with its source line.
    pub fn by_instruction(
        &self,
    ) -> impl Iterator<Item = (&'static InstructionRow, SourceLine, InstructionCounts)> + '_ {
        self.kinds.iter().zip(&self.instructions).map(|((row, source), counts)| (*row, *source, *counts))
    }
}
