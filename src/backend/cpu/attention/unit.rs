//! A call of attention, and the units of work that it is split into.

use super::super::memory::{CpuKvPools, Shared};
use super::super::simd::LANES;
use crate::{AttentionShape, Batch, BatchSeq, CodeType, KvDType};

/// Positions per step of the online softmax.
pub(super) const TILE: usize = 2 * LANES;

/// Positions per independent softmax; a multiple of [`TILE`].
pub(super) const PARTITION: usize = 1024;

/// Query rows `first_row .. first_row + num_rows` of a sequence, counted from the sequence's first row, for one KV
/// head.
#[derive(Clone, Copy)]
pub(super) struct AttentionUnit {
    pub seq: BatchSeq,
    pub kv_head: usize,
    pub first_row: usize,
    pub num_rows: usize,
    /// The partitions that have a visible position.
    pub first_partition: usize,
    pub num_partitions: usize,
    /// The offset of its partitions' states in the partials, if they are computed separately.
    pub partials: usize,
}

impl AttentionUnit {
    /// Positions `.0 .. .1` that the row sees.
    pub(super) fn visible(&self, row: usize, window: Option<usize>) -> (usize, usize) {
        let end = self.seq.num_computed + self.first_row + row + 1;
        (window.map_or(0, |window| end.saturating_sub(window)), end)
    }

    /// Positions `.0 .. .1` that at least one of its rows sees.
    pub(super) fn any_visible(&self, window: Option<usize>) -> (usize, usize) {
        (self.visible(0, window).0, self.visible(self.num_rows - 1, window).1)
    }
}

/// The inputs and the output of one call.
#[derive(Clone, Copy)]
pub(in super::super) struct AttentionCall<'a> {
    pub batch: &'a Batch,
    pub kv: &'a CpuKvPools,
    pub layer: usize,
    pub shape: AttentionShape,
    /// `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`
    pub qkv: &'a [f32],
    /// `[rows, num_heads * head_dim]`
    pub out: Shared<f32>,
}

impl AttentionCall<'_> {
    pub(super) fn group(&self) -> usize {
        self.shape.num_heads / self.shape.num_kv_heads
    }

    /// Whether K and V in the cache are rotated (see [`rotation`](crate::cpu::rotation)).
    pub(super) fn is_rotated(&self) -> bool {
        self.kv.layout.dtype == KvDType::Codes(CodeType::Int4)
    }

    /// Head size, rounded up to whole vectors.
    pub(super) fn padded_dim(&self) -> usize {
        self.shape.head_dim.next_multiple_of(LANES)
    }

    /// Floats of the state of one partition of a unit with `num_queries` queries: for each query, rounded up to whole
    /// vectors of queries, the head size in whole vectors of bfloat16, a vector of sums, and a maximum.
    pub(super) fn state_len(&self, num_queries: usize) -> usize {
        num_queries.next_multiple_of(LANES) * (self.shape.head_dim.next_multiple_of(2 * LANES) + LANES + 1)
    }

    /// An estimate of how long a unit takes, in arbitrary units: positions are read and laid out once and then used by
    /// each sixteen queries.
    pub(super) fn work(&self, unit: &AttentionUnit) -> usize {
        let (from, to) = unit.any_visible(self.shape.window);
        (to - from + TILE) * ((unit.num_rows * self.group()).div_ceil(LANES) + 2)
    }
}

/// The part of a unit to compute.
#[derive(Clone, Copy)]
pub(super) enum UnitPart {
    /// The state of one partition, to be written to this address.
    Partition(usize, *mut f32),
    /// All partitions, and the output.
    Whole,
    /// The output from the partitions' states at this address.
    Merge(*const f32),
}
