//! Products of up to 8 rows with what a layer does before and after them: the sums against float64, and everything else
//! against the separate launches, bit by bit.

use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::model::cuda_model;
use crate::support::*;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::{CudaBackend, CudaMatrix, CudaOptions, CudaTensor, CudaVector, FewRowsUse};
use pagetide::backend::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, CodeType, DType, Heads, HostTensor, KvDType, KvLayout,
    NO_SOURCE, Norm, NormKind, NormedInput, Rope, TensorRole,
};
use std::rc::Rc;

const EPS: f32 = 1e-5;
const NUM_BLOCKS: usize = 16;
/// Rows of tensors: the last one is never part of a product.
const MAX_ROWS: usize = 9;

/// Type, KV heads, head size and codes of the KV cache. Each is compiled.
const SPECIALISATIONS: [(DType, usize, usize, Option<CodeType>); 4] = [
    (DType::F16, 1, 16, None),
    (DType::BF16, 2, 48, None),
    (DType::BF16, 1, 128, Some(CodeType::Int8)),
    (DType::F16, 1, 32, Some(CodeType::Fp8)),
];

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    /// Columns of results of products without heads.
    n: usize,
    k: usize,
    heads: (usize, usize),
    head_dim: usize,
    codes: Option<CodeType>,
    bias: bool,
    head_norms: bool,
    rotary_dim: Option<usize>,
    seed: u64,
}

impl Case {
    fn random(seed: u64) -> Self {
        let random = &mut Random(seed);
        let (dtype, kv_heads, head_dim, codes) = random.pick(&SPECIALISATIONS);
        Self {
            dtype,
            rows: random.range(1, 8),
            n: random.pick(&[1, 16, 24, 40]),
            // Up to two rounds of all stages of all warps.
            k: random.pick(&[8, 72, 520, 1024, 3080]),
            heads: (2 * kv_heads, kv_heads),
            head_dim,
            codes,
            bias: random.one_in(2),
            head_norms: random.one_in(2),
            rotary_dim: random.pick(&[None, Some(head_dim), Some(head_dim / 2)]),
            seed,
        }
    }

    fn layout(&self) -> KvLayout {
        let dtype = self.codes.map_or(self.dtype.into(), KvDType::Codes);
        KvLayout { num_layers: 2, num_kv_heads: self.heads.1, head_dim: self.head_dim, block_size: 8, dtype }
    }

    fn shape(&self) -> AttentionShape {
        let (num_heads, num_kv_heads) = self.heads;
        AttentionShape { num_heads, num_kv_heads, head_dim: self.head_dim, scale: 1.0, softcap: None, window: None }
    }

    /// One sequence for each row, each in a block of its own.
    fn batch(&self) -> Batch {
        let rows = self.rows;
        Batch {
            hidden_rows: Vec::new(),
            tokens: vec![0; rows],
            token_sources: vec![NO_SOURCE; rows],
            positions: (0..rows as u32).map(|row| 3 * row).collect(),
            slots: (0..rows as u32).map(|row| (NUM_BLOCKS as u32 - 1 - row) * 8 + row % 8).collect(),
            seqs: (0..rows)
                .map(|row| BatchSeq { first_row: row, num_rows: 1, num_computed: 0, first_block: row, num_blocks: 1 })
                .collect(),
            block_tables: (0..rows as u32).map(|row| NUM_BLOCKS as u32 - 1 - row).collect(),
            logit_rows: Vec::new(),
        }
    }

    fn numbers(&self, n: usize, seed: u64) -> Vec<f32> {
        Random(self.seed ^ (seed << 20)).floats(n, self.dtype)
    }
}

/// A backend with a batch, and what a case makes on it.
struct Layer<'a> {
    case: &'a Case,
    device: Rc<dyn Device>,
    backend: CudaBackend,
}

impl<'a> Layer<'a> {
    fn new(case: &'a Case, device: &Rc<dyn Device>, few_rows: FewRowsUse) -> Self {
        let options = CudaOptions { few_rows, ..options(case.dtype, case.heads.0, case.layout()) };
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(case.layout(), NUM_BLOCKS, 0).unwrap();
        backend.begin(&case.batch());
        Self { case, device: device.clone(), backend }
    }

    fn matrix(&self, n: usize, seed: u64) -> CudaMatrix {
        let Case { dtype, k, .. } = *self.case;
        let bytes = dtype.encode(&self.case.numbers(n * k, seed));
        self.backend.matrix(&[HostTensor { format: dtype.into(), rows: n, cols: k, bytes: &bytes }], dtype).unwrap()
    }

    fn vector(&self, n: usize, seed: u64) -> CudaVector {
        let bytes = DType::F32.encode(&self.case.numbers(n, seed));
        self.backend.vector(&[HostTensor { format: DType::F32.into(), rows: 1, cols: n, bytes: &bytes }]).unwrap()
    }

    fn tensor(&self, cols: usize, role: TensorRole, seed: u64) -> CudaTensor {
        let tensor = self.backend.tensor(MAX_ROWS, cols, role).unwrap();
        set(&self.device, &tensor, &self.case.numbers(MAX_ROWS * cols, seed));
        tensor
    }

    fn values(&self, tensor: &CudaTensor, cols: usize) -> Vec<f32> {
        get(&self.device, tensor, self.case.rows * cols)
    }

    /// `x · wᵀ + bias` in float32.
    fn linear(&mut self, x: &CudaTensor, w: &CudaMatrix, bias: Option<&CudaVector>, n: usize) -> Vec<f32> {
        let mut out = self.tensor(n, TensorRole::Residual, 9);
        self.backend.linear(x, w, bias, &mut out);
        self.values(&out, n)
    }

    fn norm(&self) -> Norm<CudaVector> {
        Norm { kind: NormKind::Rms { eps: EPS }, weight: self.vector(self.case.k, 5), bias: None }
    }
}

/// Multiplies rows in bfloat16 with a matrix `[n, k]`.
pub fn multiply(device: &Rc<dyn Device>, (rows, n, k): (usize, usize, usize)) {
    let case = Case { dtype: DType::BF16, rows, n, k, ..Case::random(1) };
    let mut layer = Layer::new(&case, device, FewRowsUse::Always);
    let (w, x) = (layer.matrix(n, 1), layer.tensor(k, TensorRole::Activation, 2));
    layer.linear(&x, &w, None, n);
}

fn check_on(case: &Case, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let mut first: Option<Vec<Vec<f32>>> = None;
    for order in thread_orders() {
        let device = device(order);
        let found = [stored(case, &device), gated(case, &device), heads(case, &device)].concat();
        let first = first.get_or_insert_with(|| found.clone());
        assert!(found.iter().zip(first).all(|(found, first)| bits(found) == bits(first)), "{case:?}, order {order}");
    }
}

/// The product against float64: the bound is that of sums of float32. The residual stream gets the same numbers.
fn stored(case: &Case, device: &Rc<dyn Device>) -> Vec<Vec<f32>> {
    let Case { rows, n, k, .. } = *case;
    let mut layer = Layer::new(case, device, FewRowsUse::Always);
    let (w, x, bias) = (layer.matrix(n, 1), layer.tensor(k, TensorRole::Activation, 2), layer.vector(n, 3));
    let bias = case.bias.then_some(&bias);
    let found = layer.linear(&x, &w, bias, n);
    let (x_values, w_values) = (case.numbers(rows * k, 2), case.numbers(n * k, 1));
    let biases = if case.bias { case.numbers(n, 3) } else { vec![0.0; n] };
    for (row, x) in x_values.chunks_exact(k).enumerate() {
        for (column, w) in w_values.chunks_exact(k).enumerate() {
            let products = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let expected = products().sum::<f64>() + f64::from(biases[column]);
            let bound = (k + 10) as f64 * 2_f64.powi(-24) * (products().map(f64::abs).sum::<f64>() + 1.0);
            let got = f64::from(found[row * n + column]);
            assert!((got - expected).abs() <= bound, "{case:?}, {row}, {column}: {got}, {expected}");
        }
    }
    let mut narrow = layer.tensor(n, TensorRole::Activation, 9);
    layer.backend.linear(&x, &w, bias, &mut narrow);
    let rounded = round(&found, case.dtype);
    assert_eq!(bits(&layer.values(&narrow, n)), bits(&rounded), "{case:?}");

    let mut stream = layer.tensor(n, TensorRole::Residual, 4);
    let before = get(&layer.device, &stream, MAX_ROWS * n);
    let mut delta = layer.tensor(n, TensorRole::Unfused, 9);
    assert!(!layer.backend.residual_linear(&x, &w, bias, &mut stream, &mut delta), "the stream has the sum");
    let after = get(&layer.device, &stream, MAX_ROWS * n);
    let sums: Vec<f32> = before.iter().zip(&found).map(|(before, found)| before + found).collect();
    assert_eq!(bits(&after[..rows * n]), bits(&sums), "{case:?}");
    // Products are launched for a power of two.
    let launched = rows.next_power_of_two() * n;
    assert_eq!(bits(&after[launched..]), bits(&before[launched..]), "other rows, {case:?}");
    vec![found]
}

/// The norm is that of the separate launch, bit by bit. The activation is of the sums before they are rounded.
fn gated(case: &Case, device: &Rc<dyn Device>) -> Vec<Vec<f32>> {
    let Case { n, k, rows, .. } = *case;
    let mut layer = Layer::new(case, device, FewRowsUse::Always);
    let (w, bias, norm) = (layer.matrix(2 * n, 1), layer.vector(2 * n, 3), layer.norm());
    let bias = case.bias.then_some(&bias);
    let mut stream = layer.tensor(k, TensorRole::Residual, 4);
    let mut normed = layer.tensor(k, TensorRole::Activation, 2);
    layer.backend.norm(&stream, &norm, &mut normed);
    let sums = layer.linear(&normed, &w, bias, 2 * n);
    let expected: Vec<f64> = (0..rows * n)
        .map(|i| {
            let row = &sums[i / n * 2 * n..][..2 * n];
            let (gate, up) = (f64::from(row[i % n]), f64::from(row[n + i % n]));
            gate / (1.0 + (-gate).exp()) * up
        })
        .collect();
    let mut work = layer.tensor(2 * n, TensorRole::Unfused, 9);
    let mut out = layer.tensor(n, TensorRole::Activation, 9);
    layer.backend.gated_linear(&normed, &w, bias, Activation::Silu, &mut work, &mut out);
    let plain = layer.values(&out, n);
    assert_close(&plain, &expected, tolerance(case.dtype), &format!("{case:?}"));
    // Overwritten, so that nothing is taken from there.
    set(&layer.device, &normed, &vec![f32::NAN; MAX_ROWS * k]);
    set(&layer.device, &out, &vec![f32::NAN; MAX_ROWS * n]);
    let input = NormedInput { stream: &mut stream, delta: None, norm: &norm, normed: &mut normed };
    layer.backend.normed_gated_linear(input, &w, bias, Activation::Silu, &mut work, &mut out);
    assert_eq!(bits(&layer.values(&out, n)), bits(&plain), "{case:?}");
    vec![plain]
}

/// Q and the pool are, bit by bit, as after the norm, the product, the norms of heads, and the rotary embedding.
fn heads(case: &Case, device: &Rc<dyn Device>) -> Vec<Vec<f32>> {
    let (&Case { k, rows, .. }, shape) = (case, case.shape());
    let n = shape.qkv_cols();
    let run = |fused: bool| {
        let mut layer = Layer::new(case, device, FewRowsUse::Always);
        let (w, bias, norm) = (layer.matrix(n, 1), layer.vector(n, 3), layer.norm());
        let bias = case.bias.then_some(&bias);
        let [q, k_norm] = [6, 7].map(|seed| Norm {
            kind: NormKind::Rms { eps: 1e-6 },
            weight: layer.vector(case.head_dim, seed),
            bias: None,
        });
        let rope = case.rotary_dim.map(|rotary_dim| {
            let inv_freq = (0..rotary_dim / 2).map(|i| 0.5_f32.powi(i as i32)).collect();
            let rope = Rope { rotary_dim, inv_freq, attention_factor: 1.1, max_positions: 60 };
            layer.backend.rope_table(&rope).unwrap()
        });
        let norms = case.head_norms.then_some([&q, &k_norm]);
        let heads = Heads { shape: &shape, norms, rope: rope.as_ref(), layer: 1 };
        let mut stream = layer.tensor(k, TensorRole::Residual, 4);
        let mut normed = layer.tensor(k, TensorRole::Activation, 2);
        let mut qkv = layer.tensor(n, TensorRole::Activation, 9);
        if fused {
            let input = NormedInput { stream: &mut stream, delta: None, norm: &norm, normed: &mut normed };
            layer.backend.normed_qkv_linear(input, &w, bias, &heads, &mut qkv);
        } else {
            layer.backend.norm(&stream, &norm, &mut normed);
            layer.backend.linear(&normed, &w, bias, &mut qkv);
            if let Some([q, k]) = norms {
                layer.backend.qk_norm(&mut qkv, &shape, q, k);
            }
            layer.backend.rope_and_write_kv(&mut qkv, &shape, rope.as_ref(), 1);
        }
        let q_cols = shape.num_heads * shape.head_dim;
        let q: Vec<f32> = layer.values(&qkv, n).chunks_exact(n).flat_map(|row| row[..q_cols].to_vec()).collect();
        assert_eq!(q.len(), rows * q_cols);
        let pool = layer.backend.kv_pool().expect("it is allocated");
        (q, download_bytes(&layer.device, pool))
    };
    let ((q, pool), (expected_q, expected_pool)) = (run(true), run(false));
    assert_eq!(bits(&q), bits(&expected_q), "{case:?}");
    let differing = pool.iter().zip(&expected_pool).filter(|(a, b)| a != b).count();
    assert_eq!(differing, 0, "bytes of the pool, {case:?}");
    vec![q]
}

#[test]
fn the_sums_are_right_and_the_rest_is_that_of_separate_launches() {
    parallel(0..16, |seed| check_on(&Case::random(seed * 131 + 5), &device));
}

/// A row has the same bytes alone and beside others.
#[test]
fn a_row_does_not_see_the_others() {
    for dtype in [DType::F16, DType::BF16] {
        let case = |rows| Case { dtype, rows, k: 520, n: 40, ..Case::random(1) };
        let of = |rows| {
            let case = case(rows);
            let mut layer = Layer::new(&case, &device(0), FewRowsUse::Always);
            let (w, x) = (layer.matrix(40, 1), layer.tensor(520, TensorRole::Activation, 2));
            layer.linear(&x, &w, None, 40)
        };
        let all = of(8);
        for rows in [1, 3] {
            assert_eq!(bits(&of(rows)), bits(&all[..rows * 40]), "{dtype:?}, {rows} rows");
        }
    }
}

/// Without the kernels, and for what they do not cover, the separate launches run.
#[test]
fn other_products_take_separate_launches() {
    if on_gpu() {
        return;
    }
    let usual = Case { rows: 8, k: 72, ..Case::random(1) };
    let cases = [
        (usual.clone(), FewRowsUse::Always, 0),
        (usual.clone(), FewRowsUse::Never, 1),
        (Case { rows: 9, ..usual.clone() }, FewRowsUse::Always, 1),
        (Case { k: 76, ..usual.clone() }, FewRowsUse::Always, 1),
        (Case { dtype: DType::F32, codes: None, ..usual }, FewRowsUse::Always, 1),
    ];
    for (case, few_rows, expected) in cases {
        let emulated = Rc::new(EmulatedDevice::new(EmulatedOptions::default()));
        let device: Rc<dyn Device> = emulated.clone();
        let options = CudaOptions { few_rows, ..options(case.dtype, case.heads.0, case.layout()) };
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(case.layout(), NUM_BLOCKS, 0).unwrap();
        backend.begin(&case.batch());
        let layer = Layer { case: &case, device, backend };
        let (w, x) = (layer.matrix(16, 1), layer.backend.tensor(32, case.k, TensorRole::Activation).unwrap());
        set(&layer.device, &x, &case.numbers(32 * case.k, 2));
        let mut out = layer.backend.tensor(32, 16, TensorRole::Activation).unwrap();
        let Layer { mut backend, .. } = layer;
        backend.linear(&x, &w, None, &mut out);
        assert_eq!(emulated.num_matmuls.get(), expected, "{case:?}, {few_rows:?}");
    }
}

/// The first product of a shape times both ways for all numbers of rows, and leaves no trace in the stream.
#[test]
fn the_faster_way_is_taken() {
    if on_gpu() {
        return;
    }
    for (clock, is_one_launch) in [((1.0, 3.0), true), ((4.0, 1.0), false)] {
        let case = Case { rows: 2, k: 72, n: 16, ..Case::random(1) };
        let options = EmulatedOptions { clock: Some(clock), ..EmulatedOptions::default() };
        let emulated = Rc::new(EmulatedDevice::new(options));
        let mut layer = Layer::new(&case, &(emulated.clone() as Rc<dyn Device>), FewRowsUse::Timed);
        let (w, x) = (layer.matrix(16, 1), layer.tensor(72, TensorRole::Activation, 2));
        let mut stream = layer.tensor(16, TensorRole::Residual, 4);
        let mut delta = layer.tensor(16, TensorRole::Unfused, 9);
        let before = layer.values(&stream, 16);
        let counts = || (emulated.num_launches.get(), emulated.num_matmuls.get());
        let started = counts();
        let is_pending = layer.backend.residual_linear(&x, &w, None, &mut stream, &mut delta);
        let timed = counts();
        assert_eq!(is_pending, !is_one_launch, "{clock:?}");
        assert!(timed.0 - started.0 >= 4 && timed.1 - started.1 >= 4, "{started:?}, {timed:?}");
        assert_eq!(bits(&layer.values(&stream, 16)) == bits(&before), !is_one_launch, "{clock:?}");
        layer.backend.residual_linear(&x, &w, None, &mut stream, &mut delta);
        let ended = counts();
        assert_eq!((ended.0 - timed.0, ended.1 - timed.1), if is_one_launch { (1, 0) } else { (0, 1) }, "{clock:?}");
    }
}

/// Launches of a decode step of one sequence: five a layer, where they were nine, or ten with norms of heads.
#[test]
fn a_layer_has_five_launches() {
    if on_gpu() {
        return;
    }
    let nodes = |model: &str, dtype: DType, few_rows: FewRowsUse| {
        let device = Rc::new(EmulatedDevice::new(EmulatedOptions::default()));
        let folder = root().join("tests/data/models").join(model);
        let (mut backend, mut decoder) =
            cuda_model(&(device.clone() as Rc<dyn Device>), folder.to_str().unwrap(), dtype, 16, 64, |options| {
                options.few_rows = few_rows;
            });
        backend.allocate_kv(decoder.kv_layout(16), 4, 0).unwrap();
        let seq = BatchSeq { first_row: 0, num_rows: 1, num_computed: 0, first_block: 0, num_blocks: 1 };
        let batch = Batch {
            tokens: vec![0],
            token_sources: vec![NO_SOURCE],
            positions: vec![0],
            slots: vec![0],
            seqs: vec![seq],
            block_tables: vec![0],
            logit_rows: vec![0],
            ..Batch::default()
        };
        backend.record(|backend| decoder.repeat(backend, &batch, 1));
        (device.nodes_of_last_graph(), decoder.spec().num_layers())
    };
    // Embedding, last norm, rows of the logits, and the vocabulary.
    const OTHERS: usize = 4;
    for (model, dtype, separate) in [
        ("llama-rope-llama3", DType::BF16, 9),
        ("mistral-no-window", DType::F16, 9),
        ("phi3", DType::BF16, 9),
        ("qwen3", DType::BF16, 10),
    ] {
        let (found, layers) = nodes(model, dtype, FewRowsUse::Always);
        assert_eq!(found, OTHERS + 5 * layers, "{model}");
        let (found, layers) = nodes(model, dtype, FewRowsUse::Never);
        assert_eq!(found, OTHERS + separate * layers, "{model}");
    }
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let breakages = [
        ("include/few_rows.cuh", "&& column < p.k;", "&& column <= p.k;"),
        ("include/few_rows.cuh", "k_tile + (STAGES - 1) * FEW_WARPS);", "k_tile + STAGES * FEW_WARPS);"),
        ("include/few_rows.cuh", "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
        ("include/few_rows.cuh", "        __syncthreads();  // the warps' sums overwrite the tiles\n", ""),
        ("include/few_rows.cuh", "sum / p.k + p.eps", "sum / p.k"),
        ("include/few_rows.cuh", "row < p.rows && column < p.columns) {", "row < p.rows && column + 1 < p.columns) {"),
        ("few_rows.cu", "p.bias[columns + column]", "p.bias[column]"),
        ("few_rows.cu", "p.out_float[at] + value", "value"),
        ("few_rows_qkv.cu", "== HEAD_BLOCKS - 1;", "== 0;"),
        ("few_rows_qkv.cu", "head < NUM_HEADS ? p.q_norm", "head < NUM_KV_HEADS ? p.q_norm"),
        ("few_rows_qkv.cu", "min(p.input.rows, p.rope.batch->num_rows)", "p.input.rows - 1"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| (0..16).for_each(|seed| check_on(&Case::random(seed * 131 + 5), device)));
    });
}
