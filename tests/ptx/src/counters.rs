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

    /// Accesses of global memory by the lanes of a warp: addresses and bytes.
    pub(crate) fn global(&mut self, pc: u32, accesses: &[(u64, u32)]) {
        let mut sectors: Vec<u64> = Vec::with_capacity(accesses.len());
        for (address, bytes) in accesses {
            sectors.extend(address / 32..=(address + u64::from(*bytes) - 1) / 32);
        }
        sectors.sort_unstable();
        sectors.dedup();
        let counts = &mut self.instructions[pc as usize];
        counts.requests += 1;
        counts.sectors += sectors.len() as u64;
        counts.global_bytes += accesses.iter().map(|(_, bytes)| u64::from(*bytes)).sum::<u64>();
    }

    /// Accesses of shared memory: a pass serves 32 banks of 4 bytes, and lanes that read the same word share it.
    /// Accesses of 8 and 16 bytes are served by half and by quarter warps.
    pub(crate) fn shared(&mut self, pc: u32, accesses: &[(usize, u64, u32)]) {
        let Some((_, _, bytes)) = accesses.first() else { return };
        let lanes_of_pass = (128 / (*bytes).clamp(4, 128)) as usize;
        let (mut passes, mut ideal) = (0, 0);
        for first in (0..32).step_by(lanes_of_pass) {
            let mut words: Vec<u64> = accesses
                .iter()
                .filter(|(lane, _, _)| (first..first + lanes_of_pass).contains(lane))
                .flat_map(|(_, offset, bytes)| offset / 4..(offset + u64::from(*bytes)).div_ceil(4))
                .collect();
            if words.is_empty() {
                continue;
            }
            words.sort_unstable();
            words.dedup();
            let mut banks = [0_u64; 32];
            words.iter().for_each(|word| banks[(word % 32) as usize] += 1);
            passes += banks.into_iter().max().unwrap_or(0);
            ideal += 1;
        }
        let counts = &mut self.instructions[pc as usize];
        counts.shared_passes += passes;
        counts.ideal_shared_passes += ideal;
        counts.shared_bytes += accesses.iter().map(|(_, _, bytes)| u64::from(*bytes)).sum::<u64>();
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
