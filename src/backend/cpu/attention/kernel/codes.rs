//! K and V of a tile from a KV cache of codes, and the attention over them in float32.

use super::super::super::kv_codes;
use super::super::super::simd::{LANES, Simd};
use super::super::unit::TILE;
use super::{CacheCodes, Code, UnitKernel};
use std::ops::Range;

/// Where the codes and scales of 16 positions lie.
#[derive(Clone, Copy)]
pub(super) struct GroupCodes {
    /// `[head_dim / 4][16 positions][4 dimensions]`
    pub keys: *const u8,
    /// `[4][head_dim][4 positions]`
    pub values: *const u8,
    /// `[16]` of bfloat16
    pub key_scales: *const u16,
    /// `[16]` of bfloat16
    pub value_scales: *const u16,
}

/// The groups of a tile.
pub(super) type TileCodes = [GroupCodes; TILE / LANES];

// SAFETY (all blocks in this impl): as in `super`. What the scratch memory has is said in `CodesScratch`.
impl<K: Code> UnitKernel<'_, CacheCodes<K>> {
    /// Finds K and V of positions `from..to` in a tile. The tile's other positions have codes and scales of any bits.
    #[inline(always)]
    pub(super) unsafe fn find(&self, tile: usize, from: usize, to: usize) -> TileCodes {
        let start = tile * TILE;
        let (from, to) = (from.max(start), to.min(start + TILE));
        let seen = (from - start) / LANES..(to - start).div_ceil(LANES);
        let in_groups = kv_codes::in_groups(&self.call.kv.layout);
        let group = |index: usize| {
            let first = start + index * LANES;
            match in_groups {
                true => self.group(first),
                false => unsafe { self.gather(index, first, from.max(first)..to.min(first + LANES)) },
            }
        };
        let (first, last) = (group(seen.start), group(seen.end - 1));
        [first, last]
    }

    /// The groups of the next tile, to be prefetched; those of this one if there is none, or if the cache is in rows.
    #[inline(always)]
    pub(super) unsafe fn find_ahead(&self, tile: usize, to: usize, codes: TileCodes) -> TileCodes {
        if (tile + 1) * TILE < to && kv_codes::in_groups(&self.call.kv.layout) {
            unsafe { self.find(tile + 1, (tile + 1) * TILE, to) }
        } else {
            codes
        }
    }

    /// A group of the cache.
    #[inline(always)]
    fn group(&self, first: usize) -> GroupCodes {
        let [(keys, key_scales), (values, value_scales)] = [false, true].map(|value| self.vector(first, value));
        GroupCodes { keys, values, key_scales, value_scales }
    }

    /// The codes and the scale of a position's K or V. The codes are a row if the cache is not in groups.
    #[inline(always)]
    fn vector(&self, position: usize, value: bool) -> (*const u8, *const u16) {
        let Self { call, unit, .. } = self;
        let (kv, layout) = (call.kv, &call.kv.layout);
        let (block_size, dim) = (layout.block_size, layout.head_dim);
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let block = table[position / block_size] as usize * layout.block_bytes();
        let head = kv.device.as_ptr().wrapping_add(block + kv.head_offset(call.layer, value, unit.kv_head));
        let slot = position % block_size;
        (head.wrapping_add(slot * dim), head.wrapping_add(block_size * dim).cast::<u16>().wrapping_add(slot))
    }

    /// Lays out a group that the cache stores in rows. Positions that are not `seen` are copies of these.
    #[inline(always)]
    unsafe fn gather(&self, index: usize, first: usize, seen: Range<usize>) -> GroupCodes {
        let (scratch, dim) = (self.scratch.codes, self.call.shape.head_dim);
        unsafe {
            let keys = scratch.groups.add(2 * index * LANES * dim);
            let values = keys.add(LANES * dim);
            let key_scales = scratch.scales.add(2 * index * LANES);
            let value_scales = key_scales.add(LANES);
            for i in 0..LANES {
                let position = (first + i).clamp(seen.start, seen.end - 1);
                let (row, scale) = self.vector(position, false);
                for quad in 0..dim / 4 {
                    let to = keys.add((quad * LANES + i) * 4).cast::<[u8; 4]>();
                    to.write_unaligned(row.add(4 * quad).cast::<[u8; 4]>().read_unaligned());
                }
                *key_scales.add(i) = scale.read_unaligned();
                let (row, scale) = self.vector(position, true);
                let to = values.add(i / 4 * 4 * dim + i % 4);
                for d in 0..dim {
                    *to.add(4 * d) = *row.add(d);
                }
                *value_scales.add(i) = scale.read_unaligned();
            }
            GroupCodes { keys, values, key_scales, value_scales }
        }
    }

    /// Reads the codes of a tile as float32, without their scales, and prefetches those of `ahead`.
    #[inline(always)]
    pub(super) unsafe fn widen<S: Simd>(&self, simd: S, codes: &TileCodes, ahead: &TileCodes) {
        let (head_dim, dim) = (self.call.shape.head_dim, self.call.padded_dim());
        unsafe {
            for (half, (group, ahead)) in codes.iter().zip(ahead).enumerate() {
                for d in (0..head_dim).step_by(4) {
                    let four = simd.load_ints(group.keys.add(d * LANES));
                    simd.prefetch(ahead.keys.wrapping_add(d * LANES));
                    for i in 0..4 {
                        let to = self.scratch.keys.add((d + i) * TILE + half * LANES);
                        simd.store(to, K::widen(simd, four, i as u32));
                    }
                }
                for slot in (0..LANES).step_by(4) {
                    for d in (0..dim).step_by(LANES) {
                        let at = slot * head_dim + 4 * d;
                        let four = simd.load_ints(group.values.add(at));
                        simd.prefetch(ahead.values.wrapping_add(at));
                        for i in 0..4 {
                            let to = self.scratch.values.add((half * LANES + slot + i) * dim + d);
                            simd.store(to, K::widen(simd, four, i as u32));
                        }
                    }
                }
            }
        }
    }

    /// Multiplies the numbers of the tile's positions, of all queries, by the scales of K or of V.
    #[inline(always)]
    pub(super) unsafe fn scale<S: Simd>(&self, simd: S, scales: [*const u16; TILE / LANES]) {
        unsafe {
            let scales = [simd.load_bf16(scales[0]), simd.load_bf16(scales[1])];
            for i in 0..self.num_queries() {
                let at = self.scratch.weights.add(i * TILE);
                simd.store(at, simd.mul(simd.load(at), scales[0]));
                simd.store(at.add(LANES), simd.mul(simd.load(at.add(LANES)), scales[1]));
            }
        }
    }
}
