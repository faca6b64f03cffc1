//! The arithmetic of attention, written once over [`Simd`].

// Indices name registers here. The loops over them are unrolled, and iterators would hide which register is which.
#![allow(clippy::needless_range_loop)]

mod codes;
mod elements;
mod plain;
mod shorts;

use super::super::isa::Isa;
use super::super::rotation::rotate;
use super::super::simd::{LANES, Simd, SimdKernel};
use super::codes_scratch::CodesScratch;
#[cfg(target_arch = "x86_64")]
use super::tiles;
use super::unit::{AttentionCall, AttentionUnit, PARTITION, TILE, UnitPart};
use crate::KvDType;
use elements::ShortCodes;

/// [`max_queries`] in float32.
const MAX_QUERIES: usize = 64;

/// Softmax of a unit's queries over some positions: running maximum, sum, and weighted sum of V.
#[derive(Clone, Copy)]
struct SoftmaxState {
    /// `[num_queries]` largest score.
    max: *mut f32,
    /// `[num_queries]` sum of `exp(score - max)`. It is 0 if no position was visible.
    sum: *mut f32,
    /// `[num_queries, padded_dim]`
    acc: *mut f32,
}

impl SoftmaxState {
    /// # Safety
    /// `at` points to `call.state_len(…)` floats for the unit's queries.
    unsafe fn at(at: *mut f32, call: &AttentionCall<'_>, unit: &AttentionUnit) -> Self {
        let n = unit.num_rows * call.group();
        // SAFETY: the caller's promise.
        unsafe { Self { max: at, sum: at.add(n), acc: at.add(2 * n) } }
    }
}

/// The parts of a member's scratch memory.
#[derive(Clone, Copy)]
struct VectorScratch {
    /// `[padded_dim][TILE]`: K of a tile, transposed.
    keys: *mut f32,
    /// `[TILE][padded_dim]`
    values: *mut f32,
    /// `[max_queries][TILE]`: `exp(score - max)`.
    weights: *mut f32,
    /// `[max_queries]`: the factor of a tile on the sums so far.
    factors: *mut f32,
    partition: *mut f32,
    total: *mut f32,
    codes: CodesScratch,
}

/// The most queries (rows times heads of a group) of one unit of work. A unit has more only if a single group has more.
pub(super) fn max_queries(isa: Isa, call: &AttentionCall<'_>) -> usize {
    #[cfg(target_arch = "x86_64")]
    if tiles::can_run(isa, call) {
        return tiles::MAX_QUERIES;
    }
    let _ = (isa, call);
    MAX_QUERIES
}

/// Floats of scratch memory that a member needs.
pub(super) fn scratch_len(isa: Isa, call: &AttentionCall<'_>) -> usize {
    #[cfg(target_arch = "x86_64")]
    if tiles::can_run(isa, call) {
        return tiles::scratch_len(call);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = isa;
    let (dim, queries) = (call.padded_dim(), MAX_QUERIES.max(call.group()));
    let codes = CodesScratch::len(call, queries);
    2 * dim * TILE + queries * (TILE + 1) + 2 * call.state_len(queries) + codes + 4 * LANES
}

impl VectorScratch {
    /// # Safety
    /// `at` points to `scratch_len(…)` floats.
    unsafe fn at(at: *mut f32, call: &AttentionCall<'_>) -> Self {
        let (dim, queries) = (call.padded_dim(), MAX_QUERIES.max(call.group()));
        // SAFETY: the caller's promise. The offsets add up to at most `scratch_len`.
        unsafe {
            let values = at.add(dim * TILE);
            let weights = values.add(dim * TILE);
            let factors = weights.add(queries * TILE);
            let partition = factors.add(queries.next_multiple_of(LANES));
            let total = partition.add(call.state_len(queries));
            let codes = CodesScratch::at(total.add(call.state_len(queries)), call, queries);
            Self { keys: at, values, weights, factors, partition, total, codes }
        }
    }
}

/// Computes the state of one partition of a unit.
///
/// # Safety
/// `scratch` and `state` are large enough, and nothing else uses them. The call's tensors and block tables fit its
/// shape.
pub(super) unsafe fn partition(
    isa: Isa,
    call: &AttentionCall<'_>,
    unit: &AttentionUnit,
    partition: usize,
    scratch: *mut f32,
    state: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe { run(isa, call, std::slice::from_ref(unit), scratch, UnitPart::Partition(partition, state)) }
}

/// Computes the outputs of units one after the other.
///
/// # Safety
/// As for [`partition`]. Nothing else uses the units' rows and heads of the output.
pub(super) unsafe fn units(isa: Isa, call: &AttentionCall<'_>, units: &[AttentionUnit], scratch: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { run(isa, call, units, scratch, UnitPart::Whole) };
}

/// Computes a unit's output from the states of its partitions, which are stored at `partials + unit.partials`.
///
/// # Safety
/// As for [`units`].
pub(super) unsafe fn merge_partials(
    isa: Isa,
    call: &AttentionCall<'_>,
    unit: &AttentionUnit,
    partials: *const f32,
    scratch: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe { run(isa, call, std::slice::from_ref(unit), scratch, UnitPart::Merge(partials.add(unit.partials))) }
}

/// Does `part` of each of the units.
///
/// # Safety
/// As for [`units`].
unsafe fn run(isa: Isa, call: &AttentionCall<'_>, units: &[AttentionUnit], scratch: *mut f32, part: UnitPart) {
    #[cfg(target_arch = "x86_64")]
    if tiles::can_run(isa, call) {
        // SAFETY: the caller's promise; the instruction set and the type of the KV cache were checked.
        return unsafe { tiles::run(isa, call, units, scratch, part) };
    }
    // SAFETY: the caller's promise.
    let scratch = unsafe { VectorScratch::at(scratch, call) };
    for unit in units {
        isa.run(UnitKernel { call, unit, scratch, part });
    }
}

/// Kernels for all types of the KV cache are one, because most of it does not depend on the type and takes long to
/// compile.
struct UnitKernel<'a> {
    call: &'a AttentionCall<'a>,
    unit: &'a AttentionUnit,
    scratch: VectorScratch,
    part: UnitPart,
}

/// [`UnitKernel::tile`]
struct FloatTile<'k, 'a> {
    unit: &'k UnitKernel<'a>,
    tile: usize,
    range: (usize, usize),
    state: SoftmaxState,
}

/// [`UnitKernel::short_tile`]
struct ShortTile<'k, 'a> {
    unit: &'k UnitKernel<'a>,
    codes: ShortCodes,
    tile: usize,
    range: (usize, usize),
    state: SoftmaxState,
}

impl SimdKernel for FloatTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: `UnitKernel::partition` has the same contract.
        unsafe { self.unit.tile(simd, self.tile, self.range, self.state) }
    }
}

impl SimdKernel for ShortTile<'_, '_> {
    type Output = ();
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: as above; the queries were encoded.
        unsafe { self.unit.short_tile(simd, self.codes, self.tile, self.range, self.state) }
    }
}

impl SimdKernel for UnitKernel<'_> {
    type Output = ();
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let AttentionUnit { first_partition, num_partitions, .. } = *self.unit;
        // SAFETY: `run`'s contract covers all reads and writes below.
        unsafe {
            let own = SoftmaxState::at(self.scratch.partition, self.call, self.unit);
            let total = SoftmaxState::at(self.scratch.total, self.call, self.unit);
            let is_partition = matches!(self.part, UnitPart::Partition(..));
            if !is_partition {
                self.clear(total);
            }
            for i in 0..num_partitions {
                // Each step stands here once, so that it is compiled once.
                let (partition, state) = match self.part {
                    UnitPart::Partition(partition, state) => {
                        (Some(partition), SoftmaxState::at(state, self.call, self.unit))
                    }
                    UnitPart::Whole => (Some(first_partition + i), own),
                    UnitPart::Merge(partials) => {
                        let at = partials.add(i * self.call.state_len(self.num_queries())).cast_mut();
                        (None, SoftmaxState::at(at, self.call, self.unit))
                    }
                };
                if let Some(partition) = partition {
                    self.partition(simd, partition, state);
                }
                if is_partition {
                    return;
                }
                self.merge(simd, state, total);
            }
            self.write(simd, total);
        }
    }
}

// SAFETY (all blocks in this impl): `run`'s contract. Indices of queries are below `num_queries`, those of dimensions
// below `padded_dim`, and those of positions in a tile below `TILE`; scratch memory and states have room for these.
// Behind the KV pool and the activations there are bytes that a load of a head's last, partial vector may touch.
impl UnitKernel<'_> {
    #[inline(always)]
    fn num_queries(&self) -> usize {
        self.unit.num_rows * self.call.group()
    }

    #[inline(always)]
    unsafe fn clear(&self, state: SoftmaxState) {
        let n = self.num_queries();
        unsafe {
            for i in 0..n {
                *state.max.add(i) = f32::NEG_INFINITY;
                *state.sum.add(i) = 0.0;
            }
            state.acc.write_bytes(0, n * self.call.padded_dim());
        }
    }

    /// Computes the softmax over the positions of one partition.
    #[inline(always)]
    unsafe fn partition<S: Simd>(&self, simd: S, partition: usize, state: SoftmaxState) {
        let (from, to) = self.unit.any_visible(self.call.shape.window);
        let from = from.max(partition * PARTITION);
        let to = to.min((partition + 1) * PARTITION);
        unsafe {
            self.clear(state);
            let shorts = ShortCodes::of::<S>(self.call.kv.layout.dtype);
            if let Some(codes) = shorts {
                self.encode_queries(codes);
            }
            for tile in from / TILE..to.div_ceil(TILE) {
                let range = (from, to);
                match shorts {
                    Some(codes) => simd.call(ShortTile { unit: self, codes, tile, range, state }),
                    None => simd.call(FloatTile { unit: self, tile, range, state }),
                }
            }
        }
    }

    /// Adds positions `from..to` of a tile to the state, in float32.
    #[inline(always)]
    unsafe fn tile<S: Simd>(&self, simd: S, tile: usize, (from, to): (usize, usize), state: SoftmaxState) {
        unsafe {
            let codes = match self.call.kv.layout.dtype {
                KvDType::Plain(dtype) => {
                    self.load(simd, dtype, tile, (from, to));
                    None
                }
                KvDType::Codes(code_type) => Some(self.load_codes(simd, code_type, tile, (from, to))),
            };
            self.scores(simd);
            if let Some(codes) = &codes {
                self.scale(simd, [codes[0].key_scales, codes[1].key_scales]);
            }
            self.softmax(simd, tile, state);
            if let Some(codes) = &codes {
                self.scale(simd, [codes[0].value_scales, codes[1].value_scales]);
            }
            self.accumulate(simd, tile, state);
        }
    }

    /// `weights[query][position] = q · k`. Each is one chain of multiply-adds over the dimensions.
    #[inline(always)]
    unsafe fn scores<S: Simd>(&self, simd: S) {
        let n = self.num_queries();
        let mut i = 0;
        unsafe {
            while i < n {
                if const { S::QUERIES == 4 } && i + 8 <= n {
                    self.scores_of::<S, 8>(simd, i);
                    i += 8;
                } else if const { S::QUERIES == 4 } && i + 4 <= n {
                    self.scores_of::<S, 4>(simd, i);
                    i += 4;
                } else if i + 2 <= n {
                    self.scores_of::<S, 2>(simd, i);
                    i += 2;
                } else {
                    self.scores_of::<S, 1>(simd, i);
                    i += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scores_of<S: Simd, const R: usize>(&self, simd: S, first: usize) {
        let mut scores = [[simd.splat(0.0); 2]; R];
        unsafe {
            let mut q = [std::ptr::null::<f32>(); R];
            for r in 0..R {
                q[r] = self.query(first + r);
            }
            for d in 0..self.call.shape.head_dim {
                let key = self.scratch.keys.add(d * TILE);
                let k = [simd.load(key), simd.load(key.add(LANES))];
                for r in 0..R {
                    let q = simd.splat(*q[r].add(d));
                    scores[r] = [simd.mul_add(q, k[0], scores[r][0]), simd.mul_add(q, k[1], scores[r][1])];
                }
            }
            for r in 0..R {
                let to = self.scratch.weights.add((first + r) * TILE);
                simd.store(to, scores[r][0]);
                simd.store(to.add(LANES), scores[r][1]);
            }
        }
    }

    /// Query `i` of the unit: rows first, then the heads of the group.
    #[inline(always)]
    unsafe fn query(&self, i: usize) -> *const f32 {
        let (row, head) = self.row_and_head(i);
        let shape = &self.call.shape;
        let stride = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        unsafe { self.call.qkv.as_ptr().add(row * stride + head * shape.head_dim) }
    }

    /// Row of the batch and query head of query `i`.
    #[inline(always)]
    fn row_and_head(&self, i: usize) -> (usize, usize) {
        let group = self.call.group();
        (self.unit.seq.first_row + self.unit.first_row + i / group, self.unit.kv_head * group + i % group)
    }

    /// Positions of the tile that query `i` sees, counted from the tile's start.
    #[inline(always)]
    fn visible_in_tile(&self, i: usize, tile: usize) -> (usize, usize) {
        let (from, to) = self.unit.visible(i / self.call.group(), self.call.shape.window);
        let start = tile * TILE;
        (from.saturating_sub(start).min(TILE), to.saturating_sub(start).min(TILE))
    }

    /// Turns scores into weights, and updates the maximum and the sum.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&self, simd: S, tile: usize, state: SoftmaxState) {
        let (scale, hidden) = (simd.splat(self.call.shape.scale), simd.splat(f32::NEG_INFINITY));
        let softcap = self.call.shape.softcap;
        for i in 0..self.num_queries() {
            let (from, to) = self.visible_in_tile(i, tile);
            if from >= to {
                continue;
            }
            unsafe {
                let at = self.scratch.weights.add(i * TILE);
                let mut scores = [simd.load(at), simd.load(at.add(LANES))];
                for half in 0..2 {
                    let lane = |position: usize| position.saturating_sub(half * LANES).min(LANES);
                    scores[half] = simd.mul(scores[half], scale);
                    if let Some(softcap) = softcap {
                        let capped = simd.tanh(simd.mul(scores[half], simd.splat(1.0 / softcap)));
                        scores[half] = simd.mul(capped, simd.splat(softcap));
                    }
                    if to - from < TILE {
                        scores[half] = simd.in_range_or(scores[half], lane(from), lane(to), hidden);
                    }
                }
                let old_max = *state.max.add(i);
                let tile_max = simd.max_lane(simd.max(scores[0], scores[1]));
                let max = if tile_max > old_max { tile_max } else { old_max };
                // Not a closure: a closure would be compiled without the instruction set.
                let max_lanes = simd.splat(max);
                let weights = [simd.exp(simd.sub(scores[0], max_lanes)), simd.exp(simd.sub(scores[1], max_lanes))];
                simd.store(at, weights[0]);
                simd.store(at.add(LANES), weights[1]);
                // Most tiles do not raise the maximum, and exp(0) is exactly 1.
                let factor = if max == old_max { 1.0 } else { simd.to_array(simd.exp(simd.splat(old_max - max)))[0] };
                *self.scratch.factors.add(i) = factor;
                *state.max.add(i) = max;
                *state.sum.add(i) = *state.sum.add(i) * factor + simd.sum(simd.add(weights[0], weights[1]));
            }
        }
    }

    /// `acc = acc * factor + weights · V`, with each element one chain of multiply-adds over the positions.
    #[inline(always)]
    unsafe fn accumulate<S: Simd>(&self, simd: S, tile: usize, state: SoftmaxState) {
        let n = self.num_queries();
        let mut i = 0;
        while i < n {
            let range = self.visible_in_tile(i, tile);
            if range.0 >= range.1 {
                i += 1;
                continue;
            }
            // Visible ranges only grow or move forward from row to row. So if two are equal, all between them are equal
            // too.
            let alike = |r: usize| i + r <= n && self.visible_in_tile(i + r - 1, tile) == range;
            unsafe {
                if const { S::QUERIES == 4 } && alike(4) {
                    self.accumulate_rows::<S, 4>(simd, i, range, state);
                    i += 4;
                } else if alike(2) {
                    self.accumulate_rows::<S, 2>(simd, i, range, state);
                    i += 2;
                } else {
                    self.accumulate_rows::<S, 1>(simd, i, range, state);
                    i += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn accumulate_rows<S: Simd, const R: usize>(
        &self,
        simd: S,
        first: usize,
        range: (usize, usize),
        state: SoftmaxState,
    ) {
        let dim = self.call.padded_dim();
        let mut d = 0;
        unsafe {
            while d < dim {
                if const { S::QUERIES == 4 } && d + 4 * LANES <= dim {
                    self.accumulate_block::<S, R, 4>(simd, first, d, range, state);
                    d += 4 * LANES;
                } else if d + 2 * LANES <= dim {
                    self.accumulate_block::<S, R, 2>(simd, first, d, range, state);
                    d += 2 * LANES;
                } else {
                    self.accumulate_block::<S, R, 1>(simd, first, d, range, state);
                    d += LANES;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn accumulate_block<S: Simd, const R: usize, const C: usize>(
        &self,
        simd: S,
        first: usize,
        d: usize,
        range: (usize, usize),
        state: SoftmaxState,
    ) {
        let dim = self.call.padded_dim();
        let mut acc = [[simd.splat(0.0); C]; R];
        unsafe {
            let at = state.acc.add(first * dim + d);
            let weights = self.scratch.weights.add(first * TILE);
            for r in 0..R {
                let factor = simd.splat(*self.scratch.factors.add(first + r));
                for c in 0..C {
                    acc[r][c] = simd.mul(simd.load(at.add(r * dim + c * LANES)), factor);
                }
            }
            for t in range.0..range.1 {
                let value = self.scratch.values.add(t * dim + d);
                let mut v = [simd.splat(0.0); C];
                for c in 0..C {
                    v[c] = simd.load(value.add(c * LANES));
                }
                for r in 0..R {
                    let weight = simd.splat(*weights.add(r * TILE + t));
                    for c in 0..C {
                        acc[r][c] = simd.mul_add(weight, v[c], acc[r][c]);
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    simd.store(at.add(r * dim + c * LANES), acc[r][c]);
                }
            }
        }
    }

    /// Merges a partition's state into that of the partitions before it.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&self, simd: S, part: SoftmaxState, total: SoftmaxState) {
        let dim = self.call.padded_dim();
        for i in 0..self.num_queries() {
            unsafe {
                // A partition without a visible position must not change the total.
                if *part.sum.add(i) == 0.0 {
                    continue;
                }
                let (part_max, total_max) = (*part.max.add(i), *total.max.add(i));
                let max = if part_max > total_max { part_max } else { total_max };
                let part_factor = simd.exp(simd.splat(part_max - max));
                let total_factor = simd.exp(simd.splat(total_max - max));
                for d in (0..dim).step_by(LANES) {
                    let at = total.acc.add(i * dim + d);
                    let scaled = simd.mul(simd.load(at), total_factor);
                    simd.store(at, simd.mul_add(simd.load(part.acc.add(i * dim + d)), part_factor, scaled));
                }
                *total.max.add(i) = max;
                *total.sum.add(i) = *total.sum.add(i) * simd.to_array(total_factor)[0]
                    + *part.sum.add(i) * simd.to_array(part_factor)[0];
            }
        }
    }

    #[inline(always)]
    unsafe fn write<S: Simd>(&self, simd: S, total: SoftmaxState) {
        let (dim, shape) = (self.call.padded_dim(), &self.call.shape);
        for i in 0..self.num_queries() {
            let (row, head) = self.row_and_head(i);
            unsafe {
                let out = self.call.out.get().add((row * shape.num_heads + head) * shape.head_dim);
                let sum = simd.splat(*total.sum.add(i));
                for d in (0..shape.head_dim).step_by(LANES) {
                    let value = simd.div(simd.load(total.acc.add(i * dim + d)), sum);
                    simd.store_first(out.add(d), value, LANES.min(shape.head_dim - d));
                }
                if self.call.is_rotated() {
                    rotate(std::slice::from_raw_parts_mut(out, shape.head_dim));
                }
            }
        }
    }
}
