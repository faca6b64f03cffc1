//! Paged attention.
//!
//! The softmax is computed online over tiles of [`TILE`] positions (more in `tiles`), and in partitions of
//! [`PARTITION`] positions that are merged in order. Both are counted from position 0 of the sequence. So the order of
//! a query's sums does not depend on the block size, on how the prompt was cut into chunks, on the other queries, or on
//! whether one member or several computed the partitions.
//!
//! A unit of work is one KV head with a tile of query rows. Each tile of K and V is read once through the block table
//! and used by all these rows and by all query heads of the group. A cache of bfloat16, int8 or int4 is multiplied as
//! it is where the processor has such products: with AVX-512 and AMX in `tiles`. Elsewhere a tile of integer codes is
//! widened to 16 bits (`kernel::shorts`), and all others to float32 (`kernel`).

mod code_groups;
mod codes_scratch;
mod groups;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod unit;

use super::isa::Isa;
use super::memory::{Buffer, PerMember, Shared};
use super::rows::ALONE_BELOW;
use super::team::Team;
use crate::BatchSeq;
pub(super) use groups::is_grouped;
use pagetide_base::error::StartError;
use std::cmp::Reverse;
use std::ops::Range;
pub(super) use unit::AttentionCall;
use unit::{AttentionUnit, PARTITION};

/// The partitions of a sequence may be spread over the team if it has at most this many new tokens.
const MAX_SPLIT_ROWS: usize = 8;
/// With this many units per member, units need not be split to keep all members busy.
const ENOUGH_UNITS_PER_MEMBER: usize = 4;
/// Tasks per member that the units are gathered into if there are more units.
const TASKS_PER_MEMBER: usize = 8;

/// Writes the K or V of one position to slot `slot` of a head's part of a block, which lies at `head`. The cache
/// [`is_grouped`]. `last` says that the slot is the last one written so far in a new group of slots.
///
/// # Safety
/// `isa` is available, and `row` is a whole head. `head` points to the head's part of a block. Nothing else uses the
/// slot now, nor, with `last`, the slots behind it in the group.
pub(super) unsafe fn write_grouped(isa: Isa, row: &[f32], value: bool, slot: usize, last: bool, head: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_dot_products_for(crate::DType::BF16) {
        // SAFETY: the caller's; the instructions were checked.
        return unsafe { tiles::write_row(row, value, slot, last, head) };
    }
    // Nothing behind the last slot is read in float32.
    let _ = (isa, last);
    // SAFETY: the caller's.
    unsafe { groups::write_row(row, value, slot, head) };
}

/// Scratch memory of all members and the list of work. It grows as needed and is reused in every layer and step.
pub(super) struct AttentionWorkspace {
    scratch: Vec<Buffer<f32>>,
    /// Indices of the batch's sequences, those with the most work first.
    order: Vec<u32>,
    units: Vec<AttentionUnit>,
    /// Ranges of units. One member computes a range in order, so that the next unit's blocks can be prefetched.
    tasks: Vec<Range<usize>>,
    /// `(unit, partition)` if partitions are computed separately.
    parts: Vec<(usize, usize)>,
    partials: Buffer<f32>,
}

impl AttentionWorkspace {
    pub fn new(num_members: usize) -> Result<Self, StartError> {
        let empty = || Buffer::zeroed(0, "attention scratch");
        Ok(Self {
            scratch: (0..num_members).map(|_| empty()).collect::<Result<_, _>>()?,
            order: Vec::new(),
            units: Vec::new(),
            tasks: Vec::new(),
            parts: Vec::new(),
            partials: empty()?,
        })
    }

    /// Computes the attention of all rows of the batch.
    pub fn run(&mut self, isa: Isa, team: &Team, call: &AttentionCall<'_>) {
        self.list_units(call, kernel::max_queries(isa, call));
        self.gather_tasks(call, team.num_members());
        let scratch_len = kernel::scratch_len(isa, call);
        for scratch in &mut self.scratch {
            grow(scratch, scratch_len);
        }
        let split = self.plan_split(call, team.num_members());
        let scratch = PerMember::new(&mut self.scratch);
        if split {
            let partials = Shared::new(self.partials.as_mut_ptr());
            team.for_each_member(self.parts.len(), |member, part| {
                let (unit, partition) = self.parts[part];
                let unit = &self.units[unit];
                let state_len = call.state_len(unit.num_rows * call.group());
                let offset = unit.partials + (partition - unit.first_partition) * state_len;
                // SAFETY: `plan_split` gave each partition of each unit its own place. The scratch memory is the
                // member's own.
                unsafe {
                    let state = partials.get().add(offset);
                    kernel::partition(isa, call, unit, partition, scratch.of(member), state);
                }
            });
            team.for_each_member(self.units.len(), |member, unit| {
                let unit = &self.units[unit];
                // SAFETY: as above; the states are complete, and no two units share rows and heads of the output.
                unsafe { kernel::merge_partials(isa, call, unit, partials.get(), scratch.of(member)) };
            });
        } else {
            let products = |unit: &AttentionUnit| unit.num_rows * call.group() * unit.any_visible(call.shape.window).1;
            let products: usize = self.units.iter().map(products).sum();
            let compute = |member: usize, task: usize| {
                let units = &self.units[self.tasks[task].clone()];
                // SAFETY: the scratch memory is the member's own, and no two units share rows and heads of the output.
                unsafe { kernel::units(isa, call, units, scratch.of(member)) };
            };
            if products * call.padded_dim() < 16 * ALONE_BELOW {
                (0..self.tasks.len()).for_each(|task| compute(0, task));
            } else {
                team.for_each_member(self.tasks.len(), compute);
            }
        }
    }

    /// Lists all units of the batch. Long ones come first, so that no member starts a long one when the others are
    /// already done.
    fn list_units(&mut self, call: &AttentionCall<'_>, max_queries: usize) {
        let rows_per_unit = (max_queries / call.group()).max(1);
        let seqs = &call.batch.seqs;
        self.order.clear();
        self.order.extend(0..seqs.len() as u32);
        let last_unit = |seq: &BatchSeq| seq.num_rows.min(rows_per_unit) * (seq.num_computed + seq.num_rows);
        self.order.sort_unstable_by_key(|index| Reverse((last_unit(&seqs[*index as usize]), *index)));
        self.units.clear();
        for seq in self.order.iter().map(|index| &seqs[*index as usize]) {
            for first_row in (0..seq.num_rows).step_by(rows_per_unit).rev() {
                let num_rows = rows_per_unit.min(seq.num_rows - first_row);
                for kv_head in 0..call.shape.num_kv_heads {
                    let mut unit = AttentionUnit {
                        seq: *seq,
                        kv_head,
                        first_row,
                        num_rows,
                        first_partition: 0,
                        num_partitions: 0,
                        partials: 0,
                    };
                    let (from, to) = unit.any_visible(call.shape.window);
                    unit.first_partition = from / PARTITION;
                    unit.num_partitions = to.div_ceil(PARTITION) - unit.first_partition;
                    self.units.push(unit);
                }
            }
        }
    }

    /// Gathers small units into tasks.
    fn gather_tasks(&mut self, call: &AttentionCall<'_>, num_members: usize) {
        let total: usize = self.units.iter().map(|unit| call.work(unit)).sum();
        let enough = total / (TASKS_PER_MEMBER * num_members);
        self.tasks.clear();
        let (mut first, mut work) = (0, 0);
        for (index, unit) in self.units.iter().enumerate() {
            work += call.work(unit);
            if work > enough || index + 1 == self.units.len() {
                self.tasks.push(first..index + 1);
                (first, work) = (index + 1, 0);
            }
        }
    }

    /// If there are few long units, lists their partitions as separate parts and returns true. The results are the same
    /// either way.
    fn plan_split(&mut self, call: &AttentionCall<'_>, num_members: usize) -> bool {
        let worthwhile = num_members > 1
            && self.units.len() < ENOUGH_UNITS_PER_MEMBER * num_members
            && self.units.iter().all(|unit| unit.seq.num_rows <= MAX_SPLIT_ROWS)
            && self.units.iter().any(|unit| unit.num_partitions > 1);
        if !worthwhile {
            return false;
        }
        self.parts.clear();
        let mut len = 0;
        for (index, unit) in self.units.iter_mut().enumerate() {
            unit.partials = len;
            len += unit.num_partitions * call.state_len(unit.num_rows * call.group());
            let partitions = unit.first_partition..unit.first_partition + unit.num_partitions;
            self.parts.extend(partitions.map(|partition| (index, partition)));
        }
        grow(&mut self.partials, len);
        true
    }
}

fn grow(buffer: &mut Buffer<f32>, len: usize) {
    if buffer.len() < len {
        *buffer = Buffer::zeroed(len, "attention scratch").unwrap_or_else(|error| panic!("{error}"));
    }
}
