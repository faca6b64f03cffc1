//! Layers of experts on the device against the CPU backend: every kind of kernel, few rows and many, experts that all
//! rows choose and experts that no row chooses.

use crate::quantized::{blocks, dequantized};
use crate::support::*;
use pagetide::backend::cpu::CpuBackend;
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::quant::QuantFormat;
use pagetide::backend::{
    Activation, Backend, Batch, BatchSeq, DType, Experts, ExpertsShape, HostTensor, KvLayout, NO_SOURCE, TensorRole,
    WeightFormat,
};
use std::rc::Rc;

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    shape: ExpertsShape,
    /// Of the experts' matrices. Rows are then multiples of 32, in FP8 of 64, and experts' rows of 16.
    format: Option<WeightFormat>,
    batch_invariant: bool,
    seed: u64,
}

impl Case {
    fn random(seed: u64) -> Self {
        let random = &mut Random(seed);
        let num_experts = random.pick(&[1, 2, 3, 8, 40, 70]);
        let shape = ExpertsShape {
            num_experts,
            num_chosen: random.range(1, num_experts.min(9)),
            // Some that tensor cores do not support, and some that are not multiples of a tile.
            hidden_size: random.pick(&[8, 24, 64, 72, 136, 13]),
            intermediate_size: random.pick(&[8, 16, 40, 64, 100]),
            activation: random.pick(&[Activation::Silu, Activation::GeluTanh]),
            renormalize: random.one_in(2),
        };
        let rows = match random.below(3) {
            0 => 1,
            1 => random.range(2, 20),
            _ => random.pick(&[63, 64, 65, 100]),
        };
        let dtype = random.pick(&[DType::F32, DType::F16, DType::BF16, DType::BF16]);
        Self { dtype, rows, shape, format: None, batch_invariant: random.one_in(3), seed }
    }

    fn x(&self) -> Vec<f32> {
        Random(self.seed ^ 1).floats(self.rows * self.shape.hidden_size, self.dtype)
    }

    /// Numbers in [-size, size), in a checkpoint's format.
    fn stored(&self, n: usize, size: f32, seed: u64) -> Vec<u8> {
        let numbers: Vec<f32> = Random(self.seed ^ seed << 8).floats(n, DType::F32).iter().map(|x| x * size).collect();
        self.dtype.encode(&numbers)
    }
}

fn batch(rows: usize) -> Batch {
    let seq = |row| BatchSeq { first_row: row, num_rows: 1, num_computed: 0, first_block: row, num_blocks: 1 };
    Batch {
        hidden_rows: Vec::new(),
        tokens: vec![0; rows],
        token_sources: vec![NO_SOURCE; rows],
        positions: vec![0; rows],
        slots: (0..rows as u32).collect(),
        seqs: (0..rows).map(seq).collect(),
        block_tables: (0..rows as u32).collect(),
        logit_rows: Vec::new(),
    }
}

fn layout(case: &Case) -> KvLayout {
    KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 8, block_size: 1, dtype: case.dtype.into() }
}

/// With `quantised`, a case's formats are kept. Otherwise the matrices have the weights that the codes stand for.
fn experts<B: Backend>(backend: &B, case: &Case, quantised: bool) -> Experts<B::Matrix, B::Matrices> {
    let ExpertsShape { num_experts, hidden_size: hidden, intermediate_size: width, .. } = case.shape;
    let size = |k: usize| 2.0 * (k as f32).powf(-0.5);
    let tensor = |rows, cols, bytes| HostTensor { format: case.dtype.into(), rows, cols, bytes };
    let mut router = case.stored(num_experts * hidden, size(hidden), 2);
    if num_experts > 1 && case.seed.is_multiple_of(2) {
        // Two experts with equal logits: the first one must be chosen.
        let row_bytes = router.len() / num_experts;
        router.copy_within(..row_bytes, row_bytes);
    }
    let stored = |n: usize, size: f32, seed: u64| match case.format {
        None => case.stored(n, size, seed),
        Some(format) => {
            let blocks = blocks(format, n / format.block().0, &mut Random(case.seed ^ seed << 8));
            if quantised { blocks } else { case.dtype.encode(&dequantized(format, &blocks, case.dtype)) }
        }
    };
    let held = case.format.filter(|_| quantised).unwrap_or(case.dtype.into());
    let up: Vec<_> = (0..2 * num_experts as u64).map(|i| stored(width * hidden, size(hidden), 10 + i)).collect();
    let down: Vec<_> = (0..num_experts as u64).map(|i| stored(hidden * width, size(width), 1000 + i)).collect();
    let up: Vec<_> = up.iter().map(|bytes| HostTensor { format: held, ..tensor(width, hidden, bytes) }).collect();
    let down: Vec<_> = down.iter().map(|bytes| HostTensor { format: held, ..tensor(hidden, width, bytes) }).collect();
    Experts {
        router: backend.matrix(&[tensor(num_experts, hidden, &router)], case.dtype).unwrap(),
        up: backend.matrices(num_experts, &up, case.dtype).unwrap(),
        down: backend.matrices(num_experts, &down, case.dtype).unwrap(),
    }
}

/// `x: [rows, hidden]`
fn on_cpu(case: &Case, x: &[f32]) -> Vec<f32> {
    let mut backend = CpuBackend::new(Default::default()).unwrap();
    let rows = x.len() / case.shape.hidden_size;
    backend.allocate_kv(layout(case), rows, 0).unwrap();
    let experts = experts(&backend, case, false);
    let mut work = backend.experts_workspace(rows, &case.shape).unwrap();
    let tensor = || backend.tensor(rows, case.shape.hidden_size, TensorRole::Activation).unwrap();
    let (mut input, mut out) = (tensor(), tensor());
    input.as_mut_slice()[..x.len()].copy_from_slice(x);
    backend.begin(&batch(rows));
    backend.mix_experts(&input, &experts, &case.shape, &mut work, &mut out);
    out.as_slice()[..x.len()].to_vec()
}

fn on_cuda(case: &Case, x: &[f32], device: &Rc<dyn Device>) -> Vec<f32> {
    let rows = x.len() / case.shape.hidden_size;
    let max_rows = rows + 3;
    let mut options = options(case.dtype, 1, layout(case));
    (options.max_rows, options.experts) = (max_rows, true);
    options.batch_invariant |= case.batch_invariant;
    let mut backend = CudaBackend::new(device.clone(), options).unwrap();
    backend.allocate_kv(layout(case), rows, 0).unwrap();
    let experts = experts(&backend, case, true);
    let mut work = backend.experts_workspace(max_rows, &case.shape).unwrap();
    let tensor = || backend.tensor(max_rows, case.shape.hidden_size, TensorRole::Activation).unwrap();
    let (input, mut out) = (tensor(), tensor());
    set(device, &input, x);
    backend.begin(&batch(rows));
    backend.mix_experts(&input, &experts, &case.shape, &mut work, &mut out);
    backend.end_step();
    backend.finish_step();
    get(device, &out, x.len())
}

fn check(case: &Case) {
    check_on(case, &device);
}

fn check_on(case: &Case, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let expected: Vec<f64> = on_cpu(case, &case.x()).into_iter().map(f64::from).collect();
    let mut first: Option<Vec<f32>> = None;
    for order in thread_orders() {
        let found = on_cuda(case, &case.x(), &device(order));
        assert_close(&found, &expected, 3.0 * tolerance(case.dtype), &format!("{case:?}"));
        let first = first.get_or_insert_with(|| found.clone());
        assert_eq!(bits(&found), bits(first), "{case:?} under order {order}");
    }
}

#[test]
fn random_cases() {
    parallel(0..30, |seed| check(&Case::random(seed * 6007 + 11)));
}

fn shape(num_experts: usize, num_chosen: usize) -> ExpertsShape {
    ExpertsShape {
        num_experts,
        num_chosen,
        hidden_size: 72,
        intermediate_size: 40,
        activation: Activation::Silu,
        renormalize: true,
    }
}

/// More rows than are computed at a time, and more rows of one expert than a tile has.
#[test]
fn rows_in_several_pieces() {
    let shape = ExpertsShape { hidden_size: 16, intermediate_size: 8, ..shape(3, 2) };
    check(&case(DType::BF16, 2100, shape, 5));
}

/// Experts with more rows than a warp group has and with fewer, more slices than shared memory holds, the last of which
/// is not whole, and more columns than a thread block has.
fn on_warp_groups() -> Case {
    let shape = ExpertsShape { hidden_size: 336, intermediate_size: 136, ..shape(4, 2) };
    case(DType::BF16, 130, shape, 7)
}

pub fn check_on_warp_groups(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&on_warp_groups(), device);
}

/// Computes a layer of one expert, whose matrices are multiplied with all rows.
pub fn mix_one(
    device: &Rc<dyn Device>,
    (rows, hidden_size, intermediate_size): (usize, usize, usize),
    is_hopper: bool,
) {
    let shape = ExpertsShape { hidden_size, intermediate_size, ..shape(1, 1) };
    let case = Case { batch_invariant: !is_hopper, ..case(DType::BF16, rows, shape, 1) };
    on_cuda(&case, &case.x(), device);
}

#[test]
fn many_rows() {
    check(&on_warp_groups());
    check(&Case { dtype: DType::F16, batch_invariant: true, ..on_warp_groups() });
}

/// Checks rows of four experts, of which each row takes two.
pub fn check_rows(dtype: DType, rows: usize, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&case(dtype, rows, shape(4, 2), 2), device);
}

fn case(dtype: DType, rows: usize, shape: ExpertsShape, seed: u64) -> Case {
    Case { dtype, rows, shape, format: None, batch_invariant: false, seed }
}

fn quantised(format: impl Into<WeightFormat>, rows: usize) -> Case {
    let format = format.into();
    let hidden_size = if format == WeightFormat::Fp8 { 128 } else { 96 };
    let shape = ExpertsShape { hidden_size, intermediate_size: 64, ..shape(3, 2) };
    Case { format: Some(format), ..case(DType::BF16, rows, shape, 4) }
}

#[test]
fn quantised_experts() {
    let formats = [QuantFormat::Q4_0, QuantFormat::Q4_1, QuantFormat::Q8_0, QuantFormat::Q5_0];
    let formats: Vec<_> = formats.map(WeightFormat::from).into_iter().chain([WeightFormat::Fp8]).collect();
    parallel(0..formats.len() as u64, |i| check(&quantised(formats[i as usize], [1, 5, 70, 130, 20][i as usize])));
}

/// The contract of every backend: a row's bytes are the same alone and in any batch.
#[test]
fn a_row_does_not_see_the_others() {
    for dtype in DTYPES {
        let case = case(dtype, 70, shape(5, 2), 3);
        let (x, hidden) = (case.x(), case.shape.hidden_size);
        let (cpu, cuda) = (on_cpu(&case, &x), on_cuda(&case, &x, &batch_invariant_device(0)));
        for row in [0, 1, 33, 69] {
            let range = row * hidden..(row + 1) * hidden;
            let alone = on_cpu(&case, &x[range.clone()]);
            assert_eq!(bits(&alone), bits(&cpu[range.clone()]), "{dtype:?} on the CPU, row {row}");
            let alone = on_cuda(&case, &x[range.clone()], &batch_invariant_device(1));
            assert_eq!(bits(&alone), bits(&cuda[range]), "{dtype:?}, row {row}");
        }
    }
}

#[test]
fn too_many_experts_are_refused() {
    let case = case(DType::F32, 1, shape(64, 33), 1);
    let mut options = options(case.dtype, 1, layout(&case));
    options.experts = true;
    let backend = CudaBackend::new(device(0), options).unwrap();
    let error = backend.experts_workspace(1, &case.shape).err().unwrap().to_string();
    assert!(error.contains("33 of 64 experts") && error.contains("--device cpu"), "{error}");
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    // Batch-invariant: not on warp groups.
    let tiled = Case { batch_invariant: true, ..case(DType::BF16, 200, shape(4, 2), 2) };
    let simple = Case { dtype: DType::F32, ..tiled.clone() };
    let softmax = Case { shape: ExpertsShape { renormalize: false, ..tiled.shape }, ..tiled.clone() };
    let breakages: [(&Case, &str, &str); 11] = [
        (&tiled, "p.renormalize ? total : sum", "sum"),
        (&softmax, "p.renormalize ? total : sum", "total"),
        (&tiled, "weights[best.index] = -1.0f;", ""),
        (&tiled, "index < best.index", "index > best.index"),
        (&tiled, "tile += ceil_div(counts[i], p.tile_rows);", "tile += counts[i] / p.tile_rows;"),
        (&tiled, "next[i] + row, min", "next[i], min"),
        (&tiled, "const bool is_inside = from < p.k;", "const bool is_inside = true;"),
        (&tiled, "copy_async_wait<STAGES - 2>();\n        __syncthreads();", "__syncthreads();"),
        (&tiled, "copy_async_wait<STAGES - 2>();\n        __syncthreads();", "copy_async_wait<STAGES - 2>();"),
        (&simple, "uint64_t(expert) * p.n + column", "uint64_t(expert / 2) * p.n + column"),
        (&simple, "p.weights[choice] * to_float", "to_float"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, from, to) = breakages[i as usize];
        breaks("experts.cu", from, to, |device| check_on(case, device));
    });
    let hopper = on_warp_groups();
    let breakages = [
        ("mbarrier_wait(&barriers.full[place.stage], place.parity);", ""),
        ("mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);", ""),
        ("const bool is_inside = from < p.k;", "const bool is_inside = true;"),
        ("min(first_row + i * AT_A_TIME, tile.num_rows - 1)", "0"),
        ("+ group * GROUP_ROWS * PANEL;", ";"),
        ("w + PRODUCT_COLS * PANEL + d", "w + d"),
        ("if (row >= tile.num_rows) {", "if (row + 1 >= tile.num_rows) {"),
        ("if (column < p.n) {", "if (column <= p.n) {"),
        ("barriers.init(WARP_GROUP / WARP_SIZE, num_groups", "barriers.init(WARP_GROUP / WARP_SIZE, 2"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (from, to) = breakages[i as usize];
        breaks("experts_hopper.cu", from, to, |device| check_on(&hopper, device));
    });
    let divided = "p.choices[place] / p.piece.num_chosen : place";
    breaks("include/experts.cuh", divided, "p.choices[place] : place", |device| check_on(&tiled, device));
    let quantised = quantised(QuantFormat::Q4_0, 20);
    breaks("quantized.cu", "tile.expert * matrix_bytes", "0", |device| check_on(&quantised, device));
    breaks("quantized.cu", "x_row_of(p, tile.first + row)", "x_row_of(p, row)", |device| check_on(&quantised, device));
}
