//! The layout of K, V and Q that the products read.
//!
//! They read groups of positions ([`groups`](crate::cpu::attention::groups)): sixteen lines of K, or eight of V, fill a
//! tile register. If the blocks of the KV cache are not whole groups, each tile is laid out when it is read.

use super::geometry::{CHUNK, GROUP, GROUPS, LINE_BYTES, TILE, TILE_LEN, first_lanes};
use super::{GroupAddresses, Positions, TiledUnit, has_codes};
use crate::cpu::memory::MAX_HEAD_DIM;
use crate::cpu::simd::{LANES, transpose};
use std::arch::x86_64::*;
use std::ops::Range;

/// The V of positions that no query sees.
static ZEROS: [u16; MAX_HEAD_DIM] = [0; MAX_HEAD_DIM];

/// Writes a position's K or V, rounded to bfloat16, to slot `slot` of the head's part of a block. With `last`, it
/// clears V in the group's slots behind it: these may hold anything, and V must be finite even where its weight is 0.
///
/// # Safety
/// The instructions are available. The cache is in groups. Nothing else uses the slot now, nor, with `last`, the slots
/// behind it.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(in super::super) unsafe fn write_row(row: &[f32], value: bool, slot: usize, last: bool, head: *mut u8) {
    let (group, slot) = (slot / GROUP, slot % GROUP);
    // SAFETY (here and below): the caller's promise; a group is `2 * GROUP` bytes for each dimension.
    let group = unsafe { head.add(group * 2 * GROUP * row.len()) };
    if !value {
        let lines = _mm512_mullo_epi32(
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
            _mm512_set1_epi32(LINE_BYTES as i32),
        );
        for (chunk, row) in row.chunks_exact(CHUNK).enumerate() {
            unsafe {
                let pairs = narrow(_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(row.as_ptr().add(LANES)));
                _mm512_i32scatter_epi32::<1>(group.add(chunk * LANES * LINE_BYTES + 4 * slot).cast(), lines, pairs);
            }
        }
        return;
    }
    let odd = slot % 2;
    for (tile, row) in row.chunks_exact(LANES).enumerate() {
        unsafe {
            let line = group.add((tile * GROUP / 2 + slot / 2) * LINE_BYTES);
            let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(row.as_ptr())));
            let words = _mm512_cvtepu16_epi32(halves);
            let words = if odd == 1 { _mm512_slli_epi32::<16>(words) } else { words };
            let mask = if last && odd == 0 { !0 } else { 0x5555_5555 << odd };
            _mm512_mask_storeu_epi16(line.cast(), mask, words);
            if last {
                line.add(LINE_BYTES).write_bytes(0, (GROUP / 2 - 1 - slot / 2) * LINE_BYTES);
            }
        }
    }
}

/// Thirty-two numbers as bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn narrow(low: __m512, high: __m512) -> __m512i {
    // SAFETY: the types differ only in name.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// The addresses of the groups that are seen, and one of these for all others.
fn for_all<T>(mut addresses: [*const T; GROUPS], seen: &Range<usize>) -> [*const T; GROUPS] {
    let any = addresses[seen.start];
    addresses[..seen.start].fill(any);
    addresses[seen.end..].fill(any);
    addresses
}

// SAFETY (all blocks in this impl): `run`'s contract. Blocks are below `num_blocks`, chunks below `num_chunks`, and
// positions in a tile below `TILE`; scratch memory has room for these.
impl TiledUnit<'_> {
    /// Rounds the queries to bfloat16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn round_queries(&self) {
        let shape = &self.call.shape;
        for query in 0..self.num_queries {
            unsafe {
                let at = self.query(query);
                let tiles = self.scratch.queries.add(query / LANES * self.num_chunks * TILE_LEN);
                for chunk in 0..self.num_chunks {
                    let mask = first_lanes(shape.head_dim - chunk * CHUNK);
                    let low = _mm512_maskz_loadu_ps(mask as u16, at.add(chunk * CHUNK));
                    let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, at.wrapping_add(chunk * CHUNK + LANES));
                    let to = tiles.add(chunk * TILE_LEN + query % LANES * LANES);
                    _mm512_store_si512(to.cast(), narrow(low, high));
                }
            }
        }
    }

    /// Finds K and V of positions `from..to` of the tile that begins at `start`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn positions(&self, start: usize, from: usize, to: usize) -> Positions {
        let (from, to) = (from.max(start), to.min(start + TILE));
        let (mut keys, mut values) = ([std::ptr::null(); GROUPS], [std::ptr::null(); GROUPS]);
        let (mut key_scales, mut value_scales) = ([std::ptr::null(); GROUPS], [std::ptr::null(); GROUPS]);
        let seen = (from - start) / GROUP..(to - start).div_ceil(GROUP);
        for index in seen.clone() {
            let first = start + index * GROUP;
            let seen = from.max(first)..to.min(first + GROUP);
            if has_codes(self.call) {
                let group = unsafe { self.code_group(first, seen) };
                (keys[index], values[index]) = (group.keys, group.values);
                (key_scales[index], value_scales[index]) = (group.key_scales, group.value_scales);
            } else if self.call.kv.grouped {
                (keys[index], values[index]) = self.group(first);
            } else {
                (keys[index], values[index]) = unsafe { self.gather(first, seen) };
            }
        }
        // Several groups are computed at once. Groups that no query sees get any valid address; what is computed from
        // them is not used.
        let groups = GroupAddresses {
            keys: for_all(keys, &seen),
            values,
            key_scales: for_all(key_scales, &seen),
            value_scales: for_all(value_scales, &seen),
        };
        Positions { start, from, to, groups, next: None }
    }

    /// The addresses of K and V of a group in the cache.
    fn group(&self, first: usize) -> (*const u8, *const u8) {
        let (kv, unit) = (self.call.kv, self.unit);
        let block_size = kv.layout.block_size;
        let table = &self.call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let block = table[first / block_size] as usize * kv.layout.block_bytes();
        let in_head = first % block_size * 2 * kv.layout.head_dim;
        let at = |value| {
            kv.device.as_ptr().wrapping_add(block + kv.head_offset(self.call.layer, value, unit.kv_head) + in_head)
        };
        (at(false), at(true))
    }

    /// Lays out a group that the cache stores in rows. Only the positions `seen` are read.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn gather(&self, first: usize, seen: Range<usize>) -> (*const u8, *const u8) {
        let Self { call, unit, .. } = self;
        let layout = &call.kv.layout;
        let (block_size, row_bytes) = (layout.block_size, 2 * layout.head_dim);
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let row = |position: usize, value: bool| {
            let block = table[position / block_size] as usize * layout.block_bytes();
            let in_head = call.kv.head_offset(call.layer, value, unit.kv_head) + position % block_size * row_bytes;
            call.kv.device.as_ptr().wrapping_add(block + in_head)
        };
        // Three tiles are in use at once.
        let index = first / GROUP % (3 * GROUPS) * self.num_chunks * TILE_LEN;
        let (keys, values) = unsafe { (self.scratch.keys.add(index), self.scratch.values.add(index)) };
        for chunk in 0..self.num_chunks {
            let mask = first_lanes(layout.head_dim - chunk * CHUNK);
            let mut rows = [_mm512_setzero_ps(); LANES];
            for (i, to) in rows.iter_mut().enumerate() {
                let at = row((first + i).clamp(seen.start, seen.end - 1), false).wrapping_add(2 * chunk * CHUNK);
                *to = _mm512_castsi512_ps(unsafe { _mm512_maskz_loadu_epi16(mask, at.cast()) });
            }
            unsafe {
                transpose(&mut rows);
                for (i, row) in rows.iter().enumerate() {
                    _mm512_store_ps(keys.add(chunk * TILE_LEN + i * LANES).cast(), *row);
                }
            }
        }
        for pair in 0..GROUP / 2 {
            let [even, odd] = [2 * pair, 2 * pair + 1]
                .map(|i| if seen.contains(&(first + i)) { row(first + i, true) } else { ZEROS.as_ptr().cast() });
            for tile in 0..2 * self.num_chunks {
                let mask = first_lanes(layout.head_dim.saturating_sub(tile * LANES)) as u16;
                let halves = |row: *const u8| unsafe {
                    _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row.wrapping_add(2 * tile * LANES).cast()))
                };
                let both = _mm512_or_si512(halves(even), _mm512_slli_epi32::<16>(halves(odd)));
                unsafe { _mm512_store_si512(values.add((tile * GROUP / 2 + pair) * LANES).cast(), both) };
            }
        }
        (keys.cast(), values.cast())
    }
}
