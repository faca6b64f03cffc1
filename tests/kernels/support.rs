//! Shared by the tests: seeded numbers, checkpoint tensors, batches.

use pagetide_backend::cpu::{CpuBackend, CpuOptions, CpuTensor, Isa};
use pagetide_backend::{Backend, Batch, BatchSeq, CodeType, DType, HostTensor, KvDType, NO_SOURCE, TensorRole};

pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

pub const INT8: KvDType = KvDType::Codes(CodeType::Int8);
pub const FP8: KvDType = KvDType::Codes(CodeType::Fp8);
pub const INT4: KvDType = KvDType::Codes(CodeType::Int4);

/// The types of a KV cache.
pub const KV_DTYPES: [KvDType; 6] =
    [KvDType::Plain(DType::F32), KvDType::Plain(DType::F16), KvDType::Plain(DType::BF16), INT8, FP8, INT4];

/// The instruction sets of this machine, or the one that `KERNEL_ISA` names. AMX is only emulated if it is named.
pub fn isas() -> impl Iterator<Item = Isa> {
    let has_tiles = Isa::detect() == Isa::Amx || wanted_isa().is_some();
    isas_with_tiles(wanted_isa() == Some(Isa::Amx)).filter(move |isa| *isa != Isa::Amx || has_tiles)
}

/// The same and AMX, for tests that are fast enough in emulation.
pub fn isas_and_tiles() -> impl Iterator<Item = Isa> {
    isas_with_tiles(true)
}

fn isas_with_tiles(emulated: bool) -> impl Iterator<Item = Isa> {
    if emulated {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        crate::tile_emulator::install();
    }
    let wanted = wanted_isa();
    assert!(wanted.is_none_or(Isa::is_available), "this machine lacks KERNEL_ISA");
    Isa::ALL.into_iter().filter(move |isa| isa.is_available() && wanted.is_none_or(|wanted| wanted == *isa))
}

fn wanted_isa() -> Option<Isa> {
    std::env::var("KERNEL_ISA").ok().map(|name| name.parse().unwrap())
}

pub fn backend(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(threads), isa: Some(isa) }).unwrap()
}

/// Numbers in [-1, 1), the same for the same seed (SplitMix64).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// From 1 to `max`, with all orders of magnitude equally likely.
    pub fn size(&mut self, max: usize) -> usize {
        let fraction = (f64::from(self.next()) + 1.0) / 2.0;
        ((max as f64 + 1.0).powf(fraction) as usize).clamp(1, max)
    }

    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    pub fn next(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    pub fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

pub fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
    }
}

/// A vector of K or V as a KV cache of this type holds it.
pub fn round_vector(vector: &[f32], dtype: KvDType) -> Vec<f64> {
    let codes = match dtype {
        KvDType::Plain(dtype) => return vector.iter().map(|x| f64::from(round(*x, dtype))).collect(),
        KvDType::Codes(CodeType::Int4) => {
            let rotated = round_to_codes(&rotated(vector), CodeType::Int4);
            return rotated_by_definition(&rotated);
        }
        KvDType::Codes(codes) => codes,
    };
    round_to_codes(vector, codes)
}

fn round_to_codes(vector: &[f32], codes: CodeType) -> Vec<f64> {
    let scale = scale_of(vector, codes);
    if scale == 0.0 {
        return vec![0.0; vector.len()];
    }
    vector.iter().map(|x| nearest_code(f64::from(x / scale), codes) * f64::from(scale)).collect()
}

fn scale_of(vector: &[f32], codes: CodeType) -> f32 {
    let largest = vector.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let exact = largest
        / match codes {
            CodeType::Int8 => 127.0,
            CodeType::Fp8 => 448.0,
            CodeType::Int4 => 15.0,
        };
    let scale = half::bf16::from_f32(exact);
    let rounds_down = scale.to_f32() < exact;
    if rounds_down { half::bf16::from_bits(scale.to_bits() + 1) } else { scale }.to_f32()
}

/// The number that a code stands for, in units of the scale.
fn nearest_code(quotient: f64, codes: CodeType) -> f64 {
    match codes {
        CodeType::Int8 => quotient.round_ties_even(),
        CodeType::Fp8 => nearest_e4m3(quotient),
        // The nearest odd number.
        CodeType::Int4 => ((quotient + 15.0) / 2.0).round_ties_even() * 2.0 - 15.0,
    }
}

/// Whether a vector that differs by the rounding of a rotation may have another scale or other codes.
pub fn has_codes_at_an_edge(vector: &[f32], codes: CodeType) -> bool {
    const ERROR: f32 = 1e-6;
    let rotated = if codes == CodeType::Int4 { rotated(vector) } else { vector.to_vec() };
    let scaled = |factor: f32| rotated.iter().map(|x| factor * x).collect::<Vec<_>>();
    let scale = scale_of(&rotated, codes);
    if scale_of(&scaled(1.0 - ERROR), codes) != scale_of(&scaled(1.0 + ERROR), codes) {
        return true;
    }
    let error = rotated.iter().fold(0f32, |largest, x| largest.max(x.abs())) * ERROR;
    let code = |x: f32| nearest_code(f64::from(x / scale), codes);
    rotated.iter().any(|x| code(x - error) != code(x + error))
}

/// A query as it is multiplied with codes of integers: its largest magnitude is 32,258 steps, and it is rotated before
/// if K is.
pub fn round_query(vector: &[f32], codes: CodeType) -> Vec<f64> {
    let is_rotated = codes == CodeType::Int4;
    let query = if is_rotated { rotated(vector) } else { vector.to_vec() };
    let step = query.iter().fold(0.0, |largest: f64, x| largest.max(f64::from(x.abs()))) / 32_258.0;
    if step == 0.0 {
        return vec![0.0; vector.len()];
    }
    let rounded: Vec<f64> = query.iter().map(|x| (f64::from(*x) / step).round_ties_even() * step).collect();
    if is_rotated { rotated_by_definition(&rounded) } else { rounded }
}

/// The largest power of two that divides the size of a head: the size of a block of its rotation.
fn rotated_block(head_dim: usize) -> usize {
    head_dim & head_dim.wrapping_neg()
}

/// A head rotated by Hadamard matrices, with the rounding of the backend: sums and differences of elements that are
/// 1, 2, 4, … apart, in this order.
fn rotated(vector: &[f32]) -> Vec<f32> {
    let len = rotated_block(vector.len());
    let mut from: Vec<f32> = vector.iter().map(|x| x * (1.0 / (len as f32).sqrt())).collect();
    for apart in (0..len.trailing_zeros()).map(|bit| 1 << bit) {
        let sums = |i: usize| if i & apart == 0 { from[i] + from[i ^ apart] } else { from[i ^ apart] - from[i] };
        from = (0..vector.len()).map(sums).collect();
    }
    from
}

/// The product with a Hadamard matrix: row `i` and column `j` have the sign of the parity of `i & j`.
fn rotated_by_definition(vector: &[f64]) -> Vec<f64> {
    let len = rotated_block(vector.len());
    let element = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let row = |i: usize| -> f64 { (0..len).map(|j| element(i % len, j) * vector[i / len * len + j]).sum() };
    (0..vector.len()).map(|i| row(i) / (len as f64).sqrt()).collect()
}

/// Four bits of mantissa, the first of which is not stored, for magnitudes from 2^-6 to 448. Below that the steps stay.
fn nearest_e4m3(x: f64) -> f64 {
    let step = 2f64.powi((x.abs().log2().floor() as i32).max(-6) - 3);
    (x / step).round_ties_even() * step
}

/// A tensor's bytes as in a checkpoint, at an odd address.
pub struct Stored {
    bytes: Vec<u8>,
    dtype: DType,
    rows: usize,
    cols: usize,
}

impl Stored {
    pub fn new(values: &[f32], rows: usize, dtype: DType) -> Self {
        let mut bytes = vec![0xff];
        for x in values {
            match dtype {
                DType::F32 => bytes.extend(x.to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(*x).to_le_bytes()),
                DType::BF16 => bytes.extend(half::bf16::from_f32(*x).to_le_bytes()),
            }
        }
        Self { bytes, dtype, rows, cols: values.len() / rows.max(1) }
    }

    pub fn tensor(&self) -> HostTensor<'_> {
        HostTensor { format: self.dtype.into(), rows: self.rows, cols: self.cols, bytes: &self.bytes[1..] }
    }
}

/// A tensor with `values: [rows, cols]` and some more rows of NaN.
pub fn tensor(backend: &CpuBackend, values: &[f32], cols: usize) -> CpuTensor {
    let rows = values.len() / cols;
    let mut tensor = backend.tensor(rows + 3, cols, TensorRole::Activation).unwrap();
    tensor.as_mut_slice().fill(f32::NAN);
    tensor.as_mut_slice()[..values.len()].copy_from_slice(values);
    tensor
}

/// A batch of `rows` rows without KV.
pub fn plain_batch(rows: usize) -> Batch {
    Batch {
        tokens: vec![0; rows],
        token_sources: vec![NO_SOURCE; rows],
        positions: vec![0; rows],
        slots: vec![0; rows],
        ..Batch::default()
    }
}

/// A sequence's part of a batch: `(num_computed, num_rows, block table)`.
pub type Part<'a> = (usize, usize, &'a [u32]);

pub fn batch(parts: &[Part<'_>], block_size: usize) -> Batch {
    let mut batch = Batch::default();
    for (num_computed, num_rows, table) in parts {
        batch.seqs.push(BatchSeq {
            first_row: batch.tokens.len(),
            num_rows: *num_rows,
            num_computed: *num_computed,
            first_block: batch.block_tables.len(),
            num_blocks: table.len(),
        });
        batch.block_tables.extend(*table);
        for position in *num_computed..num_computed + num_rows {
            batch.tokens.push(0);
            batch.token_sources.push(NO_SOURCE);
            batch.positions.push(position as u32);
            batch.slots.push(table[position / block_size] * block_size as u32 + (position % block_size) as u32);
        }
    }
    batch
}

#[track_caller]
pub fn assert_close(got: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what}: element {i} is {got}, not {expected}");
    }
}

/// The bits of the numbers, to compare NaN and -0 too.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
