//! What is done with the heads of `[Q | K | V]`: norms, rotary embedding, and the write into the KV cache.

use super::attention;
use super::elementwise::{CpuNorm, CpuRopeTable, narrow_row};
use super::isa::Isa;
use super::kv_codes;
use super::memory::{CpuKvPools, MAX_HEAD_DIM, Shared};
use super::simd::{LANES, Simd, SimdKernel};
use crate::{AttentionShape, Batch, KvDType, KvLayout};
use std::ops::Range;

/// The heads of a batch's rows.
pub(super) struct HeadFinish<'a> {
    batch: &'a Batch,
    kv: &'a CpuKvPools,
    /// The device pool of `kv`.
    pool: Shared<u8>,
    shape: &'a AttentionShape,
    /// The norms of each head of Q, and of each head of K.
    norms: Option<[CpuNorm<'a>; 2]>,
    rope: Option<&'a CpuRopeTable>,
    layer: usize,
}

impl<'a> HeadFinish<'a> {
    /// `cols` are the columns of `[Q | K | V]`.
    pub fn new(
        batch: &'a Batch,
        kv: &'a mut CpuKvPools,
        shape: &'a AttentionShape,
        norms: Option<[CpuNorm<'a>; 2]>,
        rope: Option<&'a CpuRopeTable>,
        layer: usize,
        cols: usize,
    ) -> Self {
        let pool = Shared::new(kv.device.as_mut_ptr());
        kv.check_shape(shape, layer, cols);
        Self { batch, kv, pool, shape, norms, rope, layer }
    }

    /// Finishes the heads in `columns` of `rows` of `qkv`.
    ///
    /// # Safety
    /// `qkv` holds the batch's rows, `columns` are whole heads of it, and nothing else uses these elements now.
    pub unsafe fn finish(&self, isa: Isa, qkv: *mut f32, rows: Range<usize>, columns: Range<usize>) {
        isa.run(FinishHeads { isa, heads: self, qkv, rows, columns });
    }
}

struct FinishHeads<'a> {
    /// The instruction set that this runs on.
    isa: Isa,
    heads: &'a HeadFinish<'a>,
    qkv: *mut f32,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl SimdKernel for FinishHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let HeadFinish { batch, kv, pool, shape, norms, rope, layer } = *self.heads;
        let KvLayout { head_dim, block_size, dtype, .. } = kv.layout;
        let (num_queries, num_kv_heads) = (shape.num_heads, shape.num_kv_heads);
        let cols = (num_queries + 2 * num_kv_heads) * head_dim;
        for row in self.rows {
            let slot = batch.slots[row] as usize;
            let (block, slot) = (slot / block_size * kv.layout.block_bytes(), slot % block_size);
            for index in self.columns.start / head_dim..self.columns.end / head_dim {
                // SAFETY: `HeadFinish::finish`'s contract.
                let head =
                    unsafe { std::slice::from_raw_parts_mut(self.qkv.add(row * cols + index * head_dim), head_dim) };
                if index < num_queries + num_kv_heads {
                    if let Some(norms) = norms {
                        norm_head(simd, norms[usize::from(index >= num_queries)], head);
                    }
                    if let Some(rope) = rope {
                        rope.rotate(head, batch.positions[row] as usize).run(simd);
                    }
                }
                let Some(kv_head) = index.checked_sub(num_queries) else { continue };
                let (value, kv_head) = (kv_head >= num_kv_heads, kv_head % num_kv_heads);
                let at = block + kv.head_offset(layer, value, kv_head);
                if kv.grouped {
                    let last = value && ends_new_group(&batch.slots, row);
                    // SAFETY: as below. With `last`, the slots behind this one are not in use yet.
                    unsafe { attention::write_grouped(self.isa, head, value, slot, last, pool.get().add(at)) };
                    continue;
                }
                let part = pool.get().wrapping_add(at);
                // SAFETY (here and below): `Backend::begin` checked the slot, and `CpuKvPools::check_shape` the layer
                // and the heads. Two rows never share a slot.
                match dtype {
                    KvDType::Codes(codes) => unsafe {
                        kv_codes::write(head, codes, value, &kv.layout, slot, part);
                    },
                    KvDType::Plain(dtype) => {
                        let bytes = head_dim * dtype.size_bytes();
                        let to = unsafe { std::slice::from_raw_parts_mut(part.add(slot * bytes), bytes) };
                        narrow_row(head, dtype, to).run(simd);
                    }
                }
            }
        }
    }
}

/// Whether the row's slot is the last one written so far in a group of slots that this batch began.
fn ends_new_group(slots: &[u32], row: usize) -> bool {
    let slot = slots[row];
    let in_group = slot as usize % LANES;
    slots.get(row + 1) != Some(&(slot + 1)) && row >= in_group && slots[row - in_group] == slot - in_group as u32
}

/// Norms a head in place.
#[inline(always)]
fn norm_head<S: Simd>(simd: S, norm: CpuNorm<'_>, head: &mut [f32]) {
    let mut head_in = [0.0; MAX_HEAD_DIM];
    let head_in = &mut head_in[..head.len()];
    head_in.copy_from_slice(head);
    norm.row(head_in, head).run(simd);
}

/// Norms the heads of Q and of K in a row.
pub(super) struct NormHeads<'a> {
    pub row: &'a mut [f32],
    pub shape: &'a AttentionShape,
    pub norms: [CpuNorm<'a>; 2],
}

impl SimdKernel for NormHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { row, shape, norms } = self;
        let heads = row.chunks_exact_mut(shape.head_dim).take(shape.num_heads + shape.num_kv_heads);
        for (index, head) in heads.enumerate() {
            norm_head(simd, norms[usize::from(index >= shape.num_heads)], head);
        }
    }
}
