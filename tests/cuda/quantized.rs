//! Products with quantised weights, and rows of quantised tables, against float64.

use crate::support::*;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::{CudaBackend, CudaMatrix};
use pagetide::backend::fp8::{FP8_BLOCK_WEIGHTS, write_block};
use pagetide::backend::quant::QuantFormat;
use pagetide::backend::{Backend, Batch, BatchSeq, DType, HostTensor, KvLayout, NO_SOURCE, TensorRole, WeightFormat};
use std::rc::Rc;

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    /// Format and rows of each part of the matrix.
    parts: Vec<(WeightFormat, usize)>,
    k: usize,
    bias: bool,
    batch_invariant: bool,
    seed: u64,
}

/// All formats of quantised weights.
fn formats() -> Vec<WeightFormat> {
    QuantFormat::ALL.iter().copied().map(WeightFormat::from).chain([WeightFormat::Fp8]).collect()
}

/// Blocks of FP8 with weights up to 0.2. There are codes of each kind, and each block has another scale, which float16
/// does not hold.
fn fp8_blocks(count: usize, random: &mut Random) -> Vec<u8> {
    let (block_weights, block_bytes) = WeightFormat::Fp8.block();
    let mut bytes = vec![0; count * block_bytes];
    for block in bytes.chunks_exact_mut(block_bytes) {
        let code = |_| Some(random.bits() as u8).filter(|code| code & 0x7f != 0x7f).unwrap_or(0x7e);
        let codes: Vec<u8> = (0..block_weights).map(code).collect();
        write_block((0.1 + random.float().abs() * 0.1) / 448.0, &codes, block);
    }
    bytes
}

/// Weight blocks with weights of about 0.1.
pub fn blocks(format: WeightFormat, count: usize, random: &mut Random) -> Vec<u8> {
    let WeightFormat::Quantized(format) = format else { return fp8_blocks(count, random) };
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
pub fn dequantized(format: WeightFormat, bytes: &[u8], dtype: DType) -> Vec<f32> {
    let (block_weights, block_bytes) = format.block();
    let cols = bytes.len() / block_bytes * block_weights;
    round(&HostTensor { format, rows: 1, cols, bytes }.to_f32(), dtype)
}

impl Case {
    fn random(seed: u64) -> Self {
        let random = &mut Random(seed);
        let format = formats()[seed as usize % formats().len()];
        let block_weights = format.block().0;
        Self {
            dtype: random.pick(&[DType::F16, DType::BF16]),
            rows: random.pick(&[1, 2, 7, 8, 9, 40, 64, 65, 130]),
            parts: vec![(format, random.pick(&[5, 16, 40, 128, 150]))],
            k: block_weights * random.range(1, if block_weights <= FP8_BLOCK_WEIGHTS { 11 } else { 2 }),
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
        let stored = |(format, rows): &(WeightFormat, usize)| blocks(*format, rows * self.k / format.block().0, random);
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
        let parts = self.parts.iter().zip(&stored);
        let tensors: Vec<_> = parts
            .map(|((format, rows), bytes)| HostTensor { format: *format, rows: *rows, cols: self.k, bytes })
            .collect();
        backend.matrix(&tensors, self.dtype).unwrap()
    }

    fn on_cuda(&self, device: &Rc<dyn Device>) -> Vec<f32> {
        let mut backend = self.backend(device);
        let matrix = self.matrix(&backend);
        let biases = DType::F32.encode(&self.biases());
        let tensor = HostTensor { format: DType::F32.into(), rows: 1, cols: self.n(), bytes: &biases };
        let bias = backend.vector(&[tensor]).unwrap();
        let x = backend.tensor(self.rows, self.k, TensorRole::Activation).unwrap();
        let mut out = backend.tensor(self.rows, self.n(), TensorRole::Residual).unwrap();
        set(device, &x, &self.x());
        backend.begin(&one_sequence(&vec![0; self.rows]));
        backend.linear(&x, &matrix, self.bias.then_some(&bias), &mut out);
        backend.end_step();
        backend.finish_step();
        get(device, &out, self.rows * self.n())
    }
}

/// One sequence with these tokens.
pub fn one_sequence(tokens: &[u32]) -> Batch {
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
pub fn multiply(device: &Rc<dyn Device>, format: impl Into<WeightFormat>, (rows, n, k): (usize, usize, usize)) {
    let parts = vec![(format.into(), n)];
    Case { dtype: DType::BF16, rows, parts, k, bias: false, batch_invariant: false, seed: 7 }.on_cuda(device);
}

fn check(case: &Case) {
    check_on(case, &device);
}

fn check_on(case: &Case, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let expected = case.expected();
    // The result is in float32. A scale that is a product is rounded to float16, and then a weight may be rounded to
    // the neighbour of the number that the reference has.
    let has_products = |(format, _): &(WeightFormat, usize)| format.block().0 == 256;
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
    let count = formats().len() as u64;
    parallel(0..2 * count, |seed| check(&Case::random(seed * count * 101 + seed % count)));
}

/// Q, K and V are one matrix, and a file may quantise V in another format. Two formats may have the same tiles, also
/// within one of them.
#[test]
fn parts_of_several_formats() {
    let [q4_k, q4_1, q6_k] = [QuantFormat::Q4_K, QuantFormat::Q4_1, QuantFormat::Q6_K].map(WeightFormat::from);
    let parts = vec![(q4_k, 24), (q4_1, 24), (WeightFormat::Fp8, 21), (q6_k, 20), (q4_k, 3)];
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
    let [q4_0, q6_k] = [QuantFormat::Q4_0, QuantFormat::Q6_K].map(WeightFormat::from);
    for format in [q4_0, q6_k, WeightFormat::Fp8] {
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
    parallel(0..formats().len() as u64, |i| {
        let format = formats()[i as usize];
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
        backend.begin(&one_sequence(&tokens));
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
        parts: vec![(QuantFormat::Q4_K.into(), 16)],
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

/// The kernels would read NaN as 480.
#[test]
fn fp8_that_is_no_number_is_refused() {
    let case = Case {
        dtype: DType::F16,
        rows: 1,
        parts: vec![(WeightFormat::Fp8, 16)],
        k: 128,
        bias: false,
        batch_invariant: false,
        seed: 1,
    };
    let good = case.stored().remove(0);
    let block_bytes = WeightFormat::Fp8.block().1;
    let (mut nan, mut infinite) = (good.clone(), good);
    nan[3 * block_bytes + 5] = 0xff;
    infinite[block_bytes - 4..block_bytes].copy_from_slice(&f32::INFINITY.to_le_bytes());
    for bytes in [nan, infinite] {
        let tensor = HostTensor { format: WeightFormat::Fp8, rows: 16, cols: 128, bytes: &bytes };
        let error = case.backend(&device(0)).matrix(&[tensor], DType::F16).err().expect("no number").to_string();
        assert!(error.contains("not a number or infinite: [16, 128] in FP8"), "{error}");
    }
}

/// 40 columns, which are no whole number of the tiles of a thread block.
fn of_40_columns(format: WeightFormat, rows: usize) -> Case {
    Case {
        dtype: DType::BF16,
        rows,
        parts: vec![(format, 40)],
        k: format.block().0 * if format.block().0 == 32 { 17 } else { 3 },
        bias: true,
        batch_invariant: false,
        seed: 9,
    }
}

/// Checks a product of many rows.
pub fn check_many_rows(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&of_40_columns(QuantFormat::Q4_0.into(), 70), device);
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let case = of_40_columns;
    let [four, six, eight] = [QuantFormat::Q4_0, QuantFormat::Q6_K, QuantFormat::Q8_0].map(WeightFormat::from);
    let fp8 = WeightFormat::Fp8;
    let header = "include/quantized.cuh";
    let breakages = [
        (case(four, 3), header, "scale * (1.0f / float(1 << 4 * i))", "scale"),
        (case(four, 3), header, "(i / 4 % 2 * 16)", "0"),
        (case(six, 3), header, "& ((1u << HIGH_BITS) - 1)) << 4", "& 1) << 4"),
        (case(eight, 3), header, "half * WARP_SIZE + lane) * 4", "lane) * 4"),
        (case(fp8, 3), header, "scales) * 256.0f", "scales) * 128.0f"),
        (case(fp8, 3), header, "(pair & 0x80008000u)", "0"),
        (case(fp8, 3), header, "i % 4 == 0 ? 0x1404u : 0x3424u", "0x1404u"),
        (case(eight, 3), header, "lane % 4 * LANE_K / SCALE_GROUP", "0"),
        (case(four, 70), header, "is_inside ? from : 0", "0"),
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
