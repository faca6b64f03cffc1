//! Attention without float32 products: of bfloat16 with bfloat16, on AMX tiles or by AVX-512's dot products of pairs,
//! and of integers with a KV cache of integer codes. They share the softmax; [`products`] says what they
//! compute.
//!
//! A block is sixteen queries of a unit. They are the rows of `scores = Q · Kᵀ` and of `weights · V`. The weights of a
//! cache of bfloat16 are rounded to bfloat16, and the sum of a query's weights is that of the rounded weights, so that
//! the result is a true mean of V.
//!
//! Masked positions have weight 0, and V is finite there (see [`layout`]), so they do not change any sum. A query's
//! result depends only on the positions that it sees, as long as V is finite.

mod codes;
mod dots;
mod geometry;
mod integers;
mod layout;
mod products;
mod queries;
mod vector;

pub(super) use layout::write_row;

use super::super::isa::Isa;
use super::super::kv_codes;
use super::super::rotation::rotate;
use super::super::simd::LANES;
use super::unit::{AttentionCall, AttentionUnit, PARTITION, UnitPart};
use crate::{CodeType, DType, KvDType};
use codes::CodeProducts;
use dots::DotProducts;
use geometry::{CHUNK, GROUP, GROUPS, TILE, TILE_LEN, first_lanes};
use products::{GROUPS_AT_ONCE, QueryScale, Scored, StepProducts, TileProducts, Weighed};
use queries::VectorProducts;
use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;
use vector::{exp2, factor, lanes, max_of_each, rough_exp2};

/// The most queries of a unit. With more queries, K and V are read less often.
pub(super) const MAX_QUERIES: usize = 128;

/// Positions whose weights are computed at once.
const PAIR: usize = 2 * GROUP;

const _: () = assert!(PARTITION.is_multiple_of(TILE) && GROUPS.is_multiple_of(GROUPS_AT_ONCE));

/// Softmax of a unit's queries over some positions.
#[derive(Clone, Copy)]
struct TiledSoftmaxState {
    /// `[queries][dimensions]` weighted sum of V.
    acc: *mut f32,
    /// `[queries][16]` sum of the weights `2^(score - max)`, by position modulo 32.
    sum: *mut f32,
    /// `[queries]` largest score, times log2 e.
    max: *mut f32,
}

/// The parts of a member's scratch memory. Each begins at a 64-byte boundary.
#[derive(Clone, Copy)]
struct TileScratch {
    /// `[blocks][chunks][16 queries][32 dimensions]` bfloat16.
    queries: *mut u32,
    /// `[3 tiles][groups][chunks]` tiles, used if K cannot be read directly from the cache.
    keys: *mut u32,
    /// The same for V.
    values: *mut u32,
    /// `[2][16 queries][TILE]` scores of two items.
    scores: *mut f32,
    /// `[2][16 queries][TILE]` bfloat16: weights of two items.
    weights: *mut u16,
    /// `[2][16 queries]`: the factors of two items on the sums before them.
    factors: *mut f32,
    /// `[16 queries][dimensions]`: the weighted sum of an item.
    products: *mut f32,
    /// `[queries]`: the range of positions that a query sees.
    visible: *mut [u32; 2],
    /// `[queries]`, with codes.
    query_scales: *mut QueryScale,
    /// `[2][16 queries]`, with codes: the factors on the weighted sums of two items.
    weight_scales: *mut f32,
    partition: *mut f32,
    total: *mut f32,
}

/// Whether a call can be computed here.
pub(super) fn can_run(isa: Isa, call: &AttentionCall<'_>) -> bool {
    match call.kv.layout.dtype {
        KvDType::Plain(dtype) => isa.has_dot_products_for(dtype),
        // Products of bytes come with those of bfloat16.
        KvDType::Codes(CodeType::Int8) => {
            isa.has_dot_products_for(DType::BF16) && call.shape.head_dim.is_multiple_of(LANES)
        }
        // The low and the high bits of a V's bytes are whole vectors of dimensions.
        KvDType::Codes(CodeType::Int4) => {
            isa.has_dot_products_for(DType::BF16) && call.shape.head_dim.is_multiple_of(2 * LANES)
        }
        KvDType::Codes(CodeType::Fp8) => false,
    }
}

fn has_codes(call: &AttentionCall<'_>) -> bool {
    matches!(call.kv.layout.dtype, KvDType::Codes(_))
}

/// Whether groups are read directly from the cache.
fn in_groups(call: &AttentionCall<'_>) -> bool {
    if has_codes(call) { kv_codes::in_groups(&call.kv.layout) } else { call.kv.grouped }
}

fn num_chunks(call: &AttentionCall<'_>) -> usize {
    call.shape.head_dim.div_ceil(CHUNK)
}

/// The sizes of the parts of a member's scratch memory, in floats.
fn scratch_parts(call: &AttentionCall<'_>) -> [usize; 12] {
    let queries = MAX_QUERIES.max(call.group()).next_multiple_of(LANES);
    let dim = num_chunks(call) * CHUNK;
    let gathered = if in_groups(call) { 0 } else { 3 * TILE * dim / 2 };
    let state = call.state_len(queries);
    let (scores, weights) = (2 * LANES * TILE, LANES * TILE);
    let (products, query_scales) = (LANES * dim, queries * size_of::<QueryScale>() / size_of::<f32>());
    let (visible, of_items) = (2 * queries, 2 * LANES);
    let queries = queries * dim / 2;
    [queries, gathered, gathered, scores, weights, of_items, products, visible, query_scales, of_items, state, state]
}

/// Floats of scratch memory that a member needs.
pub(super) fn scratch_len(call: &AttentionCall<'_>) -> usize {
    scratch_parts(call).iter().sum()
}

impl TileScratch {
    /// # Safety
    /// `at` points to `scratch_len(call)` floats.
    unsafe fn at(at: *mut f32, call: &AttentionCall<'_>) -> Self {
        let mut next = at;
        let mut parts = scratch_parts(call).into_iter();
        let mut part = || {
            let part = next;
            next = next.wrapping_add(parts.next().expect("there is a part for each field"));
            part
        };
        Self {
            queries: part().cast(),
            keys: part().cast(),
            values: part().cast(),
            scores: part(),
            weights: part().cast(),
            factors: part(),
            products: part(),
            visible: part().cast(),
            query_scales: part().cast(),
            weight_scales: part(),
            partition: part(),
            total: part(),
        }
    }
}

/// Does `part` of each of the units, one after the other.
///
/// # Safety
/// `isa` is available, and the call [`can_run`]. `scratch` and the memory that `part` points to are large enough, and
/// nothing else uses them. The call's tensors and block tables fit its shape.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn run(
    isa: Isa,
    call: &AttentionCall<'_>,
    units: &[AttentionUnit],
    scratch: *mut f32,
    part: UnitPart,
) {
    let mut tiles = None;
    for (i, unit) in units.iter().enumerate() {
        let num_queries = unit.num_rows * call.group();
        let num_blocks = num_queries.div_ceil(LANES);
        // SAFETY: the caller's promise.
        let scratch = unsafe { TileScratch::at(scratch, call) };
        let (next, num_chunks) = (units.get(i + 1), num_chunks(call));
        let work = TiledUnit { call, unit, next, scratch, num_queries, num_blocks, num_chunks };
        // SAFETY (all): the caller's promise.
        if has_codes(call) {
            match call.is_rotated() {
                true => unsafe { work.run::<VectorProducts<CodeProducts<2>>>(part) },
                false => unsafe { work.run::<VectorProducts<CodeProducts<1>>>(part) },
            }
            continue;
        }
        if isa != Isa::Amx {
            unsafe { work.run::<VectorProducts<DotProducts>>(part) };
            continue;
        }
        let rows = num_queries.min(LANES);
        if tiles.as_ref().is_none_or(|(of, _)| *of != rows) && !matches!(part, UnitPart::Merge(_)) {
            drop(tiles.take());
            // SAFETY: the caller's promise; there are no other `Tiles` now.
            tiles = Some((rows, unsafe { products::configure(rows) }));
        }
        // SAFETY: the caller's promise; the tiles are configured for the unit.
        unsafe { work.run::<TileProducts>(part) };
    }
}

#[derive(Clone, Copy)]
struct TiledUnit<'a> {
    call: &'a AttentionCall<'a>,
    unit: &'a AttentionUnit,
    /// The unit that is computed next.
    next: Option<&'a AttentionUnit>,
    scratch: TileScratch,
    num_queries: usize,
    /// Blocks of 16 queries.
    num_blocks: usize,
    /// Head size in chunks of [`CHUNK`] dimensions.
    num_chunks: usize,
}

/// A tile of positions, and the addresses of the groups that the unit sees.
#[derive(Clone, Copy)]
struct Positions {
    /// First position of the tile.
    start: usize,
    /// The range of positions within the tile and the partition that at least one query of the unit sees.
    from: usize,
    to: usize,
    groups: GroupAddresses,
    /// K and V that are used next, if they are prefetched.
    next: Option<GroupAddresses>,
}

/// The addresses of the groups of a tile.
#[derive(Clone, Copy)]
struct GroupAddresses {
    keys: [*const u8; GROUPS],
    values: [*const u8; GROUPS],
    /// Of codes.
    key_scales: [*const u16; GROUPS],
    value_scales: [*const u16; GROUPS],
}

/// The positions of a partition that at least one query of the unit sees.
fn visible_in(unit: &AttentionUnit, partition: usize, call: &AttentionCall<'_>) -> (usize, usize) {
    let (from, to) = unit.any_visible(call.shape.window);
    (from.max(partition * PARTITION), to.min((partition + 1) * PARTITION))
}

/// A block of queries together with a tile of positions.
struct TileItem {
    block: usize,
    /// First position of the tile.
    start: usize,
    /// Groups of the tile of which at least one query of the block sees a position.
    groups: Range<usize>,
    /// Positions that all queries of the block see.
    common: Range<usize>,
    /// Index of the buffers that this item uses. Items take turns.
    place: usize,
}

impl TileItem {
    /// What to prefetch during the item's products. The first block of queries does it for all.
    fn next_of<'a>(&self, positions: &'a Positions) -> Option<&'a GroupAddresses> {
        positions.next.as_ref().filter(|_| self.block == 0)
    }

    /// Pairs of groups of which at least one is in [`Self::groups`].
    fn pairs(&self) -> Range<usize> {
        self.groups.start / 2..self.groups.end.div_ceil(2)
    }

    /// Whether all queries see all positions of a pair.
    fn is_whole(&self, pair: usize) -> bool {
        let start = self.start + pair * PAIR;
        self.common.start <= start && start + PAIR <= self.common.end
    }
}

// SAFETY (all blocks in this impl): `run`'s contract. Blocks are below `num_blocks`, queries below `num_queries`, and
// groups in a tile below `GROUPS`; scratch memory and states have room for these.
impl TiledUnit<'_> {
    unsafe fn run<P: StepProducts>(&self, part: UnitPart) {
        let (unit, state_len) = (self.unit, self.call.state_len(self.num_queries));
        unsafe {
            let (own, total) = (self.state(self.scratch.partition), self.state(self.scratch.total));
            match part {
                UnitPart::Partition(partition, state) => {
                    self.load_queries();
                    self.partition::<P>(partition, None, self.state(state));
                }
                UnitPart::Whole => {
                    self.load_queries();
                    for i in 0..unit.num_partitions {
                        let partition = unit.first_partition + i;
                        let after = if self.prefetches::<P>() { self.after(partition) } else { None };
                        self.partition::<P>(partition, after, if i == 0 { total } else { own });
                        if i > 0 {
                            self.merge(own, total);
                        }
                    }
                    self.write(total);
                }
                UnitPart::Merge(partials) => {
                    let state = |i: usize| self.state(partials.add(i * state_len).cast_mut());
                    for i in 1..unit.num_partitions {
                        self.merge(state(i), state(0));
                    }
                    self.write(state(0));
                }
            }
        }
    }

    /// The state at the address `at`.
    fn state(&self, at: *mut f32) -> TiledSoftmaxState {
        let queries = self.num_blocks * LANES;
        let sum = at.wrapping_add(queries * self.dim());
        TiledSoftmaxState { acc: at, sum, max: sum.wrapping_add(queries * LANES) }
    }

    /// Head size in whole chunks.
    fn dim(&self) -> usize {
        self.num_chunks * CHUNK
    }

    /// Queries of a block.
    fn queries_of(&self, block: usize) -> Range<usize> {
        block * LANES..self.num_queries.min((block + 1) * LANES)
    }

    fn scores_of(&self, item: &TileItem) -> *mut f32 {
        self.scratch.scores.wrapping_add(item.place * LANES * TILE)
    }

    fn weights_of(&self, item: &TileItem) -> *mut u16 {
        self.scratch.weights.wrapping_add(item.place * LANES * TILE)
    }

    fn weight_scales_of(&self, item: &TileItem) -> *mut f32 {
        self.scratch.weight_scales.wrapping_add(item.place * LANES)
    }

    fn factors_of(&self, item: &TileItem) -> *mut f32 {
        self.scratch.factors.wrapping_add(item.place * LANES)
    }

    /// Lays the queries out, and stores the range of positions that each sees.
    unsafe fn load_queries(&self) {
        for query in 0..self.num_queries {
            let (from, to) = self.unit.visible(query / self.call.group(), self.call.shape.window);
            unsafe { *self.scratch.visible.add(query) = [from as u32, to as u32] };
        }
        unsafe {
            match has_codes(self.call) {
                true => self.encode_queries(),
                false => self.round_queries(),
            }
        }
    }

    /// Query `i` of the unit.
    fn query(&self, i: usize) -> *const f32 {
        let shape = &self.call.shape;
        let stride = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        let (row, head) = self.row_and_head(i);
        self.call.qkv.as_ptr().wrapping_add(row * stride + head * shape.head_dim)
    }

    /// Row of the batch and query head of query `i`.
    fn row_and_head(&self, i: usize) -> (usize, usize) {
        let group = self.call.group();
        (self.unit.seq.first_row + self.unit.first_row + i / group, self.unit.kv_head * group + i % group)
    }

    /// Whether K and V of the next tile are prefetched. Those that are gathered are read at once.
    fn prefetches<P: StepProducts>(&self) -> bool {
        P::PREFETCHES && in_groups(self.call)
    }

    /// The first tile after a partition: of the next partition, or of the next unit.
    unsafe fn after(&self, partition: usize) -> Option<Positions> {
        let Self { unit, call, .. } = self;
        let is_last = partition + 1 == unit.first_partition + unit.num_partitions;
        let (unit, partition) = if is_last { (self.next?, self.next?.first_partition) } else { (*unit, partition + 1) };
        let (from, to) = visible_in(unit, partition, call);
        unsafe { Some(TiledUnit { unit, ..*self }.positions(from / TILE * TILE, from, to)) }
    }

    /// Computes the softmax over the positions of one partition. `after` is the tile that comes after it.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn partition<P: StepProducts>(&self, partition: usize, after: Option<Positions>, state: TiledSoftmaxState) {
        let queries = self.num_blocks * LANES;
        unsafe {
            state.acc.write_bytes(0, self.num_queries * self.dim());
            state.sum.write_bytes(0, self.num_queries * LANES);
            std::slice::from_raw_parts_mut(state.max, queries).fill(f32::NEG_INFINITY);
        }
        let (from, to) = visible_in(self.unit, partition, self.call);
        let first_tile = from / TILE;
        let num_items = (to.div_ceil(TILE) - first_tile) * self.num_blocks;
        // The products of one item are interleaved with the softmax of the item before it. The processor does both at
        // once, and no tile is loaded from memory that vector instructions have just written.
        let mut tiles = [None; 3];
        let mut next = None;
        for i in 0..num_items + 2 {
            unsafe {
                if i < num_items && i.is_multiple_of(self.num_blocks) {
                    let tile = i / self.num_blocks;
                    let start = (first_tile + tile) * TILE;
                    let mut positions = next.take().unwrap_or_else(|| self.positions(start, from, to));
                    if self.prefetches::<P>() {
                        let is_last = i + self.num_blocks == num_items;
                        next = if is_last { after } else { Some(self.positions(start + TILE, from, to)) };
                        positions.next = next.map(|next| next.groups);
                    }
                    tiles[tile % 3] = Some(positions);
                }
                let item = |i: usize| {
                    if i >= num_items {
                        return None;
                    }
                    let positions = tiles[i / self.num_blocks % 3].as_ref()?;
                    Some((self.item(i, positions)?, positions))
                };
                let weighed = i.checked_sub(2).and_then(item);
                let mut products = self.products::<P>(weighed.as_ref(), item(i).as_ref());
                let num_products = products.len();
                if let Some((item, positions)) = i.checked_sub(1).and_then(item) {
                    let per_query = num_products.div_ceil(self.queries_of(item.block).len());
                    self.softmax(&item, positions, state, || {
                        (0..per_query).for_each(|_| products.advance());
                    });
                }
                (0..num_products).for_each(|_| products.advance());
                if let Some((item, _)) = &weighed {
                    self.add_products(item, state);
                }
            }
        }
    }

    /// The products of two items: the weighted sum of V of one, and the scores of the other.
    unsafe fn products<P: StepProducts>(
        &self,
        weighed: Option<&(TileItem, &Positions)>,
        scored: Option<&(TileItem, &Positions)>,
    ) -> P {
        let weighed = weighed.map(|(item, positions)| Weighed {
            num_queries: self.queries_of(item.block).len(),
            weights: self.weights_of(item),
            scales: self.weight_scales_of(item),
            values: positions.groups.values,
            next: item.next_of(positions).map(|next| next.values),
            groups: item.groups.clone(),
            out: self.scratch.products,
        });
        let scored = scored.map(|(item, positions)| Scored {
            num_queries: self.queries_of(item.block).len(),
            queries: self.scratch.queries.wrapping_add(item.block * self.num_chunks * TILE_LEN),
            scales: self.scratch.query_scales.wrapping_add(item.block * LANES),
            key_scales: positions.groups.key_scales,
            keys: positions.groups.keys,
            next: item.next_of(positions).map(|next| next.keys),
            groups: item.groups.clone(),
            out: self.scores_of(item),
        });
        unsafe { P::new(weighed, scored, self.call.shape.head_dim) }
    }

    /// Item `i` of a partition, or `None` if its queries see nothing of its tile.
    unsafe fn item(&self, i: usize, positions: &Positions) -> Option<TileItem> {
        let block = i % self.num_blocks;
        let queries = self.queries_of(block);
        let visible = self.scratch.visible;
        let (first, last) = unsafe { (*visible.add(queries.start), *visible.add(queries.end - 1)) };
        let (from, to) = (positions.from.max(first[0] as usize), positions.to.min(last[1] as usize));
        let groups = || (from - positions.start) / GROUP..(to - positions.start).div_ceil(GROUP);
        let common = last[0] as usize..first[1] as usize;
        (from < to).then(|| TileItem { block, start: positions.start, groups: groups(), common, place: i % 2 })
    }

    /// The positions of a pair of groups that a query sees, one bit each.
    #[inline]
    unsafe fn mask(&self, query: usize, item: &TileItem, pair: usize) -> u32 {
        let start = item.start + pair * PAIR;
        let [from, to] = unsafe { *self.scratch.visible.add(query) };
        let within = |position: u32| (position as usize).saturating_sub(start).min(PAIR);
        (((1u64 << within(to)) - 1) & !((1u64 << within(from)) - 1)) as u32
    }

    /// Turns the scores of an item into weights, and updates the maximum and the sum. Calls `between` once for each
    /// query.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn softmax(
        &self,
        item: &TileItem,
        positions: &Positions,
        state: TiledSoftmaxState,
        mut between: impl FnMut(),
    ) {
        let queries = self.queries_of(item.block);
        unsafe {
            let scale = self.scale_scores(item);
            let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); LANES];
            for (query, max) in queries.clone().zip(&mut max) {
                *max = self.max_score(query, item);
            }
            let at = state.max.add(queries.start);
            let old_max = _mm512_loadu_ps(at);
            let tile_max = _mm512_mul_ps(max_of_each(&max), _mm512_set1_ps(scale));
            let new_max = _mm512_max_ps(tile_max, old_max);
            _mm512_storeu_ps(at, new_max);
            _mm512_storeu_ps(self.factors_of(item), factor(old_max, new_max));
            if has_codes(self.call) {
                let scales = self.value_scales(item, &positions.groups);
                _mm512_storeu_ps(self.weight_scales_of(item), factor(tile_max, new_max));
                let tile_max = lanes(tile_max);
                for query in queries {
                    between();
                    let sum = self.code_weights(query, item, &scales, scale, tile_max[query % LANES]);
                    self.add_to_sum(query, item, sum, state);
                }
                return;
            }
            for query in queries {
                between();
                let sum = self.weights(query, item, scale, state);
                self.add_to_sum(query, item, sum, state);
            }
        }
    }

    /// Adds the sum of an item's weights to that of the items before it.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add_to_sum(&self, query: usize, item: &TileItem, sum: __m512, state: TiledSoftmaxState) {
        unsafe {
            let factor = _mm512_set1_ps(*self.factors_of(item).add(query % LANES));
            let at = state.sum.add(query * LANES);
            _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_load_ps(at), factor, sum));
        }
    }

    /// Returns the positive factor that turns the stored scores into exponents of 2. Whatever a positive factor cannot
    /// express (a softcap, a negative scale) is applied to the stored scores here.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn scale_scores(&self, item: &TileItem) -> f32 {
        let scale = self.call.shape.scale;
        let softcap = self.call.shape.softcap;
        if softcap.is_none() && scale > 0.0 {
            return scale * LOG2_E;
        }
        let (one, two) = (_mm512_set1_ps(1.0), _mm512_set1_ps(2.0));
        for row in 0..self.queries_of(item.block).len() {
            for group in 2 * item.pairs().start..2 * item.pairs().end {
                unsafe {
                    let at = self.scores_of(item).add(row * TILE + group * GROUP);
                    let mut score = _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(scale));
                    if let Some(softcap) = softcap {
                        // tanh x = 1 - 2 / (1 + e^2x)
                        let power = exp2(_mm512_mul_ps(score, _mm512_set1_ps(2.0 * LOG2_E / softcap)));
                        let tanh = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(one, power)));
                        score = _mm512_mul_ps(tanh, _mm512_set1_ps(softcap));
                    }
                    _mm512_store_ps(at, score);
                }
            }
        }
        LOG2_E
    }

    /// A vector that holds a query's largest score in one of its lanes.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn max_score(&self, query: usize, item: &TileItem) -> __m512 {
        let scores = self.scores_of(item).wrapping_add(query % LANES * TILE);
        let mut max = _mm512_set1_ps(f32::NEG_INFINITY);
        for pair in item.pairs() {
            unsafe {
                let at = scores.add(pair * PAIR);
                let (low, high) = (_mm512_load_ps(at), _mm512_load_ps(at.add(GROUP)));
                if item.is_whole(pair) {
                    max = _mm512_max_ps(low, _mm512_max_ps(high, max));
                } else {
                    let mask = self.mask(query, item, pair);
                    max = _mm512_mask_max_ps(max, mask as u16, low, max);
                    max = _mm512_mask_max_ps(max, (mask >> 16) as u16, high, max);
                }
            }
        }
        max
    }

    /// Computes a query's weights, and returns their sum.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn weights(&self, query: usize, item: &TileItem, scale: f32, state: TiledSoftmaxState) -> __m512 {
        /// Two bfloat16 ones.
        const ONES: i32 = 0x3f80_3f80;
        let row = query % LANES * TILE;
        unsafe {
            let (scores, weights) = (self.scores_of(item).add(row), self.weights_of(item).add(row));
            let (scale, max) = (_mm512_set1_ps(scale), _mm512_set1_ps(*state.max.add(query)));
            let ones = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(ONES));
            let mut sum = _mm512_setzero_ps();
            for pair in item.pairs() {
                let at = scores.add(pair * PAIR);
                let mut low = rough_exp2(_mm512_fmsub_ps(_mm512_load_ps(at), scale, max));
                let mut high = rough_exp2(_mm512_fmsub_ps(_mm512_load_ps(at.add(GROUP)), scale, max));
                if !item.is_whole(pair) {
                    let mask = self.mask(query, item, pair);
                    low = _mm512_maskz_mov_ps(mask as u16, low);
                    high = _mm512_maskz_mov_ps((mask >> 16) as u16, high);
                }
                let both = _mm512_cvtne2ps_pbh(high, low);
                sum = _mm512_dpbf16_ps(sum, both, ones);
                _mm512_store_si512(weights.add(pair * PAIR).cast(), std::mem::transmute::<__m512bh, __m512i>(both));
            }
            sum
        }
    }

    /// Adds the products of an item's weights and V to the sums so far.
    #[target_feature(enable = "avx512f")]
    unsafe fn add_products(&self, item: &TileItem, state: TiledSoftmaxState) {
        for query in self.queries_of(item.block) {
            unsafe {
                let factor = _mm512_set1_ps(*self.factors_of(item).add(query % LANES));
                let acc = state.acc.add(query * self.dim());
                let products = self.scratch.products.add(query % LANES * self.dim());
                for i in (0..self.dim()).step_by(LANES) {
                    let sum = _mm512_fmadd_ps(_mm512_load_ps(acc.add(i)), factor, _mm512_load_ps(products.add(i)));
                    _mm512_store_ps(acc.add(i), sum);
                }
            }
        }
    }

    /// Merges a partition's state into that of the partitions before it. An empty state changes nothing.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn merge(&self, part: TiledSoftmaxState, total: TiledSoftmaxState) {
        for query in 0..self.num_queries {
            unsafe {
                let (part_max, total_max) = (*part.max.add(query), *total.max.add(query));
                let max = part_max.max(total_max);
                let [part_factor, total_factor] =
                    [part_max, total_max].map(|old| factor(_mm512_set1_ps(old), _mm512_set1_ps(max)));
                *total.max.add(query) = max;
                let add = |from: *mut f32, to: *mut f32| {
                    let before = _mm512_mul_ps(_mm512_load_ps(to), total_factor);
                    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(from), part_factor, before));
                };
                add(part.sum.add(query * LANES), total.sum.add(query * LANES));
                for i in (query * self.dim()..(query + 1) * self.dim()).step_by(LANES) {
                    add(part.acc.add(i), total.acc.add(i));
                }
            }
        }
    }

    /// Writes the output: the sums of V divided by the sums of the weights.
    #[target_feature(enable = "avx512f")]
    unsafe fn write(&self, total: TiledSoftmaxState) {
        let shape = &self.call.shape;
        for query in 0..self.num_queries {
            let (row, head) = self.row_and_head(query);
            unsafe {
                let out = self.call.out.get().add((row * shape.num_heads + head) * shape.head_dim);
                let sum = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(total.sum.add(query * LANES))));
                for i in (0..shape.head_dim).step_by(LANES) {
                    let mean = _mm512_div_ps(_mm512_load_ps(total.acc.add(query * self.dim() + i)), sum);
                    // Masked positions may change the sign of a zero. This turns -0 into 0.
                    let mean = _mm512_add_ps(mean, _mm512_setzero_ps());
                    _mm512_mask_storeu_ps(out.add(i), first_lanes(shape.head_dim - i) as u16, mean);
                }
                if self.call.is_rotated() {
                    rotate(std::slice::from_raw_parts_mut(out, shape.head_dim));
                }
            }
        }
    }
}
