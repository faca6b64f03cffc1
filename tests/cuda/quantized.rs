//! Products with quantised weights, and rows of quantised tables, against float64.

use crate::support::*;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::{CudaBackend, CudaMatrix};
use pagetide::backend::quant::QuantFormat;
use pagetide::backend::{Backend, Batch, BatchSeq, DType, HostTensor, KvLayout, NO_SOURCE, TensorRole, WeightFormat};
use std::rc::Rc;

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    /// Format and rows of each part of the matrix.
    parts: Vec<(QuantFormat, usize)>,
    k: usize,
    bias: bool,
    batch_invariant: bool,
    seed: u64,
}

/// Weight blocks with weights of about 0.1.
pub fn blocks(format: QuantFormat, count: usize, random: &mut Random) -> Vec<u8> {
    // Where the scales in float16 are, and the largest magnitude of the other scales times the codes.
    let (halves, factor): (&[usize], f32) = match format {
        QuantFormat::Q4_0 | QuantFormat::IQ4_NL => (&[0], if format == QuantFormat::Q4_0 { 8.0 } else { 127.0 }),
        QuantFormat::Q5_0 => (&[0], 16.0),
        QuantFormat::Q8_0 => (&[0], 127.0),
        QuantFormat::Q4_1 => (&[0, 2], 15.0),
        QuantFormat::Q5_1 => (&[0, 2], 31.0),
        QuantFormat::Q2_K => (&[80, 82], 45.0),
        QuantFormat::Q3_K => (&[108], 128.0),
        QuantFormat::Q4_K => (&[0, 2], 945.0),
        QuantFormat::Q5_K => (&[0, 2], 1953.0),
        QuantFormat::Q6_K => (&[208], 4096.0),
        QuantFormat::IQ4_XS => (&[0], 4064.0),
        QuantFormat::MXFP4 => (&[], 1.0),
    };
    let mut bytes = Vec::new();
    for _ in 0..count {
        let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| random.bits() as u8).collect();
        for at in halves {
            let scale = half::f16::from_f32((0.1 + random.float().abs() * 0.1) / factor);
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if format == QuantFormat::MXFP4 {
            block[0] = 121 + random.below(3) as u8;
        }
        bytes.extend(block);
    }
    bytes
}

/// The weights of blocks, as a matrix that is converted to `dtype` has them.
pub fn dequantized(format: QuantFormat, bytes: &[u8], dtype: DType) -> Vec<f32> {
    let mut weights = vec![0.0; bytes.len() / format.block_bytes() * format.block_weights()];
    for (block, weights) in
        bytes.chunks_exact(format.block_bytes()).zip(weights.chunks_exact_mut(format.block_weights()))
    {
        format.dequantize(block, weights);
    }
    weights.iter().map(|weight| round(*weight, dtype)).collect()
}

impl Case {
    fn random(seed: u64) -> Self {
        let random = &mut Random(seed);
        let format = QuantFormat::ALL[seed as usize % QuantFormat::ALL.len()];
        Self {
            dtype: random.pick(&[DType::F16, DType::BF16]),
            rows: random.pick(&[1, 2, 7, 8, 9, 40, 64, 65, 130]),
            parts: vec![(format, random.pick(&[5, 16, 40, 128, 150]))],
            k: format.block_weights() * random.range(1, if format.block_weights() == 32 { 11 } else { 2 }),
            bias: random.one_in(2),
            batch_invariant: random.one_in(3),
            seed,
        }
    }

    fn n(&self) -> usize {
        self.parts.iter().map(|(_, rows)| rows).sum()
    }

    /// The bytes of each part.
    fn stored(&self) -> Vec<Vec<u8>> {
        let random = &mut Random(self.seed ^ 1);
        let stored =
            |(format, rows): &(QuantFormat, usize)| blocks(*format, rows * self.k / format.block_weights(), random);
        self.parts.iter().map(stored).collect()
    }

    fn weights(&self) -> Vec<f32> {
        let parts = self.parts.iter().zip(self.stored());
        parts.flat_map(|((format, _), bytes)| dequantized(*format, &bytes, self.dtype)).collect()
    }

    fn x(&self) -> Vec<f32> {
        Random(self.seed ^ 2).floats(self.rows * self.k, self.dtype)
    }

    fn biases(&self) -> Vec<f32> {
        Random(self.seed ^ 3).floats(self.n(), self.dtype)
    }

    fn expected(&self) -> Vec<f64> {
        let (x, weights, biases) = (self.x(), self.weights(), self.biases());
        let mut expected = Vec::new();
        for x in x.chunks_exact(self.k) {
            for (weights, bias) in weights.chunks_exact(self.k).zip(&biases) {
                let sum: f64 = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                expected.push(sum + if self.bias { f64::from(*bias) } else { 0.0 });
            }
        }
        expected
    }

    fn backend(&self, device: &Rc<dyn Device>) -> CudaBackend {
        let kv = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 8, block_size: 8, dtype: self.dtype.into() };
        let mut options = options(self.dtype, 1, kv);
        (options.max_rows, options.batch_invariant, options.vocab_size) = (self.rows, self.batch_invariant, self.n());
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(kv, self.rows.div_ceil(8), 0).unwrap();
        backend
    }

    fn matrix(&self, backend: &CudaBackend) -> CudaMatrix {
        let stored = self.stored();
        let tensor = |((format, rows), bytes): (&(QuantFormat, usize), &'_ Vec<u8>)| -> (WeightFormat, usize, usize) {
            (WeightFormat::Quantized(*format), *rows, bytes.len())
        };
        let shapes: Vec<_> = self.parts.iter().zip(&stored).map(tensor).collect();
        let tensors: Vec<_> = shapes
            .iter()
            .zip(&stored)
            .map(|((format, rows, _), bytes)| HostTensor { format: *format, rows: *rows, cols: self.k, bytes })
            .collect();
        backend.matrix(&tensors, self.dtype).unwrap()
    }

    fn on_cuda(&self, device: &Rc<dyn Device>) -> Vec<f32> {
        let mut backend = self.backend(device);
        let matrix = self.matrix(&backend);
        let biases = bytes(&self.biases(), DType::F32);
        let tensor = HostTensor { format: DType::F32.into(), rows: 1, cols: self.n(), bytes: &biases };
        let bias = backend.vector(&[tensor]).unwrap();
        let x = backend.tensor(self.rows, self.k, TensorRole::Activation).unwrap();
        let mut out = backend.tensor(self.rows, self.n(), TensorRole::Residual).unwrap();
        set(device, &x, &self.x());
        backend.begin(&batch(&vec![0; self.rows]));
        backend.linear(&x, &matrix, self.bias.then_some(&bias), &mut out);
        backend.end_step();
        backend.finish_step();
        get(device, &out, self.rows * self.n())
    }
}

/// One sequence with these tokens.
fn batch(tokens: &[u32]) -> Batch {
    let rows = tokens.len();
    let num_blocks = rows.div_ceil(8);
    Batch {
        hidden_rows: Vec::new(),
        tokens: tokens.to_vec(),
        token_sources: vec![NO_SOURCE; rows],
        positions: (0..rows as u32).collect(),
        slots: (0..rows as u32).collect(),
        seqs: vec![BatchSeq { first_row: 0, num_rows: rows, num_computed: 0, first_block: 0, num_blocks }],
        block_tables: (0..num_blocks as u32).collect(),
        logit_rows: Vec::new(),
    }
}

/// Multiplies rows in bfloat16 with a quantised matrix of `n` rows and `k` columns.
pub fn multiply(device: &Rc<dyn Device>, format: QuantFormat, (rows, n, k): (usize, usize, usize)) {
    let parts = vec![(format, n)];
    Case { dtype: DType::BF16, rows, parts, k, bias: false, batch_invariant: false, seed: 7 }.on_cuda(device);
}

fn check(case: &Case) {
    check_on(case, &device);
}

fn check_on(case: &Case, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let expected = case.expected();
    // The result is in float32. A scale that is a product is rounded to float16, and then a weight may be rounded to
    // the neighbour of the number that the reference has.
    let has_products = |(format, _): &(QuantFormat, usize)| format.block_weights() == 256;
    let tolerance = if case.parts.iter().any(has_products) { 6e-3 } else { 1e-3 };
    let mut first: Option<Vec<f32>> = None;
    for order in thread_orders() {
        let found = case.on_cuda(&device(order));
        assert_close(&found, &expected, tolerance, &format!("{case:?}"));
        let first = first.get_or_insert_with(|| found.clone());
        assert_eq!(bits(&found), bits(first), "{case:?} under order {order}");
    }
}

#[test]
fn random_products() {
    parallel(0..26, |seed| check(&Case::random(seed * 13 * 101 + seed % 13)));
}

/// Q, K and V are one matrix, and a file may quantise V in another format. Two formats may have the same tiles, also
/// within one of them.
#[test]
fn parts_of_several_formats() {
    let parts = vec![(QuantFormat::Q4_K, 24), (QuantFormat::Q4_1, 24), (QuantFormat::Q6_K, 20), (QuantFormat::Q4_K, 3)];
    for rows in [3, 20] {
        check(&Case {
            dtype: DType::BF16,
            rows,
            parts: parts.clone(),
            k: 256,
            bias: true,
            batch_invariant: false,
            seed: 5,
        });
    }
}

/// With `batch_invariant`, a row has the same bytes alone and in any batch.
#[test]
fn a_row_does_not_see_the_others() {
    for format in [QuantFormat::Q4_0, QuantFormat::Q6_K] {
        let case = |rows| Case {
            dtype: DType::BF16,
            rows,
            parts: vec![(format, 40)],
            k: 256,
            bias: false,
            batch_invariant: true,
            seed: 3,
        };
        let many = case(70).on_cuda(&device(0));
        for rows in [1, 8, 33] {
            let few = case(rows).on_cuda(&device(1));
            assert_eq!(bits(&few), bits(&many[..rows * 40]), "{format}, {rows} rows");
        }
    }
}

/// Rows of the table of embeddings, and of learned positions, which are added.
#[test]
fn rows_of_tables() {
    parallel(0..QuantFormat::ALL.len() as u64, |i| {
        let format = QuantFormat::ALL[i as usize];
        let (dtype, table_rows, k) = (DType::BF16, 37, 512);
        let case = Case {
            dtype,
            rows: 12,
            parts: vec![(format, table_rows)],
            k,
            bias: false,
            batch_invariant: false,
            seed: i,
        };
        let device = &device(i as u32 % 3);
        let mut backend = case.backend(device);
        let table = case.matrix(&backend);
        let weights = case.weights();
        let tokens = [0, 1, 7, 8, 15, 16, 17, 31, 32, 36, 36, 5];
        let mut out = backend.tensor(case.rows, k, TensorRole::Residual).unwrap();
        backend.begin(&batch(&tokens));
        backend.embed(&table, 2.0, &mut out);
        backend.add_position_embedding(&table, 3, &mut out);
        backend.end_step();
        backend.finish_step();
        let found = get(device, &out, tokens.len() * k);
        let row = |row: usize| weights[row * k..][..k].iter();
        let expected = tokens.iter().enumerate().flat_map(|(position, token)| {
            row(*token as usize).zip(row(position + 3)).map(|(embedding, added)| f64::from(embedding * 2.0 + added))
        });
        assert_close(&found, &expected.collect::<Vec<_>>(), 1e-2, &format!("{format}"));
    });
}

/// A scale that float16 does not hold would make infinite weights.
#[test]
fn scales_that_are_too_large_are_refused() {
    let case = Case {
        dtype: DType::BF16,
        rows: 1,
        parts: vec![(QuantFormat::Q4_K, 16)],
        k: 256,
        bias: false,
        batch_invariant: false,
        seed: 1,
    };
    let mut bytes = case.stored().remove(0);
    bytes[..2].copy_from_slice(&half::f16::MAX.to_le_bytes());
    bytes[4..16].fill(63);
    let tensor = HostTensor { format: WeightFormat::Quantized(QuantFormat::Q4_K), rows: 16, cols: 256, bytes: &bytes };
    let error = case.backend(&device(0)).matrix(&[tensor], DType::BF16).err().expect("63 times 65504").to_string();
    assert!(error.contains("Q4_K") && error.contains("65504"), "{error}");
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let case = |format: QuantFormat, rows| Case {
        dtype: DType::BF16,
        rows,
        parts: vec![(format, 40)],
        k: format.block_weights() * if format.block_weights() == 32 { 17 } else { 3 },
        bias: true,
        batch_invariant: false,
        seed: 9,
    };
    let (four, six, eight) = (QuantFormat::Q4_0, QuantFormat::Q6_K, QuantFormat::Q8_0);
    let header = "include/quantized.cuh";
    let breakages = [
        (case(four, 3), header, "scale * (1.0f / float(1 << 4 * i))", "scale"),
        (case(four, 3), header, "(i / 4 % 2 * 16)", "0"),
        (case(six, 3), header, "& ((1u << HIGH_BITS) - 1)) << 4", "& 1) << 4"),
        (case(eight, 3), header, "half * WARP_SIZE + lane) * 4", "lane) * 4"),
        (case(eight, 3), header, "lane % 4 * LANE_K / SCALE_GROUP", "0"),
        (case(four, 70), header, "is_inside ? from : 0", "0"),
        (case(four, 70), header, "const bool is_valid = n_tile < num_n_tiles;", "const bool is_valid = true;"),
        (case(four, 70), header, "__syncthreads();  // the tile is there", "// the tile is there"),
        (case(four, 70), header, "copy_async_wait<TILED_STAGES - 2>();", ""),
        (case(four, 3), "quantized.cu", "__syncthreads();  // the warps' sums", "// the warps' sums"),
        (case(four, 3), "quantized.cu", "__syncwarp();  // the tile", "// the tile"),
        (case(four, 3), "quantized.cu", "from + lane % 4 * LANE_K < p.k", "true"),
        (case(four, 3), "quantized.cu", "value += p.bias[out_column];", ""),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, file, from, to) = &breakages[i as usize];
        breaks(file, from, to, |device| check_on(case, device));
    });
}
