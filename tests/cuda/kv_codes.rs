//! The bytes of a KV cache of codes: those of the CPU backend for the same K and V.

use crate::support::*;
use pagetide::backend::cpu::CpuBackend;
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::{
    AttentionShape, Backend, Batch, BatchSeq, CodeType, DType, KvDType, KvLayout, NO_SOURCE, TensorRole,
};
use pagetide::ids::{BlockId, KvPlace};
use std::rc::Rc;

const NUM_BLOCKS: usize = 4;

struct Case {
    dtype: DType,
    layout: KvLayout,
    seed: u64,
}

impl Case {
    fn shape(&self) -> AttentionShape {
        let KvLayout { num_kv_heads, head_dim, .. } = self.layout;
        AttentionShape { num_heads: num_kv_heads, num_kv_heads, head_dim, scale: 1.0, softcap: None, window: None }
    }

    fn rows(&self) -> usize {
        self.layout.block_size + 3
    }

    /// Two blocks of tokens, of which the second is not full.
    fn batch(&self) -> Batch {
        let (rows, block_size) = (self.rows(), self.layout.block_size);
        let table = [2_u32, 0];
        let slot = |row: usize| table[row / block_size] * block_size as u32 + (row % block_size) as u32;
        Batch {
            hidden_rows: Vec::new(),
            tokens: vec![0; rows],
            token_sources: vec![NO_SOURCE; rows],
            positions: (0..rows as u32).collect(),
            slots: (0..rows).map(slot).collect(),
            seqs: vec![BatchSeq { first_row: 0, num_rows: rows, num_computed: 0, first_block: 0, num_blocks: 2 }],
            block_tables: table.to_vec(),
            logit_rows: Vec::new(),
        }
    }

    /// Vectors of very different sizes, with elements that are much smaller than others; a zero vector, and vectors
    /// that are not finite.
    fn qkv(&self) -> Vec<f32> {
        let (random, head_dim) = (&mut Random(self.seed), self.layout.head_dim);
        let mut numbers = random.floats(self.rows() * self.shape().qkv_cols(), self.dtype);
        for (i, vector) in numbers.chunks_exact_mut(head_dim).enumerate() {
            let size = 2_f32.powi(random.range(0, 24) as i32 - 12);
            // Quotients of FP8 are subnormal below 2^-15 of the largest element.
            let small = 2_f32.powi(-(random.below(20) as i32));
            let sized = vector.iter().enumerate().map(|(i, x)| x * if i % 3 == 2 { size * small } else { size });
            let sized: Vec<f32> = sized.collect();
            vector.copy_from_slice(&round(&sized, self.dtype));
            match i % 29 {
                3 => vector.fill(0.0),
                7 => vector[head_dim - 1] = f32::NAN,
                11 => vector[0] = f32::NEG_INFINITY,
                _ => {}
            }
        }
        numbers
    }

    /// The blocks that the CPU backend writes, with the codes in rows.
    fn on_cpu(&self) -> Vec<u8> {
        let mut backend = CpuBackend::new(Default::default()).unwrap();
        backend.allocate_kv(self.layout, NUM_BLOCKS, 0).unwrap();
        let mut qkv = backend.tensor(self.rows(), self.shape().qkv_cols(), TensorRole::Activation).unwrap();
        qkv.as_mut_slice().copy_from_slice(&self.qkv());
        backend.begin(&self.batch());
        backend.rope_and_write_kv(&mut qkv, &self.shape(), None, 0);
        let blocks = [2, 0].into_iter().flat_map(|block| backend.device_block(BlockId(block)).to_vec());
        self.in_rows(&blocks.collect::<Vec<u8>>())
    }

    /// The CPU backend keeps the codes of 16 slots in groups: see `backend::cpu::kv_codes`.
    fn in_rows(&self, blocks: &[u8]) -> Vec<u8> {
        let KvLayout { head_dim, block_size, num_kv_heads, .. } = self.layout;
        let mut ordered = blocks.to_vec();
        if !block_size.is_multiple_of(16) {
            return ordered;
        }
        let parts =
            ordered.chunks_exact_mut(self.layout.head_bytes()).zip(blocks.chunks_exact(self.layout.head_bytes()));
        for (i, (ordered, part)) in parts.enumerate() {
            let is_v = i / num_kv_heads % 2 == 1;
            for (at, code) in ordered[..block_size * head_dim].iter_mut().enumerate() {
                let (slot, d) = (at / head_dim, at % head_dim);
                *code = match is_v {
                    true => part[slot / 4 * 4 * head_dim + 4 * d + slot % 4],
                    false => part[slot / 16 * 16 * head_dim + d / 4 * 64 + slot % 16 * 4 + d % 4],
                };
            }
        }
        ordered
    }

    /// The blocks that the kernel writes, after a copy to other blocks.
    fn on_cuda(&self, device: &Rc<dyn Device>) -> Vec<u8> {
        let mut options = options(self.dtype, self.shape().num_heads, self.layout);
        options.max_rows = self.rows();
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(self.layout, NUM_BLOCKS, 0).unwrap();
        let mut qkv = backend.tensor(self.rows(), self.shape().qkv_cols(), TensorRole::Activation).unwrap();
        set(device, &qkv, &self.qkv());
        backend.begin(&self.batch());
        backend.rope_and_write_kv(&mut qkv, &self.shape(), None, 0);
        backend.copy_blocks(&[(BlockId(2), BlockId(1)), (BlockId(0), BlockId(3))]);
        backend.end_step();
        backend.finish_step();
        let mut blocks = vec![0; 2 * self.layout.block_bytes()];
        backend.read_blocks(&[1, 3].map(|block| KvPlace::Device(BlockId(block))), &mut blocks);
        blocks
    }

    fn check_on(&self, device: &dyn Fn(u32) -> Rc<dyn Device>) {
        let expected = self.on_cpu();
        let KvLayout { head_dim, block_size, .. } = self.layout;
        for order in thread_orders() {
            let found = self.on_cuda(&device(order));
            let (part, codes) = (self.layout.head_bytes(), block_size * head_dim);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let in_part = at % part;
                let slot = if in_part < codes { in_part / head_dim } else { (in_part - codes) / 2 };
                // The second block has three tokens.
                let is_written = at < self.layout.block_bytes() || slot < 3;
                assert!(!is_written || found == expected, "{:?}: byte {at}: {found}, not {expected}", self.layout);
            }
        }
    }
}

fn case(i: u64) -> Case {
    let (codes, dtype) = ([CodeType::Int8, CodeType::Fp8][i as usize % 2], DTYPES[i as usize % 3]);
    let random = &mut Random(i);
    let (head_dim, block_size) = (random.pick(&[8, 24, 64, 128]), random.pick(&[8, 16, 24, 32]));
    let layout = KvLayout { num_layers: 1, num_kv_heads: 2, head_dim, block_size, dtype: KvDType::Codes(codes) };
    Case { dtype, layout, seed: i }
}

#[test]
fn the_bytes_are_those_of_the_cpu() {
    parallel(0..8, |i| case(i).check_on(&device));
}

#[test]
fn blocks_that_scales_do_not_fill_are_refused() {
    let Case { dtype, layout, .. } = case(0);
    let layout = KvLayout { block_size: 12, ..layout };
    let error = CudaBackend::new(device(0), options(dtype, 2, layout)).err().expect("12 is no multiple of 8");
    let error = error.to_string();
    assert!(error.contains("cache.block_size = 12") && error.contains("multiple of 8"), "{error}");
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let breakages = [
        (0, "is_finite ?", "true ?"),
        (0, "+ 0xffff) >> 16", "+ 0x7fff) >> 16"),
        (0, ": 0x7fc0", ": 0x7f80"),
        (0, "largest = reduce_warp<Max>(largest);", ""),
        (1, "magnitude < SMALLEST_NORMAL ? subnormal : normal", "normal"),
        (1, "bits >> 24 & 0x80", "0"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (number, from, to) = breakages[i as usize];
        breaks("include/kv_codes.cuh", from, to, |device| case(number).check_on(device));
    });
}
