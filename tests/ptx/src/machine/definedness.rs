//! Values that depend on bytes of global memory which nothing wrote.
//!
//! Loading such bytes and copying them is no error: a kernel may copy a whole block of which a part is filled, or
//! compute what it then drops. Using them is one, as in Valgrind's memcheck (Seward and Nethercote 2005): as an
//! address, for a decision, or, with `GpuOptions::check_results`, in a computation whose result goes to global memory.
//! Every register has the lanes whose value is undefined, and each instruction passes them on to its results.

use super::access::AccessTarget;
use super::lanes_of;
use super::step::Exec;
use crate::findings::FindingKind;
use crate::program::{LaneValues, PredicateSource, ValueSource, WARP_SIZE};
use crate::races::{AccessKind, Stamp};
use crate::syntax::{Predicate, Register};

/// The lanes in which a register's value is undefined.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UndefinedLanes {
    pub lanes: u32,
    /// Which of the register's bytes are undefined in these lanes: copies of halves and bytes are told apart.
    pub bytes: [u8; WARP_SIZE],
    /// The instruction that loaded what was never written.
    pub origin: u32,
    /// Whether it went through a computation since it was loaded.
    pub is_computed: bool,
}

impl UndefinedLanes {
    fn join(self, other: Self) -> Self {
        let (first, second) = if self.lanes != 0 { (self, other) } else { (other, self) };
        let is_computed = first.is_computed || second.lanes != 0 && second.is_computed;
        let mut bytes = first.bytes;
        for lane in lanes_of(second.lanes) {
            bytes[lane] = second.bytes[lane] | if first.lanes >> lane & 1 == 1 { bytes[lane] } else { 0 };
        }
        Self { lanes: first.lanes | second.lanes, bytes, origin: first.origin, is_computed }
    }

    pub fn with_lanes(self, lanes: u32) -> Self {
        Self { lanes, ..self }
    }

    /// All bytes of the lanes' values are undefined.
    pub fn whole(self) -> Self {
        Self { bytes: [0xff; WARP_SIZE], ..self }
    }

    pub fn computed(self) -> Self {
        Self { is_computed: true, ..self.whole() }
    }

    fn overwrite(&mut self, mask: u32, new: Self) {
        let kept = self.with_lanes(self.lanes & !mask);
        *self = new.with_lanes(new.lanes & mask).join(kept);
    }
}

impl Exec<'_, '_> {
    /// Notes that the instruction reads a register with undefined lanes. Those of lanes that do not take part may be
    /// left from another variable, which had the register before.
    pub(super) fn note_undefined(&self, register: u32) {
        if let Some(undefined) = self.warp.undefined.get(&register) {
            let undefined = undefined.with_lanes(undefined.lanes & self.mask);
            self.undefined.set(self.undefined.get().join(undefined));
        }
    }

    pub(super) fn note_undefined_predicate(&self, (Predicate(index), _): PredicateSource) {
        if let Some(undefined) = self.warp.undefined_predicates.get(&index) {
            self.undefined.set(self.undefined.get().join(*undefined));
        }
    }

    /// The undefined lanes of one operand.
    pub(super) fn undefined_of(&self, source: ValueSource) -> UndefinedLanes {
        match source {
            ValueSource::Register(Register(index)) => self.warp.undefined.get(&index).copied().unwrap_or_default(),
            _ => UndefinedLanes::default(),
        }
    }

    /// The register that is written gets the undefined lanes of what the instruction has read.
    pub(super) fn define(&mut self, register: u32) {
        let known = self.warp.undefined.entry(register).or_default();
        known.overwrite(self.mask, self.undefined.get());
        if known.lanes == 0 {
            self.warp.undefined.remove(&register);
        }
    }

    pub(super) fn define_predicate(&mut self, predicate: u32) {
        let known = self.warp.undefined_predicates.entry(predicate).or_default();
        known.overwrite(self.mask, self.undefined.get());
        if known.lanes == 0 {
            self.warp.undefined_predicates.remove(&predicate);
        }
    }

    /// Reports a guard whose value is undefined in one of the lanes.
    pub(super) fn check_guard(&mut self, guard: PredicateSource, lanes: u32) {
        self.note_undefined_predicate(guard);
        let undefined = self.undefined.take();
        // The lane may be one that the guard excludes.
        let mask = std::mem::replace(&mut self.mask, lanes);
        self.report_undefined(undefined, "a decision");
        self.mask = mask;
    }

    /// Reports if what the instruction has read so far is undefined in a lane that takes part. What it reads from now
    /// on is noted anew.
    pub(super) fn require_defined(&mut self, what: &str) {
        let undefined = self.undefined.take();
        self.report_undefined(undefined, what);
    }

    pub(super) fn report_undefined(&mut self, undefined: UndefinedLanes, what: &str) {
        let lanes = undefined.lanes & self.mask;
        if lanes != 0 {
            let lane = lanes.trailing_zeros() as usize;
            let origin = Stamp::new(self.warp_number(), lane, 0, undefined.origin, AccessKind::Ordinary);
            self.report(FindingKind::Uninitialized, lane, Some(origin), || {
                format!("{what} depends on global memory that was never written")
            });
        }
    }

    /// Which of up to 64 bytes have an undefined value. Bytes of shared memory that nothing wrote are another matter:
    /// their reads are reported.
    pub(super) fn undefined_bytes(&self, target: AccessTarget, bytes: usize) -> u64 {
        if self.warp.knowledge.is_none() {
            return 0;
        }
        match target {
            AccessTarget::Shared { block, offset } => match &self.blocks[block].shared_undefined {
                Some(undefined) => undefined.within(offset, bytes),
                None => 0,
            },
            AccessTarget::Global(spot) => self.run.memory.unwritten(spot, bytes),
            AccessTarget::Local(_) | AccessTarget::Param(_) => 0,
        }
    }

    /// Whether undefined bytes of a place may come from a computation.
    pub(super) fn holds_computed(&self, target: AccessTarget) -> bool {
        matches!(target, AccessTarget::Shared { block, .. } if self.blocks[block].has_computed_undefined)
    }

    /// Bytes that were just written have an undefined value.
    pub(super) fn put_undefined(&mut self, target: AccessTarget, bytes: std::ops::Range<usize>, is_computed: bool) {
        match target {
            AccessTarget::Shared { block, offset } => {
                let block = &mut self.blocks[block];
                let size = block.shared.len();
                let undefined = block.shared_undefined.get_or_insert_with(|| crate::memory::ByteSet::new(size));
                undefined.insert(offset + bytes.start, bytes.len());
                block.has_computed_undefined |= is_computed;
            }
            AccessTarget::Global(spot) => self.run.memory.forget(spot, bytes),
            AccessTarget::Local(_) | AccessTarget::Param(_) => {}
        }
    }

    /// The undefined lanes of an `mma`'s results: an undefined element of A makes its row undefined, one of B its
    /// column, and one of C itself.
    pub(super) fn undefined_products(
        &self,
        [a, b, c]: [&[ValueSource]; 3],
        num_results: usize,
        bits_of_result: u32,
    ) -> Vec<UndefinedLanes> {
        let mut joined = UndefinedLanes::default();
        let mut of = |source: &ValueSource| {
            let undefined = self.undefined_of(*source);
            joined = joined.join(undefined);
            undefined.lanes
        };
        // Rows of A: g + 8 (i % 2) in register i; columns of B: g.
        let (mut rows, mut columns) = ([0_u32; 2], 0_u32);
        for (i, source) in a.iter().enumerate() {
            rows[i % 2] |= quads(of(source));
        }
        b.iter().for_each(|source| columns |= quads(of(source)));
        let own: Vec<u32> = c.iter().map(&mut of).collect();
        let is_quad_undefined = |g: usize| columns >> (4 * g) & 1 == 1;
        (0..num_results)
            .map(|i| {
                let mut lanes = own.get(i).copied().unwrap_or(0);
                lanes |= rows[if bits_of_result == 32 { i / 2 % 2 } else { i % 2 }];
                for lane in 0..32 {
                    let t = lane % 4;
                    let undefined = match bits_of_result {
                        32 => is_quad_undefined(2 * t + i % 2),
                        _ => is_quad_undefined(2 * t) || is_quad_undefined(2 * t + 1),
                    };
                    lanes |= u32::from(undefined) << lane;
                }
                joined.computed().with_lanes(lanes)
            })
            .collect()
    }

    /// The instruction moves bytes of what it has read to other places.
    pub(super) fn mix_undefined(&self) {
        if self.undefined.get().lanes != 0 {
            self.undefined.set(self.undefined.get().whole());
        }
    }

    /// Writes registers of which each has its own undefined lanes.
    pub(super) fn set_with(&mut self, register: Register, values: &LaneValues, undefined: UndefinedLanes) {
        self.undefined.set(undefined);
        self.set(register, values);
    }
}

/// All lanes of each group of four in which a lane is set.
pub(super) fn quads(lanes: u32) -> u32 {
    let any = (lanes | lanes >> 1 | lanes >> 2 | lanes >> 3) & 0x1111_1111;
    any * 15
}
