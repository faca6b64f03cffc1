//! Memory beyond 4 GiB and 2³² elements. Pools, tables and logits are sparse: few of their pages are touched. What a
//! kernel computes there must have the same bits as with the same data at low offsets.

use crate::attention::add;
use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::support::*;
use pagetide::backend::cuda::device::{Copy, Device, DeviceBuffer, DevicePtr, PinnedBuffer, Stream};
use pagetide::backend::cuda::sampling::{self, SamplingKernels};
use pagetide::backend::cuda::transfers::{self, TransferKernels};
use pagetide::backend::cuda::{CudaBackend, CudaTensor};
use pagetide::backend::{
    Activation, AttentionShape, Backend, Batch, CodeType, DType, Experts, ExpertsShape, HostTensor, KvDType, KvLayout,
    LogitsRequest, LogitsResult, LogitsWant, TensorRole,
};
use pagetide::ids::{BlockId, KvPlace};
use pagetide::sampling::params::{SamplingParams, TokenLimits};
use pagetide::sampling::sampler::Draw;
use std::rc::Rc;

mod long;
mod weights;

const GIB: usize = 1 << 30;

/// More than the host has.
fn sparse_options() -> EmulatedOptions {
    EmulatedOptions { total_memory: 1 << 40, ..EmulatedOptions::default() }
}

fn sparse_device(options: EmulatedOptions) -> Rc<dyn Device> {
    Rc::new(EmulatedDevice::new(options))
}

/// A GPU if it has room for `bytes` bytes, else none; or the emulation.
fn device_with_room(bytes: usize) -> Option<Rc<dyn Device>> {
    if !on_gpu() {
        return Some(sparse_device(sparse_options()));
    }
    let device = device(0);
    let has_room = device.memory().unwrap().0 > bytes + GIB;
    println!("{}", if has_room { "on the GPU" } else { "skipped: the GPU has too little memory" });
    has_room.then_some(device)
}

/// Overwrites bytes of device memory.
fn put(device: &Rc<dyn Device>, to: DevicePtr, bytes: &[u8]) {
    let mut staging = PinnedBuffer::new(device, bytes.len()).unwrap();
    // SAFETY: no enqueued operation uses it.
    unsafe { staging.as_mut_slice() }.copy_from_slice(bytes);
    let copy = Copy { to, from: staging.ptr(), bytes: bytes.len() };
    // SAFETY: dropping `staging` waits for the device.
    unsafe { device.copy(Stream::Compute, copy) }.unwrap();
}

// --- the KV cache

/// Layers make blocks large, and nothing is in layers but the last.
const NUM_LAYERS: usize = 512;
const BLOCK_SIZE: usize = 16;
const NUM_HEADS: usize = 4;

#[derive(Clone, Copy, Debug)]
struct PoolCase {
    dtype: DType,
    codes: Option<CodeType>,
    head_dim: usize,
}

/// Where the blocks of a run are in its pool.
struct Places {
    blocks: Vec<u32>,
    num_blocks: usize,
}

/// Blocks of a run.
const NUM_PLACES: usize = 15;

impl PoolCase {
    fn layout(&self) -> KvLayout {
        let dtype = self.codes.map_or(self.dtype.into(), KvDType::Codes);
        let head_dim = self.head_dim;
        KvLayout { num_layers: NUM_LAYERS, num_kv_heads: 1, head_dim, block_size: BLOCK_SIZE, dtype }
    }

    fn shape(&self) -> AttentionShape {
        let head_dim = self.head_dim;
        AttentionShape { num_heads: NUM_HEADS, num_kv_heads: 1, head_dim, scale: 1.0, softcap: None, window: None }
    }

    fn low(&self) -> Places {
        Places { blocks: (0..NUM_PLACES as u32).collect(), num_blocks: NUM_PLACES }
    }

    /// Blocks at both ends of a pool of more than 4 GiB and 2³² elements, and around 2³¹ elements, 2³² elements
    /// and 4 GiB.
    fn spread(&self) -> Places {
        let block_bytes = self.layout().block_bytes();
        let element_bytes = if self.codes.is_some() { 1 } else { self.dtype.size_bytes() };
        let at = |bytes: usize| (bytes / block_bytes) as u32;
        let edges = [at((1 << 31) * element_bytes), at((1 << 32) * element_bytes), at(1 << 32)];
        let num_blocks = edges[1] + 512;
        let mut blocks: Vec<u32> = edges.iter().flat_map(|edge| edge - 1..edge + 3).collect();
        blocks.extend([0, 1, 2, num_blocks - 1, num_blocks - 2, num_blocks - 3]);
        blocks.sort_unstable();
        blocks.dedup();
        // Of those around the first edge some are left out, so that both ends are there.
        while blocks.len() > NUM_PLACES {
            blocks.remove(3);
        }
        blocks.extend((3..).take(NUM_PLACES - blocks.len()));
        // No two neighbours in a block table.
        let blocks = (0..NUM_PLACES).map(|i| blocks[i * 7 % NUM_PLACES]).collect();
        Places { blocks, num_blocks: num_blocks as usize }
    }

    /// What is computed and copied: attention's results, then the last layer of each block that was written.
    fn run(&self, device: &Rc<dyn Device>, places: &Places) -> (Vec<f32>, Vec<u8>) {
        let (layout, shape, layer) = (self.layout(), self.shape(), NUM_LAYERS - 1);
        let at = |index: usize| BlockId(places.blocks[index]);
        // A decode and a prompt.
        let tables = [&places.blocks[..5], &places.blocks[5..9]];
        let (mut before, mut new) = (Batch::default(), Batch::default());
        for (table, (num_before, num_new)) in tables.iter().zip([(79, 1), (40, 24)]) {
            add(&mut before, 0, num_before, table, BLOCK_SIZE);
            add(&mut new, num_before, num_new, table, BLOCK_SIZE);
        }
        let (max_rows, cols) = (before.num_rows(), shape.qkv_cols());
        let mut options = options(self.dtype, NUM_HEADS, layout);
        options.max_rows = max_rows;
        let mut backend = CudaBackend::new(device.clone(), options).unwrap();
        backend.allocate_kv(layout, places.num_blocks, 2).unwrap();
        let mut qkv = backend.tensor(max_rows, cols, TensorRole::Activation).unwrap();
        let mut out = backend.tensor(max_rows, NUM_HEADS * self.head_dim, TensorRole::Activation).unwrap();
        for (batch, seed) in [(&before, 1), (&new, 2)] {
            set(device, &qkv, &Random(seed).floats(batch.num_rows() * cols, self.dtype));
            backend.begin(batch);
            backend.rope_and_write_kv(&mut qkv, &shape, None, layer);
            if seed == 2 {
                backend.attention(&qkv, &shape, layer, &mut out);
                backend.copy_blocks(&[(at(1), at(10)), (at(4), at(11)), (at(6), at(12))]);
            }
            backend.end_step();
            backend.finish_step();
        }
        let attended = get(device, &out, new.num_rows() * NUM_HEADS * self.head_dim);
        assert!(backend.swap_out(&[(at(3), BlockId(0)), (at(10), BlockId(1))]));
        assert!(backend.swap_in(&[(BlockId(0), at(13)), (BlockId(1), at(14))]));
        let written: Vec<KvPlace> =
            (0..NUM_PLACES).filter(|index| *index != 9).map(|index| KvPlace::Device(at(index))).collect();
        let mut blocks = vec![0; written.len() * layout.block_bytes()];
        backend.read_blocks(&written, &mut blocks);
        let layer_bytes = layout.block_bytes() / NUM_LAYERS;
        let last_layers =
            blocks.chunks(layout.block_bytes()).flat_map(|block| &block[layer * layer_bytes..]).copied().collect();
        (attended, last_layers)
    }

    fn check_on(&self, device: &dyn Fn(u32) -> Rc<dyn Device>) {
        let (expected, expected_blocks) = self.run(&device(0), &self.low());
        assert!(expected.iter().all(|x| x.is_finite()) && expected.iter().any(|x| x.abs() > 0.1));
        let (found, blocks) = self.run(&device(0), &self.spread());
        assert_eq!(bits(&found), bits(&expected), "{self:?}: attention");
        assert!(blocks == expected_blocks, "{self:?}: contents of blocks");
    }
}

/// Prompts with heads of 64 are computed on warp groups.
const POOL_CASES: [PoolCase; 6] = [
    PoolCase { dtype: DType::BF16, codes: None, head_dim: 16 },
    PoolCase { dtype: DType::BF16, codes: Some(CodeType::Int8), head_dim: 16 },
    PoolCase { dtype: DType::F16, codes: Some(CodeType::Fp8), head_dim: 16 },
    PoolCase { dtype: DType::F32, codes: None, head_dim: 16 },
    PoolCase { dtype: DType::BF16, codes: None, head_dim: 64 },
    PoolCase { dtype: DType::F16, codes: Some(CodeType::Int8), head_dim: 64 },
];

/// K and V are written, read by attention, and copied: within the pool and to the swap pool and back.
#[test]
fn blocks_may_be_anywhere_in_a_large_pool() {
    parallel(0..POOL_CASES.len() as u64, |i| {
        let case = POOL_CASES[i as usize];
        let bytes = case.spread().num_blocks * case.layout().block_bytes();
        assert!(bytes > 4 * GIB);
        if let Some(device) = device_with_room(bytes) {
            drop(device);
            case.check_on(&|_| device_with_room(bytes).expect("there was room before"));
        }
    });
}

// --- tables, matrices of experts, and logits

/// An emulated device on which matrices of random numbers stay zeros. A test writes what it needs of them.
fn device_without_random_numbers() -> Rc<EmulatedDevice> {
    Rc::new(EmulatedDevice::new(EmulatedOptions { leaves_out: Some("fill_random"), ..sparse_options() }))
}

/// Steps whose rows have these tokens.
fn batch_of(tokens: &[u32]) -> Batch {
    let mut batch = Batch::default();
    add(&mut batch, 0, tokens.len(), &[0], BLOCK_SIZE);
    batch.tokens.copy_from_slice(tokens);
    batch
}

fn small_backend(device: &Rc<dyn Device>, dtype: DType, experts: bool) -> CudaBackend {
    let kv = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 16, block_size: BLOCK_SIZE, dtype: dtype.into() };
    let mut options = options(dtype, 1, kv);
    options.experts = experts;
    let mut backend = CudaBackend::new(device.clone(), options).unwrap();
    backend.allocate_kv(kv, 1, 0).unwrap();
    backend
}

fn check_embeddings(emulated: Rc<EmulatedDevice>) {
    const COLS: usize = 16_384;
    // The last token is beyond 2³² elements.
    const VOCAB: usize = (1 << 32) / COLS + 8;
    let tokens = [3, (1 << 31) / COLS as u32 + 1, VOCAB as u32 - 1];
    let device: Rc<dyn Device> = emulated.clone();
    let mut backend = small_backend(&device, DType::BF16, false);
    let table = backend.random_matrix(VOCAB, COLS, DType::BF16, 1).unwrap();
    let at = emulated.allocation_of(VOCAB * COLS * 2);
    let rows: Vec<Vec<f32>> = (0..3).map(|seed| Random(seed).floats(COLS, DType::BF16)).collect();
    for (token, row) in tokens.iter().zip(&rows) {
        put(&device, at + *token as usize * COLS * 2, &DType::BF16.encode(row));
    }
    let mut out: CudaTensor = backend.tensor(64, COLS, TensorRole::Residual).unwrap();
    backend.begin(&batch_of(&tokens));
    backend.embed(&table, 1.0, &mut out);
    backend.end_step();
    backend.finish_step();
    assert!(get(&device, &out, 3 * COLS) == rows.concat(), "rows of the tokens {tokens:?}");
}

#[test]
fn rows_of_a_large_table() {
    if !on_gpu() {
        check_embeddings(device_without_random_numbers());
    }
}

/// What expert `chosen` of 2,048 makes of a row, with the same weights whatever its index is.
fn mix(dtype: DType, chosen: usize, emulated: &Rc<EmulatedDevice>) -> Vec<f32> {
    const HIDDEN: usize = 1024;
    const WIDTH: usize = 1088;
    let num_experts = 2048;
    let shape = ExpertsShape {
        num_experts,
        num_chosen: 1,
        hidden_size: HIDDEN,
        intermediate_size: WIDTH,
        activation: Activation::Silu,
        renormalize: true,
    };
    let (device, size): (Rc<dyn Device>, usize) = (emulated.clone(), dtype.size_bytes());
    let mut backend = small_backend(&device, dtype, true);
    let mut router = vec![0.0; num_experts * HIDDEN];
    router[chosen * HIDDEN..][..HIDDEN].fill(1.0);
    let router = dtype.encode(&router);
    let router = HostTensor { format: dtype.into(), rows: num_experts, cols: HIDDEN, bytes: &router };
    let experts = Experts {
        router: backend.matrix(&[router], dtype).unwrap(),
        up: backend.random_matrices(num_experts, 2 * WIDTH, HIDDEN, dtype, 1).unwrap(),
        down: backend.random_matrices(num_experts, HIDDEN, WIDTH, dtype, 2).unwrap(),
    };
    for (n, seed) in [(2 * WIDTH * HIDDEN, 3), (WIDTH * HIDDEN, 4)] {
        let at = emulated.allocation_of(num_experts * n * size) + chosen * n * size;
        put(&device, at, &dtype.encode(&Random(seed).floats(n, dtype)));
    }
    let mut work = backend.experts_workspace(64, &shape).unwrap();
    let tensor = || backend.tensor(64, HIDDEN, TensorRole::Activation).unwrap();
    let (x, mut out) = (tensor(), tensor());
    let positive: Vec<f32> = Random(5).floats(HIDDEN, dtype).iter().map(|x| x.abs()).collect();
    set(&device, &x, &positive);
    backend.begin(&batch_of(&[0]));
    backend.mix_experts(&x, &experts, &shape, &mut work, &mut out);
    backend.end_step();
    backend.finish_step();
    get(&device, &out, HIDDEN)
}

/// With and without tensor cores. The last expert's matrices begin beyond 2³² and 2³¹ elements.
#[test]
fn matrices_of_many_experts() {
    if on_gpu() {
        return;
    }
    parallel(0..2, |i| {
        let dtype = [DType::BF16, DType::F32][i as usize];
        let expected = mix(dtype, 1, &device_without_random_numbers());
        assert!(expected.iter().any(|x| x.abs() > 0.1));
        let found = mix(dtype, 2047, &device_without_random_numbers());
        assert_eq!(bits(&found), bits(&expected), "{dtype:?}");
    });
}

/// The tokens and log-probabilities of requests about a row of logits.
fn draw_from(device: &Rc<dyn Device>, row: usize) -> Vec<LogitsResult> {
    const VOCAB: usize = 1 << 16;
    let modules = device.load_modules(&[sampling::source(), transfers::source()]).unwrap();
    let transfers = Rc::new(TransferKernels::new(device, modules[1]).unwrap());
    let mut kernels = SamplingKernels::new(device, &transfers, modules[0], VOCAB, 8).unwrap();
    let logits = DeviceBuffer::new(device, (row + 1) * VOCAB * 4).unwrap();
    let values: Vec<f32> = Random(7).floats(VOCAB, DType::F32).iter().map(|x| x * 9.0).collect();
    put(device, logits.ptr() + row * VOCAB * 4, &DType::F32.encode(&values));
    let plain = SamplingParams { temperature: 1.0, top_p: 0.9, top_k: 50, ..SamplingParams::default() };
    let penalised = SamplingParams { repetition_penalty: 1.5, logprobs: Some(3), ..plain.clone() };
    let want = |params, seed| LogitsWant::Sample {
        params,
        limits: None::<&TokenLimits>,
        prompt: &[1, 2],
        output: &[3],
        mu: 0.0,
        pending: None,
        draw: Draw { seed, sample_index: 0, position: 4 },
    };
    let wants = [want(&plain, 1), want(&penalised, 2), LogitsWant::PromptLogprobs { target: 5, num_top: 4 }];
    let requests: Vec<LogitsRequest<'_>> = wants.into_iter().map(|want| LogitsRequest { row, want }).collect();
    // SAFETY: the memory is that of `kernels`.
    unsafe { transfers.copy(kernels.begin_step()) }.unwrap();
    kernels.sample(logits.ptr(), &requests).unwrap();
    kernels.end_step();
    device.synchronize().unwrap();
    kernels.finish_step()
}

#[test]
fn rows_of_many_logits() {
    // Its last row begins at 2³² logits.
    let row = 1 << 16;
    if let Some(device) = device_with_room(17 * GIB) {
        assert_eq!(draw_from(&device, row), draw_from(&device, 0));
    }
}

/// A step with so many block tables would have offsets beyond 32 bits.
#[test]
fn too_many_long_sequences_are_refused() {
    let kv =
        KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 16, block_size: BLOCK_SIZE, dtype: DType::F32.into() };
    let mut options = options(DType::F32, 1, kv);
    (options.max_seqs, options.max_model_len) = (1 << 16, 1 << 20);
    let error = CudaBackend::new(device(0), options).err().expect("its tables have 2^32 words").to_string();
    assert!(error.contains("scheduler.max_num_seqs") && error.contains("cache.block_size"), "{error}");
}

// --- kernels with offsets of 32 bits

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let [plain, int8, _, rows, plain_groups, int8_groups] = POOL_CASES;
    let breakages = [
        (plain, "include/kv_cache.cuh", "return block * BLOCK_STRIDE +", "return uint32_t(block * BLOCK_STRIDE) +"),
        (
            int8,
            "include/attention.cuh",
            "head + block_of(position) * BLOCK_STRIDE +",
            "head + uint32_t(block_of(position) * BLOCK_STRIDE) +",
        ),
        (
            int8,
            "include/attention.cuh",
            "scale_of(head + block_of(position) * BLOCK_STRIDE",
            "scale_of(head + uint32_t(block_of(position) * BLOCK_STRIDE)",
        ),
        (
            rows,
            "attention_rows.cu",
            "table[position / BLOCK_SIZE] * BLOCK_STRIDE",
            "uint32_t(table[position / BLOCK_SIZE] * BLOCK_STRIDE)",
        ),
        (plain_groups, "attention_hopper.cu", "head + index * HEAD_DIM", "head + uint32_t(index * HEAD_DIM)"),
        (
            int8_groups,
            "attention_hopper.cu",
            "head + index * BLOCK_STRIDE +",
            "head + uint32_t(index * BLOCK_STRIDE) +",
        ),
        (
            int8_groups,
            "attention_hopper.cu",
            "head + (valid ? block : 0) * BLOCK_STRIDE",
            "head + uint32_t((valid ? block : 0) * BLOCK_STRIDE)",
        ),
        (plain, "heads.cu", "p.pool + to * BLOCK_STRIDE", "p.pool + uint32_t(to * BLOCK_STRIDE)"),
        (plain, "heads.cu", "p.pool + from * BLOCK_STRIDE", "p.pool + uint32_t(from * BLOCK_STRIDE)"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, file, from, to) = breakages[i as usize];
        let failure = failure_of_broken(file, from, to, &sparse_options(), |device| case.check_on(device));
        assert!(failure.is_some(), "nobody notices {to:?} in {file}");
    });
    let with = |kernels: &std::path::Path| {
        let options = EmulatedOptions { kernels: kernels.into(), leaves_out: Some("fill_random"), ..sparse_options() };
        Rc::new(EmulatedDevice::new(options))
    };
    let folder = broken_copy("rows.cu", "uint64_t(token) * p.cols", "token * p.cols");
    assert!(failure_of(|| check_embeddings(with(folder.path()))).is_some(), "the embedding's offset");
    let folder = broken_copy("experts.cu", "uint64_t(tile.expert) * p.n * p.k", "tile.expert * p.n * p.k");
    let expert = |chosen| bits(&mix(DType::BF16, chosen, &with(folder.path())));
    assert_ne!(expert(2047), expert(1), "the expert's offset");
    let folder =
        broken_copy("sampling.cu", "uint64_t(request.row) * p.vocab;\n    Stage", "request.row * p.vocab;\n    Stage");
    let options = EmulatedOptions { kernels: folder.path().into(), ..sparse_options() };
    let device = sparse_device(options);
    assert_ne!(draw_from(&device, 1 << 16), draw_from(&device, 0), "the offset of a row of logits");
}
