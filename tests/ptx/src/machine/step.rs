//! One instruction of a warp's current group.

use super::definedness::UndefinedLanes;
use super::groups::GroupState;
use super::{LaunchRun, ThreadBlock, Warp, lanes_of};
use crate::findings::FindingKind;
use crate::program::{
    ArithmeticMode, Compute, Instruction, KernelProgram, LaneValues, Op, PredicateSource, ValueSource, WARP_SIZE,
};
use crate::races::Stamp;
use crate::syntax::{Predicate, Register};
use std::cell::Cell;

static ZEROS: LaneValues = [0; WARP_SIZE];

/// An instruction that is executed: the lanes that take part, and all that it may touch.
pub(super) struct Exec<'a, 'r> {
    pub run: &'a mut LaunchRun<'r>,
    pub blocks: &'a mut [ThreadBlock],
    /// The warp's block. While the warp executes, it is not among the block's warps.
    pub b: usize,
    pub warp: &'a mut Warp,
    pub pc: u32,
    pub mask: u32,
    /// Whether the instruction has read a register that a `wgmma` may still write.
    pub reads_pending: Cell<bool>,
    /// The undefined lanes of what the instruction has read.
    pub undefined: Cell<UndefinedLanes>,
}

/// What becomes of the group after an instruction.
pub(super) enum Flow {
    Next,
    /// The lanes that took part go elsewhere.
    Jump(u32),
    /// The instruction is executed again when the state is over.
    Wait(GroupState),
    /// The group waits behind the instruction.
    WaitBehind(GroupState),
    /// The lanes that took part end.
    End,
    /// Places were changed by the instruction itself.
    Moved,
}

/// Runs up to `steps` instructions of a warp.
pub(super) fn run_warp(run: &mut LaunchRun<'_>, blocks: &mut [ThreadBlock], b: usize, w: usize, steps: u32) {
    let program: &KernelProgram = run.program;
    let mut warp = std::mem::take(&mut blocks[b].warps[w]);
    for _ in 0..steps {
        let Some(current) = warp.choose(&mut run.random, run.trace.is_none()) else { break };
        let group = warp.groups[current];
        let instruction = &program.code[group.pc as usize];
        let mask = match instruction.guard {
            None => group.mask,
            Some(guard) => group.mask & predicate(&warp, guard),
        };
        run.counters.issue(group.pc, mask);
        if let Some(trace) = &mut run.trace {
            trace.begin(mask);
        }
        warp.run_length += 1;
        let (reads_pending, undefined) = (Cell::new(false), Cell::default());
        let mut exec = Exec { run, blocks, b, warp: &mut warp, pc: group.pc, mask, reads_pending, undefined };
        if let Some(guard) = instruction.guard
            && !exec.warp.undefined_predicates.is_empty()
        {
            exec.check_guard(guard, group.mask);
        }
        let flow = if mask == 0 { Flow::Next } else { exec.execute(instruction) };
        if exec.reads_pending.get() {
            exec.report(FindingKind::MissingWait, mask.trailing_zeros() as usize, None, || {
                "a read of a register that a wgmma writes, without wgmma.wait_group".into()
            });
        }
        if !matches!(flow, Flow::Wait(_)) {
            exec.end_trace();
        }
        match flow {
            Flow::Next => warp.groups[current].pc += 1,
            Flow::Jump(target) => {
                warp.groups[current].pc += 1;
                warp.split(mask, target);
            }
            Flow::Wait(state) => {
                run.counters.wait(group.pc, mask);
                // Lanes whose guard is false do not wait.
                if mask != group.mask {
                    warp.groups[current].pc += 1;
                    warp.split(mask, group.pc);
                    let waiting = warp.groups.len() - 1;
                    warp.groups[waiting].state = state;
                } else {
                    warp.groups[current].state = state;
                }
                if let GroupState::AtWarpBarrier(_) = state {
                    warp.meet(group.pc);
                }
            }
            Flow::WaitBehind(state) => {
                if mask != group.mask {
                    warp.groups[current].pc += 1;
                    warp.split(mask, group.pc);
                    let waiting = warp.groups.len() - 1;
                    warp.groups[waiting].state = state;
                } else {
                    warp.groups[current].state = state;
                }
            }
            Flow::End => {
                warp.groups[current].pc += 1;
                warp.end(mask);
            }
            Flow::Moved => {}
        }
        if run.stopped {
            break;
        }
        warp.regroup();
    }
    blocks[b].warps[w] = warp;
}

/// The lanes in which a comparison gave 1.
fn lanes_that_hold(found: &LaneValues) -> u32 {
    found.iter().enumerate().fold(0, |mask, (lane, found)| mask | (*found as u32) << lane)
}

fn predicate(warp: &Warp, (Predicate(index), negated): PredicateSource) -> u32 {
    let value = warp.predicates[index as usize];
    if negated { !value } else { value }
}

impl Exec<'_, '_> {
    /// The number of the warp in the launch.
    pub fn warp_number(&self) -> u32 {
        let [x, y, z] = self.blocks[self.b].id;
        let [nx, ny, _] = self.run.launch.grid;
        (x + nx * (y + ny * z)) * self.run.warps_per_block + self.warp.index as u32
    }

    pub fn report(&mut self, kind: FindingKind, lane: usize, other: Option<Stamp>, message: impl FnOnce() -> String) {
        let at = (self.pc, self.warp_number(), lane);
        self.run.report(kind, at, other, message);
    }

    /// Notes the executed instruction for the comparison with another kernel.
    fn end_trace(&mut self) {
        if self.run.trace.is_none() {
            return;
        }
        let warp = self.warp_number();
        if let Some(trace) = &mut self.run.trace {
            trace.end(self.pc, warp);
        }
    }

    pub fn get(&self, source: ValueSource) -> LaneValues {
        *self.operand(source, &mut None)
    }

    /// An operand's values, where they are. `constant` holds those of a constant.
    fn operand<'s>(&'s self, source: ValueSource, constant: &'s mut Option<LaneValues>) -> &'s LaneValues {
        match source {
            ValueSource::Register(Register(index)) => {
                if self.warp.products.iter().any(|product| product.registers.contains(&index)) {
                    self.reads_pending.set(true);
                }
                if !self.warp.undefined.is_empty() {
                    self.note_undefined(index);
                }
                &self.warp.registers[index as usize]
            }
            // Of operands that an instruction does not have, too.
            ValueSource::Constant(0) => &ZEROS,
            ValueSource::Constant(value) => constant.insert([value; WARP_SIZE]),
            ValueSource::Variable(index, offset) => {
                constant.insert([self.run.variables[index as usize].wrapping_add_signed(offset); WARP_SIZE])
            }
        }
    }

    /// The value of the lowest lane, for operands that are the same in all lanes.
    pub fn uniform(&self, source: ValueSource) -> u64 {
        self.get(source)[self.mask.trailing_zeros() as usize]
    }

    pub fn predicate(&self, source: PredicateSource) -> u32 {
        if !self.warp.undefined_predicates.is_empty() {
            self.note_undefined_predicate(source);
        }
        predicate(self.warp, source)
    }

    pub fn set(&mut self, Register(index): Register, values: &LaneValues) {
        if !self.warp.undefined.is_empty() || self.undefined.get().lanes != 0 {
            self.define(index);
        }
        if let Some(trace) = &mut self.run.trace {
            lanes_of(self.mask).for_each(|lane| trace.add(values[lane]));
        }
        let register = &mut self.warp.registers[index as usize];
        if self.mask == u32::MAX {
            *register = *values;
        } else {
            for lane in lanes_of(self.mask) {
                register[lane] = values[lane];
            }
        }
    }

    pub fn set_predicate(&mut self, Predicate(index): Predicate, values: u32) {
        if !self.warp.undefined_predicates.is_empty() || self.undefined.get().lanes != 0 {
            self.define_predicate(index);
        }
        if let Some(trace) = &mut self.run.trace {
            trace.add(u64::from(values & self.mask));
        }
        let predicate = &mut self.warp.predicates[index as usize];
        *predicate = *predicate & !self.mask | values & self.mask;
    }

    fn compute(&self, compute: Compute, mode: ArithmeticMode, from: &[ValueSource; 3]) -> LaneValues {
        let mut constants = [None; 3];
        let [a, b, c] = constants.each_mut();
        let operands = [self.operand(from[0], a), self.operand(from[1], b), self.operand(from[2], c)];
        let mut result = [0; WARP_SIZE];
        compute(&operands, mode, &mut result);
        result
    }

    /// What [`Exec::compute`] gives of the operands' high halves.
    fn compute_high(&self, compute: Compute, mode: ArithmeticMode, from: &[ValueSource; 3]) -> LaneValues {
        let operands = from.map(|source| self.get(source).map(|value| value >> 16));
        let mut result = [0; WARP_SIZE];
        compute(&operands.each_ref(), mode, &mut result);
        result
    }

    fn execute(&mut self, instruction: &Instruction) -> Flow {
        match &instruction.op {
            Op::Nop | Op::Prefetch | Op::GridDependency => {}
            Op::Compute { compute, mode, to, from } => {
                let result = self.compute(*compute, *mode, from);
                if self.undefined.get().lanes != 0 && instruction.row.name() != "mov" {
                    self.undefined.set(self.undefined.get().computed());
                }
                self.set(*to, &result);
            }
            Op::Compare { compute, mode, from, is_pair, combine, with, to, negated_to } => {
                let found = lanes_that_hold(&self.compute(*compute, *mode, from));
                let second = if *is_pair { lanes_that_hold(&self.compute_high(*compute, *mode, from)) } else { !found };
                let with = with.map_or(0, |with| self.predicate(with));
                if let Some(to) = to {
                    self.set_predicate(*to, combine(found, with));
                }
                if let Some(to) = negated_to {
                    self.set_predicate(*to, combine(second, with));
                }
            }
            Op::CompareSet { compute, mode, from, is_pair, when_true, to } => {
                let mut values = self.compute(*compute, *mode, from).map(|found| found * when_true);
                if *is_pair {
                    let high = self.compute_high(*compute, *mode, from);
                    values.iter_mut().zip(high).for_each(|(value, found)| *value |= (found * when_true) << 16);
                }
                self.set(*to, &values);
            }
            Op::PredicateLogic { combine, to, a, b } => {
                let value = combine(self.predicate(*a), self.predicate(*b));
                self.set_predicate(*to, value);
            }
            Op::PredicateConstant { to, value } => self.set_predicate(*to, if *value { u32::MAX } else { 0 }),
            Op::Carry { .. }
            | Op::Select { .. }
            | Op::ReadSpecial { .. }
            | Op::Pack { .. }
            | Op::Unpack { .. }
            | Op::Window { .. }
            | Op::IsSpace { .. }
            | Op::MapShared { .. }
            | Op::GetRank { .. } => self.moves(&instruction.op),
            Op::Load { space, bytes, extend_to, to, address, order } => {
                self.load(*space, *bytes, *extend_to, to, *address, *order);
            }
            Op::Store { space, bytes, from, address, order } => self.store(*space, *bytes, from, *address, *order),
            Op::Atomic { space, bytes, update, to, address, operands, order } => {
                self.atomic(*space, *bytes, *update, to, *address, operands, *order);
            }
            Op::Fence { proxy_async } => self.fence(*proxy_async),
            Op::Branch { target } => return Flow::Jump(*target),
            Op::BranchIndexed { targets, index } => return self.branch_indexed(targets, *index),
            Op::Exit => return Flow::End,
            Op::Trap { is_assertion } => {
                let what = if *is_assertion { "an assertion fails" } else { "the kernel traps" };
                self.report(FindingKind::Trap, self.mask.trailing_zeros() as usize, None, || what.into());
            }
            Op::Barrier { .. } => return self.barrier(&instruction.op),
            Op::ClusterBarrier { arrives, waits } => return self.cluster_barrier(*arrives, *waits),
            Op::WarpBarrier { mask } => return self.warp_barrier(*mask),
            Op::Shuffle { mask, .. }
            | Op::Vote { mask, .. }
            | Op::Match { mask, .. }
            | Op::Reduce { mask, .. }
            | Op::Elect { mask, .. } => {
                if let Some(flow) = self.gather(*mask) {
                    return flow;
                }
                self.warp_operation(&instruction.op);
            }
            Op::ActiveMask { to } => {
                let active = u64::from(self.mask);
                self.set(*to, &[active; WARP_SIZE]);
            }
            Op::Mma { .. }
            | Op::LoadMatrix { .. }
            | Op::StoreMatrix { .. }
            | Op::MoveMatrix { .. }
            | Op::Wgmma { .. } => {
                if let Some(flow) = self.gather_all() {
                    return flow;
                }
                self.tensor_operation(&instruction.op);
            }
            Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => self.product_groups(&instruction.op),
            Op::CopyAsync { bytes, to, from, source_bytes, ignore } => {
                self.copy_async(*bytes, *to, *from, *source_bytes, *ignore);
            }
            Op::CopyAsyncCommit => self.commit_copies(),
            Op::CopyAsyncWait { pending } => self.wait_for_copies(*pending),
            Op::MbarrierTest { to, address, parity, phase, waits } => {
                return self.mbarrier_test(*to, *address, *parity, *phase, *waits);
            }
            Op::MbarrierInit { .. }
            | Op::MbarrierInvalidate { .. }
            | Op::MbarrierArrive { .. }
            | Op::MbarrierCompleteBytes { .. }
            | Op::CopyAsyncMbarrier { .. } => self.mbarrier(&instruction.op),
            Op::BulkToShared { .. }
            | Op::BulkFromShared { .. }
            | Op::TensorToShared { .. }
            | Op::TensorFromShared { .. } => {
                self.bulk_copy(&instruction.op);
            }
            Op::BulkCommit | Op::BulkWait { .. } => self.bulk_groups(&instruction.op),
        }
        Flow::Next
    }

    fn branch_indexed(&mut self, targets: &[u32], index: ValueSource) -> Flow {
        let indices = self.get(index);
        self.require_defined("the target of a branch");
        let current = self.warp.current.expect("a group is executing");
        self.warp.groups[current].pc += 1;
        // Each target takes its lanes out of the group, and the rest goes on.
        let mut left = self.mask;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            let same = lanes_of(left).filter(|other| indices[*other] == indices[lane]).fold(0, |mask, l| mask | 1 << l);
            left &= !same;
            match targets.get(indices[lane] as usize) {
                Some(target) => self.warp.split(same, *target),
                None => self.report(FindingKind::Trap, lane, None, || "an index beyond the list of labels".into()),
            }
        }
        Flow::Moved
    }
}
