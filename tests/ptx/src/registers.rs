//! Registers of a decoded kernel.
//!
//! Compilers write PTX with a virtual register for nearly every result: thousands in a kernel of a few hundred lines.
//! Here registers whose values are never needed at the same time share one, so that those of a warp stay in the
//! processor's cache. This is linear scan (Poletto and Sarkar 1999), with live ranges from the graph of basic blocks.
//! Each lane has its own flow of control, and a range that holds for every flow holds for diverged lanes too.

use crate::program::{Address, Instruction, Op, ValueSource};
use crate::syntax::Register;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// How an instruction uses a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RegisterUse {
    Read,
    Write,
    /// Read and written until a later instruction waits for it.
    InFlight,
}

/// Gives registers new numbers, and returns how many there are. A register that may be read before it is written has
/// its number for itself until then, so that it still holds zeros.
pub fn allocate(code: &mut [Instruction], num_registers: u32) -> u32 {
    let ranges = live_ranges(code, num_registers);
    let mut by_start: Vec<(usize, Range<usize>)> =
        ranges.into_iter().enumerate().filter_map(|(register, range)| Some((register, range?))).collect();
    by_start.sort_by_key(|(_, range)| range.start);
    let mut numbers = vec![0; num_registers as usize];
    let (mut taken, mut free, mut count) = (BinaryHeap::new(), Vec::new(), 0);
    for (register, range) in by_start {
        while let Some(Reverse((end, number))) = taken.peek().copied()
            && end <= range.start
        {
            taken.pop();
            free.push(number);
        }
        let number = free.pop().unwrap_or_else(|| {
            count += 1;
            count - 1
        });
        numbers[register] = number;
        taken.push(Reverse((range.end, number)));
    }
    for instruction in code {
        instruction.op.for_each_register(&mut |Register(register), _| *register = numbers[*register as usize]);
    }
    count
}

/// For each register the instructions from the first to the last at which its value may be needed. `None`:
/// no instruction names it.
fn live_ranges(code: &mut [Instruction], num_registers: u32) -> Vec<Option<Range<usize>>> {
    let blocks = basic_blocks(code);
    let mut ranges = vec![None; num_registers as usize];
    // The blocks that may read a register before they write it, and those that always write it, in order.
    let mut reading = vec![Vec::new(); num_registers as usize];
    let mut writing = vec![Vec::new(); num_registers as usize];
    let length = code.len();
    for (index, block) in blocks.iter().enumerate() {
        for place in block.range.clone() {
            let Instruction { op, guard, .. } = &mut code[place];
            op.for_each_register(&mut |&mut Register(register), kind| {
                let (register, is_write) = (register as usize, kind == RegisterUse::Write);
                extend(&mut ranges[register], place..place + 1);
                let is_written = writing[register].last() == Some(&index);
                if is_write && guard.is_none() && !is_written {
                    writing[register].push(index);
                } else if !is_written && reading[register].last() != Some(&index) {
                    reading[register].push(index);
                }
                if kind == RegisterUse::InFlight {
                    extend(&mut ranges[register], 0..length);
                }
            });
        }
    }
    // Backwards from each block that reads, to those that write.
    let mut live_for = vec![u32::MAX; blocks.len()];
    for register in 0..num_registers {
        let (range, mut waiting) = (&mut ranges[register as usize], std::mem::take(&mut reading[register as usize]));
        while let Some(index) = waiting.pop() {
            if std::mem::replace(&mut live_for[index], register) == register {
                continue;
            }
            let start = blocks[index].range.start;
            extend(range, start..start + 1);
            for &before in &blocks[index].before {
                let end = blocks[before].range.end;
                extend(range, end - 1..end);
                if writing[register as usize].binary_search(&before).is_err() {
                    waiting.push(before);
                }
            }
        }
    }
    ranges
}

fn extend(range: &mut Option<Range<usize>>, by: Range<usize>) {
    *range = Some(range.take().map_or(by.clone(), |range| range.start.min(by.start)..range.end.max(by.end)));
}

/// Instructions that run one after the other.
struct BasicBlock {
    range: Range<usize>,
    /// The blocks that may run just before it.
    before: Vec<usize>,
}

fn basic_blocks(code: &[Instruction]) -> Vec<BasicBlock> {
    let mut starts = vec![0];
    for (place, instruction) in code.iter().enumerate() {
        let targets = branch_targets(&instruction.op);
        if !targets.is_empty() || matches!(instruction.op, Op::Exit) {
            starts.push(place + 1);
            starts.extend(targets.iter().map(|&target| target as usize));
        }
    }
    starts.sort_unstable();
    starts.dedup();
    starts.retain(|&start| start < code.len());
    let ends = starts.iter().skip(1).copied().chain([code.len()]);
    let mut blocks: Vec<BasicBlock> =
        starts.iter().zip(ends).map(|(&start, end)| BasicBlock { range: start..end, before: Vec::new() }).collect();
    for index in 0..blocks.len() {
        let last = &code[blocks[index].range.end - 1];
        for &target in branch_targets(&last.op) {
            if let Ok(target) = starts.binary_search(&(target as usize)) {
                blocks[target].before.push(index);
            }
        }
        let goes_on =
            last.guard.is_some() || !matches!(last.op, Op::Branch { .. } | Op::BranchIndexed { .. } | Op::Exit);
        if goes_on && index + 1 < blocks.len() {
            blocks[index + 1].before.push(index);
        }
    }
    blocks
}

fn branch_targets(op: &Op) -> &[u32] {
    match op {
        Op::Branch { target } => std::slice::from_ref(target),
        Op::BranchIndexed { targets, .. } => targets,
        _ => &[],
    }
}

/// Calls a function with the registers of an instruction.
struct RegisterVisitor<'a>(&'a mut dyn FnMut(&mut Register, RegisterUse));

impl RegisterVisitor<'_> {
    fn writes<'r>(&mut self, registers: impl IntoIterator<Item = &'r mut Register>) {
        registers.into_iter().for_each(|register| (self.0)(register, RegisterUse::Write));
    }

    fn reads<'s>(&mut self, sources: impl IntoIterator<Item = &'s mut ValueSource>) {
        for source in sources {
            if let ValueSource::Register(register) = source {
                (self.0)(register, RegisterUse::Read);
            }
        }
    }

    fn addresses<const N: usize>(&mut self, addresses: [&mut Address; N]) {
        self.reads(addresses.map(|address| &mut address.base));
    }
}

impl Op {
    /// Calls `visit` with the registers that the instruction reads, then with those that it writes.
    fn for_each_register(&mut self, visit: &mut dyn FnMut(&mut Register, RegisterUse)) {
        let mut visitor = RegisterVisitor(visit);
        match self {
            Op::Nop
            | Op::PredicateLogic { .. }
            | Op::PredicateConstant { .. }
            | Op::Prefetch
            | Op::Branch { .. }
            | Op::Exit
            | Op::Trap { .. }
            | Op::ClusterBarrier { .. }
            | Op::Fence { .. }
            | Op::CopyAsyncCommit
            | Op::CopyAsyncWait { .. }
            | Op::BulkCommit
            | Op::BulkWait { .. }
            | Op::WgmmaFence
            | Op::WgmmaCommit
            | Op::WgmmaWait { .. }
            | Op::GridDependency => {}
            Op::Compute { to, from, .. } | Op::Carry { to, from, .. } | Op::CompareSet { to, from, .. } => {
                visitor.reads(from);
                visitor.writes([to]);
            }
            Op::Compare { from, .. } => visitor.reads(from),
            Op::Select { to, when_true, when_false, by: _ } => {
                visitor.reads([when_true, when_false]);
                visitor.writes([to]);
            }
            Op::ReadSpecial { to, special: _ } | Op::ActiveMask { to } => visitor.writes([to]),
            Op::Pack { to, from, bits: _ } => {
                visitor.reads(from);
                visitor.writes([to]);
            }
            Op::Unpack { to, from, bits: _ } => {
                visitor.reads([from]);
                visitor.writes(to.iter_mut().flatten());
            }
            Op::Window { to, from, .. } | Op::GetRank { to, from, generic: _ } | Op::MoveMatrix { to, from } => {
                visitor.reads([from]);
                visitor.writes([to]);
            }
            Op::IsSpace { from, .. } => visitor.reads([from]),
            Op::MapShared { to, from, rank, generic: _ } => {
                visitor.reads([from, rank]);
                visitor.writes([to]);
            }
            Op::Load { to, address, .. } => {
                visitor.addresses([address]);
                visitor.writes(to.iter_mut().flatten());
            }
            Op::Store { from, address, .. } | Op::StoreMatrix { from, address, .. } => {
                visitor.reads(from);
                visitor.addresses([address]);
            }
            Op::Atomic { to, address, operands, .. } => {
                visitor.addresses([address]);
                visitor.reads(operands.as_flattened_mut());
                visitor.writes(to.iter_mut().flatten());
            }
            Op::BranchIndexed { targets: _, index } => visitor.reads([index]),
            Op::Barrier { id, threads, to, .. } => {
                visitor.reads([id].into_iter().chain(threads));
                visitor.writes(to);
            }
            Op::WarpBarrier { mask } => visitor.reads([mask]),
            Op::Shuffle { to, from, lane, clamp, mask, .. } => {
                visitor.reads([from, lane, clamp, mask]);
                visitor.writes([to]);
            }
            Op::Vote { to, mask, .. } | Op::Elect { to, mask, .. } => {
                visitor.reads([mask]);
                visitor.writes(to);
            }
            Op::Match { to, from, mask, .. } | Op::Reduce { to, from, mask, .. } => {
                visitor.reads([from, mask]);
                visitor.writes([to]);
            }
            Op::Mma { to, a, b, c, shape: _ } => {
                visitor.reads(a.iter_mut().chain(b).chain(c));
                visitor.writes(to.iter_mut().flatten());
            }
            Op::LoadMatrix { to, address, .. } => {
                visitor.addresses([address]);
                visitor.writes(to);
            }
            Op::CopyAsync { to, from, source_bytes, .. } => {
                visitor.addresses([to, from]);
                visitor.reads(source_bytes);
            }
            Op::CopyAsyncMbarrier { address, .. } | Op::MbarrierInvalidate { address } => visitor.addresses([address]),
            Op::MbarrierInit { address, count: value }
            | Op::MbarrierCompleteBytes { address, bytes: value, .. }
            | Op::MbarrierTest { address, phase: value, .. } => {
                visitor.addresses([address]);
                visitor.reads([value]);
            }
            Op::MbarrierArrive { address, count, expected_bytes, state, .. } => {
                visitor.addresses([address]);
                visitor.reads([count].into_iter().chain(expected_bytes));
                visitor.writes(state);
            }
            Op::BulkToShared { to, from, bytes, mbarrier, multicast, .. } => {
                visitor.addresses([to, from, mbarrier]);
                visitor.reads([bytes].into_iter().chain(multicast));
            }
            Op::BulkFromShared { to, from, bytes, reduce: _ } => {
                visitor.addresses([to, from]);
                visitor.reads([bytes]);
            }
            Op::TensorToShared { to, map, at, mbarrier, multicast, .. } => {
                visitor.addresses([to, map, mbarrier]);
                visitor.reads(at.iter_mut().chain(multicast));
            }
            Op::TensorFromShared { map, at, from, .. } => {
                visitor.addresses([map, from]);
                visitor.reads(at);
            }
            Op::Wgmma { to, a, b, .. } => {
                visitor.reads(a.iter_mut().chain([b]));
                to.iter_mut().for_each(|register| (visitor.0)(register, RegisterUse::InFlight));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::allocate;
    use crate::lanes::lanes;
    use crate::program::{Instruction, MmaShape, Op, PredicateSourceOrConstant, ValueSource};
    use crate::syntax::{Predicate, Register};
    use crate::table;
    use crate::types::ScalarType;
    use std::collections::HashMap;

    fn instruction(op: Op, is_guarded: bool) -> Instruction {
        let (row, _) = table::find("add.u32").expect("the table has it");
        let guard = is_guarded.then_some((Predicate(0), false));
        Instruction { op, guard, row, source: Default::default(), text_line: 0 }
    }

    fn add(to: u32, a: u32, b: u32) -> Op {
        let compute = lanes!(u32, |a, b, c, mode| a + b);
        let from = [ValueSource::Register(Register(a)), ValueSource::Register(Register(b)), ValueSource::Constant(0)];
        Op::Compute { compute, mode: Default::default(), to: Register(to), from }
    }

    fn registers_of(instruction: &Instruction) -> (Vec<u32>, Option<u32>) {
        match &instruction.op {
            Op::Compute { to, from, .. } => {
                let register = |source: &ValueSource| match source {
                    ValueSource::Register(Register(number)) => Some(*number),
                    _ => None,
                };
                (from.iter().filter_map(register).collect(), Some(to.0))
            }
            _ => (Vec::new(), None),
        }
    }

    #[test]
    fn results_that_are_needed_once_share_registers() {
        let mut code: Vec<_> = (1..1000).map(|i| instruction(add(i, i - 1, i - 1), false)).collect();
        assert_eq!(allocate(&mut code, 1000), 2);
    }

    /// `wgmma` writes its results until a later instruction waits, even if none reads them.
    #[test]
    fn results_in_flight_are_not_shared() {
        let (half, float) = (ScalarType::F16, ScalarType::F32);
        let shape = MmaShape { m: 64, n: 8, k: 16, a: half, b: half, c: float, d: float, saturate: false };
        let product = Op::Wgmma {
            shape,
            to: (0..4).map(Register).collect(),
            a: [ValueSource::Constant(0)].into(),
            b: ValueSource::Constant(0),
            accumulates: PredicateSourceOrConstant::Constant(false),
            negate: [false; 2],
            transposed: [false; 2],
        };
        let mut code = vec![instruction(product, false)];
        code.extend((5..100).map(|i| instruction(add(i, i - 1, i - 1), false)));
        code.push(instruction(Op::WgmmaWait { pending: 0 }, false));
        assert_eq!(allocate(&mut code, 100), 4 + 2);
        let Op::Wgmma { to, .. } = &code[0].op else { unreachable!("it is the first instruction") };
        let is_shared = |instruction| registers_of(instruction).1.is_some_and(|number| to.contains(&Register(number)));
        assert!(!code.iter().any(is_shared));
    }

    /// Random instructions and branches. Along random flows, each read of a register finds what was last written to the
    /// variable, and zeros if nothing was.
    #[test]
    fn every_read_finds_its_variable() {
        let mut state = 1_u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let (mut before, mut after) = (0, 0);
        for _ in 0..300 {
            let (length, num_registers) = (5 + random(60), 3 + random(30) as u32);
            let mut code: Vec<_> = (0..length)
                .map(|place| {
                    let mut register = || random(num_registers as usize) as u32;
                    let op = add(register(), register(), register());
                    match random(12) {
                        _ if place + 1 == length => instruction(Op::Exit, false),
                        0 => instruction(Op::Branch { target: random(length) as u32 }, random(4) > 0),
                        1 => {
                            let targets = (0..3).map(|_| random(length) as u32).collect();
                            instruction(Op::BranchIndexed { targets, index: ValueSource::Constant(0) }, random(4) > 0)
                        }
                        _ => instruction(op, random(4) == 0),
                    }
                })
                .collect();
            let virtual_code = code.clone();
            before += num_registers;
            after += allocate(&mut code, num_registers);
            for _ in 0..20 {
                let (mut variables, mut registers) = (HashMap::new(), HashMap::new());
                let mut place = 0;
                for step in 1..300 {
                    let (reads, to) = registers_of(&virtual_code[place]);
                    let (registers_read, register) = registers_of(&code[place]);
                    for (variable, number) in reads.iter().zip(&registers_read) {
                        assert_eq!(variables.get(variable), registers.get(number), "{virtual_code:?}");
                    }
                    let executes = code[place].guard.is_none() || random(2) == 0;
                    let mut next = place + 1;
                    match &code[place].op {
                        Op::Exit => break,
                        Op::Branch { target } if executes => next = *target as usize,
                        Op::BranchIndexed { targets, .. } if executes => next = targets[random(3)] as usize,
                        _ if executes => {
                            variables.extend(to.map(|to| (to, step)));
                            registers.extend(register.map(|register| (register, step)));
                        }
                        _ => {}
                    }
                    place = next;
                }
            }
        }
        assert!(after * 10 < before * 9, "{after} registers for {before} variables");
    }
}
