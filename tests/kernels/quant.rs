//! Quantised weights: their values, and products with them.

use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, CpuMatrix, Isa, ManyRows, heights_of_many_rows};
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{Activation, Backend, DType, HostTensor, TensorRole, WeightFormat};
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;

/// A matrix of random weight blocks.
struct QuantMatrix {
    format: QuantFormat,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
}

/// Where a block has float16 numbers, which must not be NaN or infinite.
fn halves(format: QuantFormat) -> &'static [usize] {
    match format {
        QuantFormat::Q4_1 | QuantFormat::Q5_1 | QuantFormat::Q4_K | QuantFormat::Q5_K => &[0, 2],
        QuantFormat::Q2_K => &[80, 82],
        QuantFormat::Q3_K => &[108],
        QuantFormat::Q6_K => &[208],
        QuantFormat::MXFP4 => &[],
        _ => &[0],
    }
}

/// All rows are computed as few, and as many in tiles of each height.
fn ways_of_many_rows(isa: Isa, format: QuantFormat) -> Vec<ManyRows> {
    let many = heights_of_many_rows(isa, format).iter().map(|&max_height| ManyRows { from: 1, max_height });
    many.chain([ManyRows { from: 200, max_height: usize::MAX }]).collect()
}

impl QuantMatrix {
    fn new(format: QuantFormat, n: usize, k: usize, numbers: &mut Numbers) -> Self {
        let blocks = n * k / format.block_weights();
        let mut bytes: Vec<u8> = (0..blocks * format.block_bytes()).map(|_| numbers.bits() as u8).collect();
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            for at in halves(format) {
                block[*at..at + 2].copy_from_slice(&half::f16::from_f32(0.1 * numbers.next()).to_le_bytes());
            }
            if format == QuantFormat::MXFP4 {
                block[0] = 120 + numbers.below(8) as u8;
            }
        }
        Self { format, n, k, bytes }
    }

    fn tensor(&self) -> HostTensor<'_> {
        HostTensor { format: WeightFormat::Quantized(self.format), rows: self.n, cols: self.k, bytes: &self.bytes }
    }

    fn weights(&self) -> Vec<f32> {
        self.tensor().to_f32()
    }

    /// The products of rows with the weights.
    fn products(&self, x: &[f32]) -> Vec<f64> {
        let weights = self.weights();
        let mut products = Vec::new();
        for x in x.chunks_exact(self.k) {
            let x = quantize(x, self.format);
            let of_column = |w: &[f32]| w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            products.extend(weights.chunks_exact(self.k).map(of_column));
        }
        products
    }
}

#[test]
fn weights_are_those_of_ggml() {
    let goldens: Value = serde_json::from_str(include_str!("../data/quant.json")).unwrap();
    for format in QuantFormat::ALL {
        let hex = |key: &str| from_hex(goldens[format.name()][key].as_str().unwrap());
        let (blocks, expected) = (hex("blocks"), hex("weights"));
        let mut weights = vec![0.0; format.block_weights()];
        let got = blocks.chunks_exact(format.block_bytes()).flat_map(|block| {
            format.dequantize(block, &mut weights);
            weights.iter().flat_map(|weight| weight.to_le_bytes()).collect::<Vec<_>>()
        });
        assert!(got.collect::<Vec<_>>() == expected, "{format}");
    }
}

fn from_hex(digits: &str) -> Vec<u8> {
    (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn blocks_are_those_of_ggml() {
    let goldens: BTreeMap<String, String> = serde_json::from_str(include_str!("../data/quantize.json")).unwrap();
    let weights: Vec<f32> =
        from_hex(&goldens["weights"]).chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let made: Vec<_> = QuantFormat::ALL.iter().filter_map(|format| Some((*format, format.quantizer()?))).collect();
    assert_eq!(made.len() + 1, goldens.len());
    for (format, quantize) in made {
        let expected = from_hex(&goldens[format.name()]);
        let mut block = vec![0xaa; format.block_bytes()];
        let blocks = weights.chunks_exact(format.block_weights()).zip(expected.chunks_exact(format.block_bytes()));
        for (index, (weights, expected)) in blocks.enumerate() {
            quantize(weights, &mut block);
            assert_eq!(block, expected, "{format}, block {index}");
        }
    }
}

/// `x` as the product sees it: quantised in blocks, as float64.
fn quantize(x: &[f32], format: QuantFormat) -> Vec<f64> {
    let block = format.block_weights();
    let of_block = |x: &[f32]| {
        let mut largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        if block == 256 {
            largest = largest.max(bound_of_sums(x));
        }
        let (scale, inverse) = if largest > 0.0 { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
        x.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)).collect::<Vec<_>>()
    };
    x.chunks(block).flat_map(of_block).collect()
}

/// The magnitude that 127 has to stand for, so that 16 codes add up to no more than 1,023, without their signs.
/// Rounding can add a half to each.
fn bound_of_sums(x: &[f32]) -> f32 {
    // In parts of 16, which are exact, and in order, so that a code is rounded as the product rounds it.
    let mean = |x: &[f32]| x.iter().fold(0.0_f32, |mean, x| mean + x.abs() / 16.0);
    x.chunks(16).map(mean).fold(0.0, f32::max) * (16.0 * 127.0 / 1015.0)
}

fn product(backend: &mut CpuBackend, w: &CpuMatrix, x: &[f32], k: usize, n: usize) -> Vec<f32> {
    let rows = x.len() / k;
    let x = tensor(backend, x, k);
    let mut out = tensor(backend, &vec![f32::NAN; rows * n], n);
    backend.begin(&plain_batch(rows));
    backend.linear(&x, w, None, &mut out);
    out.as_slice()[..rows * n].to_vec()
}

fn random_format(numbers: &mut Numbers) -> QuantFormat {
    QuantFormat::ALL[numbers.below(QuantFormat::ALL.len())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Right, and with the same bits on every instruction set, alone and in a batch, with any number of threads.
    #[test]
    fn products_are_right_and_the_same_everywhere(
        seed: u64,
        rows in prop_oneof![1usize..40, 32usize..150],
        threads in 1usize..4,
    ) {
        let mut numbers = Numbers::new(seed);
        let format = random_format(&mut numbers);
        let blocks = numbers.size(if format.block_weights() == 32 { 40 } else { 5 });
        let (n, k) = (numbers.size(120), blocks * format.block_weights());
        let matrix = QuantMatrix::new(format, n, k, &mut numbers);
        let x = numbers.vec(rows * k);
        let expected = matrix.products(&x);
        let mut first: Option<Vec<u32>> = None;
        for isa in isas_and_tiles() {
            let mut backend = backend(isa, threads);
            let w = backend.matrix(&[matrix.tensor()], DType::BF16).unwrap();
            let got = product(&mut backend, &w, &x, k, n);
            let largest = expected.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                prop_assert!((f64::from(*got) - expected).abs() < 1e-5 * largest, "{isa} {format} {n} {k}: {i}: {got} {expected}");
            }
            prop_assert_eq!(first.get_or_insert_with(|| bits(&got)), &bits(&got), "{} {}", isa, format);
            for many_rows in ways_of_many_rows(isa, format) {
                backend.set_many_rows(Some(many_rows));
                let again = product(&mut backend, &w, &x, k, n);
                prop_assert_eq!(bits(&again), bits(&got), "{} {}: {:?}", isa, format, many_rows);
            }
            let row = numbers.below(rows);
            let alone = product(&mut backend, &w, &x[row * k..][..k], k, n);
            prop_assert_eq!(bits(&alone), bits(&got[row * n..][..n]), "{} {}: row {}", isa, format, row);
        }
    }

    /// Each row of a packed matrix is what its blocks say.
    #[test]
    fn rows_can_be_read_back(seed: u64) {
        let mut numbers = Numbers::new(seed);
        let format = random_format(&mut numbers);
        let (n, k) = (numbers.size(70), numbers.size(3) * format.block_weights());
        let matrix = QuantMatrix::new(format, n, k, &mut numbers);
        let mut backend = backend(Isa::detect(), 2);
        let w = backend.matrix(&[matrix.tensor()], DType::BF16).unwrap();
        let mut batch = plain_batch(n);
        batch.tokens = (0..n as u32).collect();
        let mut out = tensor(&backend, &vec![0.0; n * k], k);
        backend.begin(&batch);
        backend.embed(&w, 1.0, &mut out);
        prop_assert_eq!(bits(&out.as_slice()[..n * k]), bits(&matrix.weights()), "{}", format);
    }
}

/// Sums of products of bytes are as large as they get: the largest codes and the smallest, with the largest inputs and
/// the smallest.
#[test]
fn the_largest_sums_fit() {
    const ROWS: usize = 40;
    for format in QuantFormat::ALL.iter().copied() {
        let mut numbers = Numbers::new(1);
        // Two panels that may be computed together, and one.
        let (n, k) = (48, 512);
        for codes in [0xff, 0x00] {
            let mut matrix = QuantMatrix::new(format, n, k, &mut numbers);
            for block in matrix.bytes.chunks_exact_mut(format.block_bytes()) {
                let scales: Vec<[u8; 2]> = halves(format).iter().map(|at| [block[*at], block[*at + 1]]).collect();
                let first = block[0];
                block.fill(codes);
                halves(format).iter().zip(scales).for_each(|(at, scale)| block[*at..at + 2].copy_from_slice(&scale));
                if format == QuantFormat::MXFP4 {
                    block[0] = first;
                }
            }
            // Rows of one sign, and rows whose sign changes every 16 elements.
            let is_negative = |row: usize, i: usize| row % 2 == 1 && (row % 4 == 1 || i / 16 % 2 == 1);
            let x: Vec<f32> = (0..ROWS * k).map(|i| if is_negative(i / k, i % k) { -1.0 } else { 1.0 }).collect();
            let expected = matrix.products(&x);
            let largest = expected.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
            let mut first: Option<Vec<u32>> = None;
            for isa in isas_and_tiles() {
                let mut backend = backend(isa, 1);
                let w = backend.matrix(&[matrix.tensor()], DType::BF16).unwrap();
                for many_rows in ways_of_many_rows(isa, format) {
                    backend.set_many_rows(Some(many_rows));
                    let got = product(&mut backend, &w, &x, k, n);
                    for (got, expected) in got.iter().zip(&expected) {
                        let error = (f64::from(*got) - expected).abs();
                        assert!(error < 1e-5 * largest, "{isa} {format}, codes {codes:#x}: {got}, not {expected}");
                    }
                    assert_eq!(
                        first.get_or_insert_with(|| bits(&got)),
                        &bits(&got),
                        "{isa} {format}, codes {codes:#x}"
                    );
                }
            }
        }
    }
}

/// The other tests compare all ways that there are. These are the ways that have to be there.
#[test]
fn many_rows_have_their_kernels() {
    let with_vnni = [Isa::Avx512, Isa::Avx512Widened, Isa::Avx512Vnni];
    for isa in isas() {
        let heights = |format| heights_of_many_rows(isa, format);
        if with_vnni.contains(&isa) {
            assert_eq!((heights(QuantFormat::Q4_K), heights(QuantFormat::Q8_0)), (&[8, 4][..], &[8][..]), "{isa}");
        }
        for format in QuantFormat::ALL.iter().filter(|format| format.block_weights() == 256) {
            assert!(!heights(*format).is_empty(), "{isa} {format}");
        }
    }
}

/// The parts of a fused projection may be in different formats. So may the halves of a gated one.
#[test]
fn parts_may_differ_in_format() {
    let (k, rows) = (512, 5);
    let mut numbers = Numbers::new(3);
    let x = numbers.vec(rows * k);
    let parts = [(QuantFormat::Q4_K, 64), (QuantFormat::Q6_K, 32), (QuantFormat::Q8_0, 48)];
    let parts = parts.map(|(format, n)| QuantMatrix::new(format, n, k, &mut numbers));
    for isa in isas_and_tiles() {
        let mut backend = backend(isa, 2);
        let w = backend.matrix(&parts.each_ref().map(QuantMatrix::tensor), DType::BF16).unwrap();
        let got = product(&mut backend, &w, &x, k, 144);
        let mut first = 0;
        for part in &parts {
            let w = backend.matrix(&[part.tensor()], DType::BF16).unwrap();
            let alone = product(&mut backend, &w, &x, k, part.n);
            for row in 0..rows {
                let (got, alone) = (&got[row * 144 + first..][..part.n], &alone[row * part.n..][..part.n]);
                assert_eq!(bits(got), bits(alone), "{isa} {}", part.format);
            }
            first += part.n;
        }

        let gate_up = [(QuantFormat::Q5_0, 32), (QuantFormat::IQ4_XS, 32)];
        let gate_up = gate_up.map(|(format, n)| QuantMatrix::new(format, n, k, &mut Numbers::new(9)));
        let w = backend.gate_up_matrix(&gate_up.each_ref().map(QuantMatrix::tensor), DType::BF16).unwrap();
        let [gate, up] = gate_up.each_ref().map(|part| {
            let w = backend.matrix(&[part.tensor()], DType::BF16).unwrap();
            product(&mut backend, &w, &x, k, 32)
        });
        let x = tensor(&backend, &x, k);
        let mut unfused = backend.tensor(rows, 64, TensorRole::Unfused).unwrap();
        let mut gated = backend.tensor(rows, 32, TensorRole::Operand(DType::F32)).unwrap();
        backend.begin(&plain_batch(rows));
        backend.gated_linear(&x, &w, None, Activation::Relu, &mut unfused, &mut gated);
        // The identity shows what is in the operand.
        let identity: Vec<f32> = (0..32 * 32).map(|i| if i % 33 == 0 { 1.0 } else { 0.0 }).collect();
        let identity = backend.matrix(&[Stored::new(&identity, 32, DType::F32).tensor()], DType::F32).unwrap();
        let mut out = tensor(&backend, &vec![0.0; rows * 32], 32);
        backend.linear(&gated, &identity, None, &mut out);
        let expected: Vec<f32> = gate.iter().zip(&up).map(|(gate, up)| gate.max(0.0) * up).collect();
        assert_eq!(&out.as_slice()[..rows * 32], expected, "{isa}");
    }
}

/// Where a panel would have columns of several formats, the matrix is converted.
#[test]
fn formats_that_share_a_panel_are_converted() {
    let mut numbers = Numbers::new(4);
    let parts = [QuantFormat::Q8_0, QuantFormat::Q4_0].map(|format| QuantMatrix::new(format, 8, 64, &mut numbers));
    let weights: Vec<f32> = parts.iter().flat_map(QuantMatrix::weights).collect();
    let x = numbers.vec(2 * 64);
    let mut backend = backend(Isa::detect(), 1);
    let w = backend.matrix(&parts.each_ref().map(QuantMatrix::tensor), DType::F32).unwrap();
    let plain = backend.matrix(&[Stored::new(&weights, 16, DType::F32).tensor()], DType::F32).unwrap();
    let (got, expected) = (product(&mut backend, &w, &x, 64, 16), product(&mut backend, &plain, &x, 64, 16));
    assert_eq!(bits(&got), bits(&expected));
}

/// A number that is not finite does not disappear.
#[test]
fn what_is_not_finite_stays_so() {
    let mut numbers = Numbers::new(5);
    for format in QuantFormat::ALL {
        let matrix = QuantMatrix::new(*format, 16, 256, &mut numbers);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = numbers.vec(256);
            x[100] = bad;
            for isa in isas_and_tiles() {
                let mut backend = backend(isa, 1);
                let w = backend.matrix(&[matrix.tensor()], DType::BF16).unwrap();
                let got = product(&mut backend, &w, &x, 256, 16);
                assert!(got.iter().all(|x| x.is_nan()), "{isa} {format} {bad}");
            }
        }
    }
}
