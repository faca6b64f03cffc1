//! Products whose activations are FP8 too, against float64, with activations that are quantised here by the definition.

use crate::common::{Driver, Golden, Sequence, Settings};
use crate::emulation::ptx::Architecture;
use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::fp8::{answers_with, stored};
use crate::model::cuda_model;
use crate::quantized::one_sequence;
use crate::support::*;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::{CudaBackend, CudaMatrix, CudaOptions};
use pagetide::backend::fp8::{E4M3_VALUES, FP8_BLOCK_WEIGHTS, write_block};
use pagetide::backend::{Backend, DType, HostTensor, KvLayout, TensorRole, WeightFormat};
use std::rc::Rc;

/// Rows and columns of weights with one scale.
type Span = [usize; 2];

const WHOLE_ROWS: Span = [1, usize::MAX];
const BLOCKS: Span = [128, 128];

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    n: usize,
    k: usize,
    span: Span,
    bias: bool,
    seed: u64,
}

impl Case {
    fn random(seed: u64) -> Self {
        let random = &mut Random(seed);
        let span = [WHOLE_ROWS, [usize::MAX; 2], BLOCKS][seed as usize % 3];
        let step = if span == BLOCKS { 128 } else { FP8_BLOCK_WEIGHTS };
        Self {
            dtype: random.pick(&[DType::F16, DType::BF16]),
            rows: random.pick(&[1, 2, 7, 20]),
            n: random.pick(&[16, 48, 144]),
            k: step * random.pick(&[1, 2, 5, 17]),
            span,
            bias: random.one_in(2),
            seed,
        }
    }

    fn codes(&self) -> Vec<u8> {
        let random = &mut Random(self.seed ^ 1);
        let code = |_| Some(random.bits() as u8).filter(|code| code & 0x7f != 0x7f).unwrap_or(0x7e);
        (0..self.n * self.k).map(code).collect()
    }

    /// So that weights are up to 0.2.
    fn scale(&self, row: usize, column: usize) -> f32 {
        let [rows, columns] = self.span;
        let place = (row / rows * 1000 + column / columns) as u64;
        (0.1 + Random(self.seed ^ 2 ^ place << 8).float().abs() * 0.1) / 448.0
    }

    /// Blocks of FP8.
    fn stored(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (index, codes) in self.codes().chunks_exact(FP8_BLOCK_WEIGHTS).enumerate() {
            let first = index * FP8_BLOCK_WEIGHTS;
            let mut block = [0; FP8_BLOCK_WEIGHTS + 4];
            write_block(self.scale(first / self.k, first % self.k), codes, &mut block);
            bytes.extend(block);
        }
        bytes
    }

    fn weights(&self) -> Vec<f64> {
        let number = |(i, code): (usize, &u8)| {
            f64::from(self.scale(i / self.k, i % self.k)) * f64::from(E4M3_VALUES[usize::from(*code)])
        };
        self.codes().iter().enumerate().map(number).collect()
    }

    /// Rows of very different sizes, one of them zero.
    fn x(&self) -> Vec<f32> {
        let mut x = Random(self.seed ^ 3).floats(self.rows * self.k, self.dtype);
        for (row, x) in x.chunks_exact_mut(self.k).enumerate() {
            let factor = [1.0, 1024.0, 0.0, 2f32.powi(-12)][row % 4];
            x.iter_mut().for_each(|x| *x *= factor);
        }
        round(&x, self.dtype)
    }

    fn biases(&self) -> Vec<f32> {
        Random(self.seed ^ 4).floats(self.n, self.dtype)
    }

    fn expected(&self) -> Vec<f64> {
        let (weights, biases) = (self.weights(), self.biases());
        let columns = if self.span == BLOCKS { 128 } else { self.k };
        let mut expected = Vec::new();
        for x in self.x().chunks_exact(self.k) {
            let x: Vec<f64> = x.chunks(columns).flat_map(quantized).collect();
            for (weights, bias) in weights.chunks_exact(self.k).zip(&biases) {
                let sum: f64 = x.iter().zip(weights).map(|(x, w)| x * w).sum();
                expected.push(sum + if self.bias { f64::from(*bias) } else { 0.0 });
            }
        }
        expected
    }

    fn options(&self) -> CudaOptions {
        let kv = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 8, block_size: 8, dtype: self.dtype.into() };
        let options = options(self.dtype, 1, kv);
        CudaOptions { max_rows: self.rows, vocab_size: self.n, fp8_activations: true, ..options }
    }

    fn backend(&self, device: &Rc<dyn Device>, options: CudaOptions) -> CudaBackend {
        let kv = options.kv;
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(kv, self.rows.div_ceil(8), 0).unwrap();
        backend
    }

    fn matrix(&self, backend: &CudaBackend) -> CudaMatrix {
        let bytes = &self.stored();
        let tensor = HostTensor { format: WeightFormat::Fp8, rows: self.n, cols: self.k, bytes };
        backend.matrix(&[tensor], self.dtype).unwrap()
    }

    /// The result, in float32 if there is no bias, or else in the model's type.
    fn multiply(&self, device: &Rc<dyn Device>, options: CudaOptions, x_values: &[f32]) -> Vec<f32> {
        let mut backend = self.backend(device, options);
        let matrix = self.matrix(&backend);
        let biases = DType::F32.encode(&self.biases());
        let tensor = HostTensor { format: DType::F32.into(), rows: 1, cols: self.n, bytes: &biases };
        let bias = backend.vector(&[tensor]).unwrap();
        let x = backend.tensor(self.rows, self.k, TensorRole::Activation).unwrap();
        let role = if self.bias { TensorRole::Activation } else { TensorRole::Residual };
        let mut out = backend.tensor(self.rows, self.n, role).unwrap();
        set(device, &x, x_values);
        backend.begin(&one_sequence(&vec![0; self.rows]));
        backend.linear(&x, &matrix, self.bias.then_some(&bias), &mut out);
        backend.end_step();
        backend.finish_step();
        get(device, &out, self.rows * self.n)
    }
}

/// Activations as their codes and their common scale stand for them.
fn quantized(x: &[f32]) -> Vec<f64> {
    let largest = x.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
    let scale = (largest / 448.0).max(f32::MIN_POSITIVE);
    x.iter().map(|x| f64::from(nearest_e4m3(x * (1.0 / scale))) * f64::from(scale)).collect()
}

/// A GPU on which cuBLASLt has these products, or the emulation of one.
fn has_products() -> bool {
    device(0).lacks_fp8_products().is_none()
}

fn check(case: &Case) {
    check_on(case, &device);
}

fn check_on(case: &Case, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let tolerance = match case.bias {
        true => tolerance(case.dtype),
        // Hopper adds up products of FP8 with fewer bits than float32 has.
        false if on_gpu() => 5e-3,
        false => 1e-4,
    };
    for order in thread_orders() {
        let found = case.multiply(&device(order), case.options(), &case.x());
        assert_close(&found, &case.expected(), tolerance, &format!("{case:?} under order {order}"));
    }
}

fn blocks_of_20_rows() -> Case {
    Case { dtype: DType::BF16, rows: 20, n: 144, k: 256, span: BLOCKS, bias: false, seed: 5 }
}

/// Multiplies rows in bfloat16 with a matrix of `n` rows and `k` columns, with scales for rows or for blocks.
pub fn multiply(device: &Rc<dyn Device>, (rows, n, k): (usize, usize, usize), is_in_blocks: bool) {
    let span = if is_in_blocks { BLOCKS } else { WHOLE_ROWS };
    let case = Case { dtype: DType::BF16, rows, n, k, span, bias: false, seed: 7 };
    case.multiply(device, case.options(), &case.x());
}

#[test]
fn random_fp8_products() {
    if has_products() {
        parallel(0..12, |seed| check(&Case::random(seed)));
    }
}

/// A row that is not finite gives no finite number. The codes of the others do not depend on it.
#[test]
fn a_row_that_is_not_finite_stays_so_alone() {
    if !has_products() {
        return;
    }
    for span in [WHOLE_ROWS, BLOCKS] {
        let case = Case { rows: 8, span, ..blocks_of_20_rows() };
        let good = case.x();
        let expected = case.multiply(&device(0), case.options(), &good);
        for bad in [f32::INFINITY, f32::NAN] {
            let mut x = good.clone();
            x[3 * case.k + 130] = bad;
            let found = case.multiply(&device(1), case.options(), &x);
            for (row, (found, expected)) in found.chunks(case.n).zip(expected.chunks(case.n)).enumerate() {
                if row == 3 {
                    assert!(!found.iter().any(|number| number.is_finite()), "{span:?} with {bad}");
                } else {
                    assert_eq!(bits(found), bits(expected), "{span:?}, row {row} with {bad}");
                }
            }
        }
    }
}

/// Blocks that cuBLASLt has no scales for are multiplied with activations of the model's type.
#[test]
fn other_places_of_scales_keep_the_activations() {
    if !has_products() {
        return;
    }
    for (n, span) in [(48, [1, 64]), (48, [40, 64]), (40, WHOLE_ROWS)] {
        let case = Case { rows: 9, n, span, ..blocks_of_20_rows() };
        let [with, without] = [true, false].map(|fp8_activations| {
            case.multiply(&device(0), CudaOptions { fp8_activations, ..case.options() }, &case.x())
        });
        assert_eq!(bits(&with), bits(&without), "{n} rows, scales for {span:?}");
    }
    let case = Case { rows: 9, span: WHOLE_ROWS, ..blocks_of_20_rows() };
    let [with, without] = [true, false]
        .map(|fp8_activations| case.multiply(&device(0), CudaOptions { fp8_activations, ..case.options() }, &case.x()));
    assert_ne!(bits(&with), bits(&without));
}

/// Rows of the table of embeddings, and of learned positions, which are added.
#[test]
fn rows_of_fp8_tables() {
    if !has_products() {
        return;
    }
    for span in [WHOLE_ROWS, BLOCKS] {
        let case = Case { rows: 6, n: 272, span, ..blocks_of_20_rows() };
        let device = &device(1);
        let mut backend = case.backend(device, case.options());
        let table = case.matrix(&backend);
        let tokens = [0, 1, 127, 128, 271, 64];
        let mut out = backend.tensor(case.rows, case.k, TensorRole::Residual).unwrap();
        backend.begin(&one_sequence(&tokens));
        backend.embed(&table, 2.0, &mut out);
        backend.add_position_embedding(&table, 125, &mut out);
        backend.end_step();
        backend.finish_step();
        let found = get(device, &out, tokens.len() * case.k);
        let weights = case.weights();
        let row = |row: usize| weights[row * case.k..][..case.k].iter();
        let expected = tokens.iter().enumerate().flat_map(|(position, token)| {
            row(*token as usize).zip(row(position + 125)).map(|(embedding, added)| embedding * 2.0 + added)
        });
        assert_close(&found, &expected.collect::<Vec<_>>(), 1e-2, &format!("{span:?}"));
    }
}

#[test]
fn fp8_activations_are_refused_where_there_are_none() {
    let case = blocks_of_20_rows();
    let refused = |device: Rc<dyn Device>, change: &dyn Fn(&mut CudaOptions)| {
        let mut options = case.options();
        change(&mut options);
        CudaBackend::new(device, options).err().expect("it is refused").to_string()
    };
    let error = refused(device(0), &|options| options.batch_invariant = true);
    assert!(error.contains("device.fp8_activations = true") && error.contains("device.batch_invariant"), "{error}");
    let error = refused(device(0), &|options| {
        options.dtype = DType::F32;
        options.kv.dtype = DType::F32.into();
    });
    assert!(error.contains("--dtype float32"), "{error}");
    let ampere = EmulatedOptions { ptx: Some(Architecture::Sm80), ..EmulatedOptions::default() };
    let error = refused(Rc::new(EmulatedDevice::new(ampere)), &|_| {});
    assert!(error.contains("device.fp8_activations = true: the emulated GPU is no Hopper"), "{error}");
}

/// Answers of whole models, with graphs, stay near those with activations of the model's type. These models are small
/// and have random weights, so their answers move more than those of a trained one.
#[test]
fn answers_with_fp8_activations() {
    if !has_products() {
        return;
    }
    let cases = [("ct-fp8", DType::F16), ("fp8-tensor", DType::BF16)];
    parallel(0..cases.len() as u64, |i| {
        let (model, dtype) = cases[i as usize];
        let golden = Golden::read(&stored(model));
        let [with, without] = [true, false].map(|fp8_activations| {
            let (held, answers) = answers_with(&stored(model), &golden, dtype, |options| {
                options.fp8_activations = fp8_activations;
            });
            assert!(held.contains("FP8 12 matrices"), "{model}: {held}");
            answers
        });
        let errors: Vec<f32> = with.iter().zip(&without).map(|(a, b)| (a - b).abs()).collect();
        let mean = errors.iter().sum::<f32>() / errors.len() as f32;
        assert!(mean > 1e-4 && mean < 0.3, "{model}: {mean}");
    });
}

#[test]
fn broken_fp8_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let blocks = blocks_of_20_rows();
    let whole_rows = Case { span: WHOLE_ROWS, k: 40 * 64, ..blocks.clone() };
    let breakages = [
        (&whole_rows, "reduce_block<Max>(largest, reinterpret_cast<uint32_t*>(shared))", "largest"),
        (&whole_rows, "p.scales[blockIdx.x] = scale", "p.scales[blockIdx.x] = inverse"),
        (&whole_rows, "start + i), inverse, p.codes + start", "start + i), inverse, p.codes"),
        (&blocks, "lanes = BLOCK_LANES / 2", "lanes = BLOCK_LANES / 4"),
        (&blocks, "* p.rows + blockIdx.x", "+ blockIdx.x"),
        (&blocks, "__fdiv_rn(1.0f, scale), p.codes", "__fdiv_rn(0.5f, scale), p.codes"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, from, to) = breakages[i as usize];
        breaks("fp8.cu", from, to, |device| check_on(case, device));
    });
}

/// What FP8 activations cost a real model: the mean KL divergence of its tokens to those of the CPU, whose weights are
/// the same numbers and whose activations are bfloat16. `PAGETIDE_TEST_FP8_MODEL` is the folder of an FP8 checkpoint,
/// such as `scripts/make_fp8_model.py` writes, and `PAGETIDE_TEST_TOKENS` a JSON file with lists of tokens.
#[test]
#[ignore = "takes minutes, and a model"]
fn quality_of_fp8_activations() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let (model, tokens) = (variable("PAGETIDE_TEST_FP8_MODEL"), variable("PAGETIDE_TEST_TOKENS"));
    let texts: Vec<Vec<u32>> = serde_json::from_str(&std::fs::read_to_string(tokens).unwrap()).unwrap();
    let settings = Settings {
        dtype: DType::BF16,
        block_size: 16,
        num_threads: 2,
        isa: None,
        max_model_len: 256,
        max_rows: 256,
        max_logit_rows: 64,
    };
    let mut reference = Driver::new(&model, &settings);
    let (backend, decoder) = cuda_model(&model_device(), &model, DType::BF16, 16, 256, |options| {
        options.fp8_activations = true;
    });
    println!("{:?} matrices have FP8 products", backend.num_fp8_products());
    let mut driver = Driver::over(backend, decoder, 16);
    let (mut count, mut predicted, mut divergence, mut same, mut nll) = (0, 0, 0.0, 0, [0.0; 2]);
    for text in &texts {
        let base = reference.step(&mut [(&mut Sequence::new(text), text.len())]).remove(0);
        let found = driver.step(&mut [(&mut Sequence::new(text), text.len())]).remove(0);
        for (i, (base, found)) in base.iter().zip(&found).enumerate() {
            let [base, found] = [base, found].map(|logits| log_softmax(logits));
            divergence += base.iter().zip(&found).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            let top = |logits: &[f64]| (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            same += usize::from(top(&base) == top(&found));
            count += 1;
            if let Some(next) = text.get(i + 1) {
                nll[0] -= base[*next as usize];
                nll[1] -= found[*next as usize];
                predicted += 1;
            }
        }
        println!(
            "{count} tokens: mean KL divergence {:.5}, same top token {:.3}, mean NLL {:.4} and {:.4}",
            divergence / f64::from(count),
            same as f64 / f64::from(count),
            nll[0] / f64::from(predicted),
            nll[1] / f64::from(predicted)
        );
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - largest - sum.ln()).collect()
}
