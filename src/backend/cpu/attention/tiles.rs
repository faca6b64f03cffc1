//! Attention on AMX tiles, for a KV cache of bfloat16.
//!
//! Sixteen queries of a unit, a block, are the columns of `scores = K · Qᵀ`, so that K's rows go into the products as
//! they lie in the cache, and maximum and sum run down the lanes. The weights, rounded to bfloat16, are turned around to
//! be the rows of `weights · V`. A query's weights are added up as rounded, so that what is divided in the end is a
//! true mean of V.
//!
//! Masked positions have weight 0, and V is 0 where the unit sees nothing: neither changes a sum. So a query's result
//! depends on what it sees alone, as long as V is finite.

mod products;

use super::super::gemm::amx::Tiles;
use super::super::simd::{LANES, transpose};
use super::kernel::MAX_QUERIES;
use super::kernel::Part;
use super::{Attention, MAX_HEAD_DIM, PARTITION, Unit};
use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Positions per step of the online softmax; [`PARTITION`] is a multiple of it.
const TILE: usize = 128;
/// Positions of one product of a tile of weights with a tile of V.
const STEP: usize = 2 * LANES;
/// Positions whose scores are computed at once, a register each sixteen.
const SCORES: usize = 4 * LANES;
/// Dimensions of one product of a tile of K with a tile of Q.
const CHUNK: usize = 2 * LANES;
/// Numbers of 32 bits in a tile register.
const TILE_LEN: usize = LANES * LANES;
/// Bytes of it.
const TILE_BYTES: usize = 4 * TILE_LEN;
/// Numbers of 32 bits in the scores and in the weights of a block.
const SCORES_LEN: usize = TILE * LANES;
const WEIGHTS_LEN: usize = TILE / STEP * TILE_LEN;
/// What V is where nothing is seen.
static ZEROS: [u16; MAX_HEAD_DIM] = [0; MAX_HEAD_DIM];

const _: () = assert!(PARTITION.is_multiple_of(TILE) && TILE.is_multiple_of(SCORES) && SCORES.is_multiple_of(STEP));

/// Softmax of a unit's queries over some positions. Unused lanes of the last block have states too.
#[derive(Clone, Copy)]
struct State {
    /// `[blocks][chunks][2][16 queries][16]` weighted sum of V, as [`Work::load_values`] orders its dimensions.
    acc: *mut f32,
    /// `[blocks][16 queries]` largest score, times log2 e.
    max: *mut f32,
    /// `[blocks][16 queries]` sum of the weights `2^(score - max)`.
    sum: *mut f32,
}

/// A member's scratch memory, cut up. All begins at 64-byte boundaries.
struct Scratch {
    /// `[blocks][chunks][16 pairs of dimensions][16 queries]` pairs of bfloat16.
    queries: *mut u32,
    /// `[TILE][chunks * CHUNK]` bfloat16, where K cannot be used as it lies in the cache.
    keys: *mut u32,
    /// `[TILE / STEP][chunks][2][16 pairs of positions][16 dimensions]` pairs of bfloat16.
    values: *mut u32,
    /// `[2][TILE][16 queries]` scores of two blocks.
    scores: *mut f32,
    /// `[2][TILE / STEP][16 queries][16 pairs of positions]` pairs of bfloat16, of two blocks.
    weights: *mut u32,
    /// `[2][blocks][16 queries]`: the positions from which and up to which a query sees.
    visible: *mut i32,
    partition: *mut f32,
    total: *mut f32,
}

fn num_chunks(call: &Attention<'_>) -> usize {
    call.shape.head_dim.div_ceil(CHUNK)
}

/// Floats of scratch memory that a member needs.
pub(super) fn scratch_len(call: &Attention<'_>) -> usize {
    let queries = MAX_QUERIES.max(call.group()).next_multiple_of(LANES);
    let dim = num_chunks(call) * CHUNK;
    queries * dim / 2 + TILE * dim + 2 * (SCORES_LEN + WEIGHTS_LEN) + 2 * queries + 2 * call.state_len(queries)
}

impl Scratch {
    /// # Safety
    /// `scratch_len(call)` floats lie at `at`.
    unsafe fn at(at: *mut f32, call: &Attention<'_>) -> Self {
        let queries = MAX_QUERIES.max(call.group()).next_multiple_of(LANES);
        let dim = num_chunks(call) * CHUNK;
        // SAFETY: the caller's; the offsets add up to `scratch_len`.
        unsafe {
            let keys = at.add(queries * dim / 2);
            let values = keys.add(TILE * dim / 2);
            let scores = values.add(TILE * dim / 2);
            let weights = scores.add(2 * SCORES_LEN);
            let visible = weights.add(2 * WEIGHTS_LEN);
            let partition = visible.add(2 * queries);
            let total = partition.add(call.state_len(queries));
            let (keys, values, weights) = (keys.cast(), values.cast(), weights.cast());
            let (queries, visible) = (at.cast(), visible.cast());
            Self { queries, keys, values, scores, weights, visible, partition, total }
        }
    }
}

/// Does `part` of the unit. `next` is what this member does then.
///
/// # Safety
/// AMX and all of AVX-512 that [`Isa`](super::Isa) names are available; the KV cache is bfloat16. `scratch` and what
/// `part` points to are large enough and nobody else's; the call's tensors and block tables fit its shape.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn run(call: &Attention<'_>, unit: &Unit, next: Option<&Unit>, scratch: *mut f32, part: Part) {
    let num_queries = unit.num_rows * call.group();
    let (num_blocks, num_chunks) = (num_queries.div_ceil(LANES), num_chunks(call));
    // SAFETY: the caller's.
    let scratch = unsafe { Scratch::at(scratch, call) };
    let work = Work { call, unit, next, scratch, num_queries, num_blocks, num_chunks };
    // SAFETY: the caller's; the scratch memory has room for two states.
    unsafe {
        let (own, total) = (work.state(work.scratch.partition), work.state(work.scratch.total));
        match part {
            Part::Partition(partition, state) => {
                let _tiles = Tiles::configure(LANES, LANES);
                work.load_queries();
                work.partition(partition, work.state(state));
            }
            Part::Whole => {
                let _tiles = Tiles::configure(LANES, LANES);
                work.load_queries();
                work.partition(unit.first_partition, total);
                for partition in 1..unit.num_partitions {
                    work.partition(unit.first_partition + partition, own);
                    work.merge(own, total);
                }
                work.write(total);
            }
            Part::Merge(partials) => {
                let state = |i: usize| work.state(partials.add(i * call.state_len(num_queries)).cast_mut());
                for i in 1..unit.num_partitions {
                    work.merge(state(i), state(0));
                }
                work.write(state(0));
            }
        }
    }
}

struct Work<'a> {
    call: &'a Attention<'a>,
    unit: &'a Unit,
    next: Option<&'a Unit>,
    scratch: Scratch,
    num_queries: usize,
    /// Blocks of 16 queries.
    num_blocks: usize,
    /// Head size in chunks of [`CHUNK`] dimensions.
    num_chunks: usize,
}

/// The positions of a tile that the unit sees, and where their K and V lie.
struct Positions {
    /// First position of the tile.
    start: usize,
    /// Positions that some query of the unit sees, within the tile and the partition.
    from: usize,
    to: usize,
    /// Rows in the cache without the head's offset; positions that no query sees have the row of one that is seen.
    rows: [*const u8; TILE],
    /// Sixteen rows of K each, and the bytes from row to row.
    keys: [*const u8; TILE / LANES],
    key_bytes: usize,
}

/// Which positions the queries of a block see.
struct Visible {
    from: __m512i,
    to: __m512i,
    /// Positions that all of them see.
    common: Range<usize>,
}

impl Visible {
    /// Whether all queries see all positions of a step.
    fn whole(&self, start: usize) -> bool {
        self.common.start <= start && start + STEP <= self.common.end
    }

    /// The queries that see `position`.
    #[target_feature(enable = "avx512f")]
    fn mask(&self, position: usize) -> __mmask16 {
        let position = _mm512_set1_epi32(position as i32);
        _mm512_cmple_epi32_mask(self.from, position) & _mm512_cmpgt_epi32_mask(self.to, position)
    }
}

/// `2^x` to about 2 ulp; 0 for -∞.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2(x: __m512) -> __m512 {
    const FLOOR: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    // The best of the 5th degree on 0..1 that is 1 at 0; its error is 8.3e-8.
    let r = _mm512_reduce_ps::<FLOOR>(x);
    let mut p = _mm512_set1_ps(0.001_867_133_3);
    for c in [0.009_017_023, 0.055_799_916, 0.240_164_44, 0.693_151_3, 1.0] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, x)
}

/// What a state is multiplied with when its maximum, `-∞` if it is empty, moves from `old` to `new`: exactly 1 where it
/// does not move, 0 where nothing was seen.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn factor(old: __m512, new: __m512) -> __m512 {
    // The second operand is taken where the first one is ∞ - ∞.
    exp2(_mm512_max_ps(_mm512_sub_ps(old, new), _mm512_set1_ps(-1000.0)))
}

/// The first `n` of 32 lanes.
fn first_lanes(n: usize) -> u32 {
    if n >= 32 { !0 } else { (1 << n) - 1 }
}

// SAFETY (all blocks in this impl): `run`'s contract. Blocks are below `num_blocks`, chunks below `num_chunks`, positions
// in a tile below `TILE`, for which scratch memory and states have room.
impl Work<'_> {
    /// The state that lies at `at`.
    fn state(&self, at: *mut f32) -> State {
        let queries = self.num_blocks * LANES;
        let max = at.wrapping_add(queries * self.num_chunks * CHUNK);
        State { acc: at, max, sum: max.wrapping_add(queries) }
    }

    /// Where the scores of a block are while it is at work: two blocks are at a time.
    fn scores_of(&self, block: usize) -> *mut f32 {
        self.scratch.scores.wrapping_add(block % 2 * SCORES_LEN)
    }

    /// Where its weights are.
    fn weights_of(&self, block: usize) -> *mut u32 {
        self.scratch.weights.wrapping_add(block % 2 * WEIGHTS_LEN)
    }

    /// Row of the batch and query head of query `i`.
    fn row_and_head(&self, i: usize) -> (usize, usize) {
        let group = self.call.group();
        (self.unit.seq.first_row + self.unit.first_row + i / group, self.unit.kv_head * group + i % group)
    }

    /// Rounds the queries to bfloat16 and lays them out for the products; notes what they see. Unused lanes are 0, and
    /// see what the last query sees.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn load_queries(&self) {
        let shape = &self.call.shape;
        let stride = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        for block in 0..self.num_blocks {
            let mut at = [None; LANES];
            for (lane, at) in at.iter_mut().enumerate() {
                let i = block * LANES + lane;
                let (from, to) =
                    self.unit.visible(i.min(self.num_queries - 1) / self.call.group(), self.call.shape.window);
                if i < self.num_queries {
                    let (row, head) = self.row_and_head(i);
                    *at = Some(unsafe { self.call.qkv.as_ptr().add(row * stride + head * shape.head_dim) });
                }
                unsafe {
                    *self.scratch.visible.add(i) = from as i32;
                    *self.scratch.visible.add(self.num_blocks * LANES + i) = to as i32;
                }
            }
            for chunk in 0..self.num_chunks {
                let mask = first_lanes(shape.head_dim - chunk * CHUNK);
                let mut rows = [_mm512_setzero_ps(); LANES];
                for (row, at) in rows.iter_mut().zip(at) {
                    let Some(at) = at else { continue };
                    unsafe {
                        let low = _mm512_maskz_loadu_ps(mask as u16, at.add(chunk * CHUNK));
                        let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, at.wrapping_add(chunk * CHUNK + LANES));
                        *row = std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low));
                    }
                }
                unsafe {
                    transpose(&mut rows);
                    let to = self.scratch.queries.add((block * self.num_chunks + chunk) * TILE_LEN);
                    for (i, row) in rows.iter().enumerate() {
                        _mm512_store_ps(to.add(i * LANES).cast(), *row);
                    }
                }
            }
        }
    }

    /// What the queries of a block see.
    #[target_feature(enable = "avx512f")]
    unsafe fn visible(&self, block: usize) -> Visible {
        unsafe {
            let from = self.scratch.visible.add(block * LANES);
            let to = from.add(self.num_blocks * LANES);
            let common = *from.add(LANES - 1) as usize..*to as usize;
            Visible { from: _mm512_loadu_si512(from.cast()), to: _mm512_loadu_si512(to.cast()), common }
        }
    }

    /// The softmax over the positions of one partition.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn partition(&self, partition: usize, state: State) {
        let queries = self.num_blocks * LANES;
        unsafe {
            state.acc.write_bytes(0, queries * self.num_chunks * CHUNK);
            for i in 0..queries {
                *state.max.add(i) = f32::NEG_INFINITY;
                *state.sum.add(i) = 0.0;
            }
        }
        let (from, to) = self.unit.any_visible(self.call.shape.window);
        let from = from.max(partition * PARTITION);
        let to = to.min((partition + 1) * PARTITION);
        for tile in from / TILE..to.div_ceil(TILE) {
            unsafe {
                let positions = self.positions(tile * TILE, from, to);
                self.load_values(&positions);
                self.fetch_ahead((tile + 1) * TILE);
                // Products of one block beside the softmax of another: the processor does both at once.
                for i in 0..self.num_blocks + 2 {
                    if i < self.num_blocks {
                        self.scores(i, &positions);
                    }
                    if i > 0 && i <= self.num_blocks {
                        self.softmax(i - 1, &positions, state);
                    }
                    if i > 1 {
                        self.add_values(i - 2, &positions, state);
                    }
                }
            }
        }
    }

    /// Finds the rows of the tile that begins at `start`, and gathers those of K if they do not lie as products need
    /// them.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn positions(&self, start: usize, from: usize, to: usize) -> Positions {
        let Self { call, unit, .. } = self;
        let (from, to) = (from.max(start), to.min(start + TILE));
        let layout = &call.kv.layout;
        let (block_size, block_bytes, row_bytes) = (layout.block_size, layout.block_bytes(), 2 * call.shape.head_dim);
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let block_at = |index: usize| call.kv.device.as_ptr().wrapping_add(table[index] as usize * block_bytes);
        let mut rows = [std::ptr::null(); TILE];
        let (mut index, mut slot) = (from / block_size, from % block_size);
        let mut block = block_at(index);
        for (position, row) in (start..).zip(&mut rows) {
            *row = block.wrapping_add(slot * row_bytes);
            if position >= from && position + 1 < to {
                slot += 1;
                if slot == block_size {
                    (index, slot) = (index + 1, 0);
                    block = block_at(index);
                }
            }
        }
        let offset = call.kv.head_offset(call.layer, false, unit.kv_head);
        let mut keys = [std::ptr::null(); TILE / LANES];
        if block_size.is_multiple_of(LANES) && call.shape.head_dim.is_multiple_of(CHUNK) {
            // Slots of the block that are not written yet are read too; their scores are masked.
            for (i, keys) in keys.iter_mut().enumerate() {
                let position = (start + i * LANES).clamp(from, to - 1) / LANES * LANES;
                let row = offset + position % block_size * row_bytes;
                *keys = block_at(position / block_size).wrapping_add(row);
            }
            return Positions { start, from, to, rows, keys, key_bytes: row_bytes };
        }
        let key_bytes = 2 * self.num_chunks * CHUNK;
        let gathered = self.scratch.keys.cast::<u8>();
        for (i, row) in rows.iter().enumerate() {
            for chunk in 0..self.num_chunks {
                let mask = first_lanes(call.shape.head_dim - chunk * CHUNK);
                let at = 2 * chunk * CHUNK;
                unsafe {
                    let key = _mm512_maskz_loadu_epi16(mask, row.wrapping_add(offset + at).cast());
                    _mm512_store_si512(gathered.add(i * key_bytes + at).cast(), key);
                }
            }
        }
        for (i, keys) in keys.iter_mut().enumerate() {
            *keys = gathered.wrapping_add(i * LANES * key_bytes);
        }
        Positions { start, from, to, rows, keys, key_bytes }
    }

    /// Lays V out for the products. The two halves of a chunk of dimensions are those that a 128-bit lane has low and
    /// high, which is how pairs of positions come about in one instruction; [`Self::write`] puts them in order.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load_values(&self, positions: &Positions) {
        let offset = self.call.kv.head_offset(self.call.layer, true, self.unit.kv_head);
        let seen = positions.from - positions.start..positions.to - positions.start;
        let row = |i: usize| {
            if seen.contains(&i) { positions.rows[i].wrapping_add(offset) } else { ZEROS.as_ptr().cast() }
        };
        for pair in seen.start / STEP * LANES..seen.end.div_ceil(STEP) * LANES {
            let rows = [row(2 * pair), row(2 * pair + 1)];
            for chunk in 0..self.num_chunks {
                let mask = first_lanes(self.call.shape.head_dim - chunk * CHUNK);
                let at = 2 * chunk * CHUNK;
                unsafe {
                    let even = _mm512_maskz_loadu_epi16(mask, rows[0].wrapping_add(at).cast());
                    let odd = _mm512_maskz_loadu_epi16(mask, rows[1].wrapping_add(at).cast());
                    let tile = (pair / LANES * self.num_chunks + chunk) * 2;
                    let to = self.scratch.values.add(tile * TILE_LEN + pair % LANES * LANES);
                    _mm512_store_si512(to.cast(), _mm512_unpacklo_epi16(even, odd));
                    _mm512_store_si512(to.add(TILE_LEN).cast(), _mm512_unpackhi_epi16(even, odd));
                }
            }
        }
    }

    /// Fetches into the cache what this member reads next: the tile from `start` on, or the first one of the next unit.
    /// Blocks lie anywhere, so the processor does not find them by itself.
    fn fetch_ahead(&self, start: usize) {
        let window = self.call.shape.window;
        let (_, to) = self.unit.any_visible(window);
        if start < to {
            self.fetch(self.unit, start..to.min(start + TILE));
        } else if let Some(next) = self.next {
            let (from, to) = next.any_visible(window);
            self.fetch(next, from..to.min(from / TILE * TILE + TILE));
        }
    }

    fn fetch(&self, unit: &Unit, positions: Range<usize>) {
        const LINE_BYTES: usize = 64;
        let call = self.call;
        let layout = &call.kv.layout;
        let row_bytes = 2 * layout.head_dim;
        let offsets = [false, true].map(|value| call.kv.head_offset(call.layer, value, unit.kv_head));
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let blocks = positions.start / layout.block_size..positions.end.div_ceil(layout.block_size);
        for (index, block) in blocks.clone().zip(&table[blocks]) {
            let slots = positions.end.min((index + 1) * layout.block_size) - index * layout.block_size;
            let block = call.kv.device.as_ptr().wrapping_add(*block as usize * layout.block_bytes());
            for offset in offsets {
                for at in (0..slots * row_bytes).step_by(LINE_BYTES) {
                    // SAFETY: a hint, which reads nothing.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(offset + at).cast()) };
                }
            }
        }
    }

    /// The steps of the tile in which a query of the block sees something.
    unsafe fn steps(&self, block: usize, positions: &Positions) -> Range<usize> {
        unsafe {
            let from = *self.scratch.visible.add(block * LANES) as usize;
            let to = *self.scratch.visible.add((self.num_blocks + block) * LANES + LANES - 1) as usize;
            let (from, to) = (from.max(positions.from), to.min(positions.to));
            if from >= to {
                return 0..0;
            }
            (from - positions.start) / STEP..(to - positions.start).div_ceil(STEP)
        }
    }

    /// Turns the scores of a block into weights; moves maximum and sum on, and what was summed up of V with them.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn softmax(&self, block: usize, positions: &Positions, state: State) {
        unsafe {
            let steps = self.steps(block, positions);
            if steps.is_empty() {
                return;
            }
            let visible = self.visible(block);
            let scale = self.scale_scores(block, &steps);
            let (max, sum) = (state.max.add(block * LANES), state.sum.add(block * LANES));
            let old_max = _mm512_loadu_ps(max);
            let tile_max = self.max_score(block, positions.start, &steps, &visible);
            let new_max = _mm512_max_ps(_mm512_mul_ps(tile_max, _mm512_set1_ps(scale)), old_max);
            let factor = factor(old_max, new_max);
            let mut weights = _mm512_setzero_ps();
            for step in steps {
                let start = positions.start;
                weights = if visible.whole(start + step * STEP) {
                    self.weights::<false>(block, start, step, &visible, scale, new_max, weights)
                } else {
                    self.weights::<true>(block, start, step, &visible, scale, new_max, weights)
                };
            }
            _mm512_storeu_ps(max, new_max);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), factor, weights));
            if _mm512_cmpneq_ps_mask(old_max, new_max) != 0 {
                self.rescale(block, factor, state);
            }
        }
    }

    /// The scores of a block: in the steps in which it sees something, and in some around them.
    unsafe fn scores(&self, block: usize, positions: &Positions) {
        const STEPS: usize = SCORES / STEP;
        let steps = unsafe { self.steps(block, positions) };
        if steps.is_empty() {
            return;
        }
        let queries = self.scratch.queries.wrapping_add(block * self.num_chunks * TILE_LEN);
        for group in steps.start / STEPS..steps.end.div_ceil(STEPS) {
            let keys = std::array::from_fn(|i| positions.keys[group * SCORES / LANES + i]);
            unsafe {
                let scores = self.scores_of(block).add(group * SCORES * LANES);
                products::scores(queries, self.num_chunks, keys, positions.key_bytes, scores);
            }
        }
    }

    /// Returns the factor that turns what is in the scores' place into powers of 2. It is positive; what cannot be
    /// done by it is done here.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn scale_scores(&self, block: usize, steps: &Range<usize>) -> f32 {
        let scale = self.call.shape.scale;
        let softcap = self.call.shape.softcap;
        if softcap.is_none() && scale > 0.0 {
            return scale * LOG2_E;
        }
        let (one, two) = (_mm512_set1_ps(1.0), _mm512_set1_ps(2.0));
        for position in steps.start * STEP..steps.end * STEP {
            unsafe {
                let at = self.scores_of(block).add(position * LANES);
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
        LOG2_E
    }

    /// Each query's largest score.
    #[target_feature(enable = "avx512f")]
    unsafe fn max_score(&self, block: usize, start: usize, steps: &Range<usize>, visible: &Visible) -> __m512 {
        let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
        for step in steps.clone() {
            let scores = self.scores_of(block).wrapping_add(step * STEP * LANES);
            let start = start + step * STEP;
            unsafe {
                if visible.whole(start) {
                    for i in (0..STEP).step_by(max.len()) {
                        for (j, max) in max.iter_mut().enumerate() {
                            *max = _mm512_max_ps(_mm512_load_ps(scores.add((i + j) * LANES)), *max);
                        }
                    }
                } else {
                    for i in 0..STEP {
                        let score = _mm512_load_ps(scores.add(i * LANES));
                        max[0] = _mm512_mask_max_ps(max[0], visible.mask(start + i), score, max[0]);
                    }
                }
            }
        }
        _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]))
    }

    /// Turns the scores of a step into weights, and adds them to each query's `sum`.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
    unsafe fn weights<const MASKED: bool>(
        &self,
        block: usize,
        start: usize,
        step: usize,
        visible: &Visible,
        scale: f32,
        max: __m512,
        mut sum: __m512,
    ) -> __m512 {
        /// Two bfloat16 of 1.
        const ONES: i32 = 0x3f80_3f80;
        let (scale, ones) = (_mm512_set1_ps(scale), _mm512_set1_epi32(ONES));
        let pair_up = {
            let mut order = [0u16; 2 * LANES];
            for (i, word) in order.iter_mut().enumerate() {
                *word = (i / 2 + i % 2 * LANES) as u16;
            }
            unsafe { _mm512_loadu_si512(order.as_ptr().cast()) }
        };
        let mut pairs = [_mm512_setzero_ps(); LANES];
        for (i, pair) in pairs.iter_mut().enumerate() {
            let mut weights = [_mm512_setzero_ps(); 2];
            for (j, weight) in weights.iter_mut().enumerate() {
                let position = step * STEP + 2 * i + j;
                let score = unsafe { _mm512_load_ps(self.scores_of(block).add(position * LANES)) };
                *weight = exp2(_mm512_fmsub_ps(score, scale, max));
                if MASKED {
                    *weight = _mm512_maskz_mov_ps(visible.mask(start + position), *weight);
                }
            }
            // SAFETY: the types differ in name only.
            unsafe {
                let halves = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
                let words = _mm512_permutexvar_epi16(pair_up, std::mem::transmute::<__m512bh, __m512i>(halves));
                let ones = std::mem::transmute::<__m512i, __m512bh>(ones);
                sum = _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512i, __m512bh>(words), ones);
                *pair = _mm512_castsi512_ps(words);
            }
        }
        unsafe {
            transpose(&mut pairs);
            let to = self.weights_of(block).add(step * TILE_LEN);
            for (i, row) in pairs.iter().enumerate() {
                _mm512_store_ps(to.add(i * LANES).cast(), *row);
            }
        }
        sum
    }

    /// Multiplies each query's sum of V with its factor.
    #[target_feature(enable = "avx512f")]
    unsafe fn rescale(&self, block: usize, factors: __m512, state: State) {
        let mut factor = [0.0f32; LANES];
        unsafe {
            _mm512_storeu_ps(factor.as_mut_ptr(), factors);
            let acc = state.acc.add(block * self.num_chunks * 2 * TILE_LEN);
            for (i, factor) in factor.iter().enumerate() {
                let factor = _mm512_set1_ps(*factor);
                for tile in 0..2 * self.num_chunks {
                    let at = acc.add(tile * TILE_LEN + i * LANES);
                    _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
                }
            }
        }
    }

    /// `acc = acc + weights · V`
    unsafe fn add_values(&self, block: usize, positions: &Positions, state: State) {
        let num_tiles = 2 * self.num_chunks;
        unsafe {
            let steps = self.steps(block, positions);
            if steps.is_empty() {
                return;
            }
            let acc = state.acc.add(block * num_tiles * TILE_LEN);
            let weights = self.weights_of(block).add(steps.start * TILE_LEN);
            let values = self.scratch.values.add(steps.start * num_tiles * TILE_LEN);
            products::add_values(weights, steps.len(), values, num_tiles, acc);
        }
    }

    /// Adds a partition's state to that of the partitions before it. An empty state changes nothing.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn merge(&self, part: State, total: State) {
        for block in 0..self.num_blocks {
            let (mut part_factor, mut total_factor) = ([0.0f32; LANES], [0.0f32; LANES]);
            unsafe {
                let at = |of: *mut f32| of.add(block * LANES);
                let (part_max, total_max) = (_mm512_loadu_ps(at(part.max)), _mm512_loadu_ps(at(total.max)));
                let max = _mm512_max_ps(part_max, total_max);
                let (part_factors, total_factors) = (factor(part_max, max), factor(total_max, max));
                let sum = _mm512_mul_ps(_mm512_loadu_ps(at(total.sum)), total_factors);
                let sum = _mm512_fmadd_ps(_mm512_loadu_ps(at(part.sum)), part_factors, sum);
                _mm512_storeu_ps(at(total.max), max);
                _mm512_storeu_ps(at(total.sum), sum);
                _mm512_storeu_ps(part_factor.as_mut_ptr(), part_factors);
                _mm512_storeu_ps(total_factor.as_mut_ptr(), total_factors);
                let num_tiles = 2 * self.num_chunks;
                for tile in block * num_tiles..(block + 1) * num_tiles {
                    for i in 0..LANES {
                        let offset = tile * TILE_LEN + i * LANES;
                        let before = _mm512_load_ps(total.acc.add(offset));
                        let before = _mm512_mul_ps(before, _mm512_set1_ps(total_factor[i]));
                        let added = _mm512_load_ps(part.acc.add(offset));
                        let sum = _mm512_fmadd_ps(added, _mm512_set1_ps(part_factor[i]), before);
                        _mm512_store_ps(total.acc.add(offset), sum);
                    }
                }
            }
        }
    }

    /// The output: sums of V, divided by the sums of the weights.
    #[target_feature(enable = "avx512f")]
    unsafe fn write(&self, total: State) {
        let shape = &self.call.shape;
        // Fours of dimensions, from the lower and the higher half of a chunk in turn.
        let first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for i in 0..self.num_queries {
            let (row, head) = self.row_and_head(i);
            unsafe {
                let out = self.call.out.get().add((row * shape.num_heads + head) * shape.head_dim);
                let sum = _mm512_set1_ps(*total.sum.add(i));
                let acc = total.acc.add(i / LANES * self.num_chunks * 2 * TILE_LEN + i % LANES * LANES);
                for chunk in 0..self.num_chunks {
                    let mask = first_lanes(shape.head_dim - chunk * CHUNK);
                    let low = _mm512_load_ps(acc.add(2 * chunk * TILE_LEN));
                    let high = _mm512_load_ps(acc.add((2 * chunk + 1) * TILE_LEN));
                    for (half, order) in [first, second].into_iter().enumerate() {
                        let mean = _mm512_div_ps(_mm512_permutex2var_ps(low, order, high), sum);
                        // The sign of a zero may tell of masked positions; there is no -0 after this.
                        let mean = _mm512_add_ps(mean, _mm512_setzero_ps());
                        let mask = (mask >> (half * LANES)) as u16;
                        _mm512_mask_storeu_ps(out.wrapping_add(chunk * CHUNK + half * LANES), mask, mean);
                    }
                }
            }
        }
    }
}
