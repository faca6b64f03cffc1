//! What a profile counts for each operation. It wraps the CPU backend, so these tests stand beside those of its
//! kernels: unit tests would compile the kernels once more.

use pagetide_backend::cpu::{CpuBackend, CpuOptions, CpuTensor, Isa};
use pagetide_backend::profile::{OperationWork, Profile, Profiled, StepKind, StepPhase, StepTotals};
use pagetide_backend::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, DType, Experts, ExpertsShape, Heads, HostTensor, KvDType,
    KvLayout, NO_SOURCE, Norm, NormKind, TensorRole,
};
use pagetide_base::ids::BlockId;
use std::time::Duration;

const HEADS: AttentionShape =
    AttentionShape { num_heads: 4, num_kv_heads: 2, head_dim: 8, scale: 0.3, window: None, softcap: None };
const LAYOUT: KvLayout =
    KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 8, block_size: 4, dtype: KvDType::Plain(DType::BF16) };
const QKV: usize = 64;

fn profiled() -> (Profiled<CpuBackend>, Profile) {
    let profile = Profile::default();
    let mut backend = Profiled::new(bare(), profile.clone());
    backend.allocate_kv(LAYOUT, 8, 2).unwrap();
    (backend, profile)
}

fn bare() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), isa: Some(Isa::Portable) }).unwrap()
}

/// Sequences as `(computed, rows)`, each with four blocks of its own.
fn batch(seqs: &[(usize, usize)]) -> Batch {
    let mut batch = Batch::default();
    for (index, (num_computed, num_rows)) in seqs.iter().copied().enumerate() {
        let first_row = batch.num_rows();
        batch.seqs.push(BatchSeq { first_row, num_rows, num_computed, first_block: 4 * index, num_blocks: 4 });
        batch.block_tables.extend((4 * index as u32)..(4 * index as u32 + 4));
        for position in num_computed..num_computed + num_rows {
            batch.positions.push(position as u32);
            batch.slots.push((16 * index + position) as u32);
            batch.tokens.push(position as u32);
            batch.token_sources.push(NO_SOURCE);
        }
    }
    batch
}

fn tensor<B: Backend<Tensor = CpuTensor>>(backend: &B, cols: usize) -> CpuTensor {
    let mut x = backend.tensor(16, cols, TensorRole::Activation).unwrap();
    x.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 13) as f32 / 13.0 - 0.4);
    x
}

/// A small layer: what a step calls, and what it leaves.
fn layer<B: Backend<Tensor = CpuTensor>>(backend: &mut B, batch: &Batch) -> Vec<f32> {
    let w = backend.random_matrix(QKV, 32, DType::BF16, 3).unwrap();
    let (x, mut qkv, mut out) = (tensor(backend, 32), tensor(backend, QKV), tensor(backend, 32));
    backend.begin(batch);
    backend.mark(StepPhase::Qkv);
    backend.linear(&x, &w, None, &mut qkv);
    backend.rope_and_write_kv(&mut qkv, &HEADS, None, 1);
    backend.attention(&qkv, &HEADS, 1, &mut out);
    backend.logits(&out, 1, &w, None);
    let logits = backend.read_logits();
    backend.end_step();
    backend.finish_step();
    logits
}

#[test]
fn operations_are_done_and_counted_as_their_shapes_say() {
    let (mut backend, profile) = profiled();
    let step = batch(&[(5, 3), (0, 4)]);
    let logits = layer(&mut backend, &step);
    let mut bare = bare();
    bare.allocate_kv(LAYOUT, 8, 2).unwrap();
    assert_eq!(layer(&mut bare, &step), logits, "counting changes nothing");

    let totals = profile.steps(StepKind::Prefill);
    assert_eq!((totals.steps, totals.rows), (1, 7));
    let work = |phase| (totals.phase(phase).calls, totals.phase(phase).work);
    let product = |rows: u64| OperationWork {
        memory_bytes: 64 * 32 * 2,
        activation_bytes: rows * (64 + 32) * 4,
        flops: 2 * rows * 64 * 32,
    };
    assert_eq!(work(StepPhase::Qkv), (1, product(7)));
    assert_eq!(work(StepPhase::Vocabulary), (1, product(1)));
    // K and V of 2 heads of 8 in bfloat16 are 64 bytes of a token.
    let written = OperationWork { memory_bytes: 7 * 64, activation_bytes: 2 * 7 * 64 * 4, flops: 0 };
    assert_eq!(work(StepPhase::RopeAndKv), (1, written));
    // Rows see 6, 7 and 8 tokens, and 1 to 4.
    let flops = 4 * (6 + 7 + 8 + 1 + 2 + 3 + 4) * 4 * 8;
    let attended = OperationWork { memory_bytes: (8 + 4) * 64, activation_bytes: 7 * (64 + 32) * 4, flops };
    assert_eq!(work(StepPhase::Attention), (1, attended));
    let counted: Duration = StepPhase::ALL.iter().map(|phase| totals.phase(*phase).time).sum();
    assert_eq!(counted, totals.time, "what is in no phase is between them");
    assert!(totals.phase(StepPhase::Qkv).time > Duration::ZERO);
}

#[test]
fn a_window_bounds_what_attention_reads() {
    let (mut backend, profile) = profiled();
    let (qkv, mut out) = (tensor(&backend, QKV), tensor(&backend, 32));
    backend.begin(&batch(&[(9, 2)]));
    backend.attention(&qkv, &AttentionShape { window: Some(3), ..HEADS }, 0, &mut out);
    backend.end_step();
    let work = profile.steps(StepKind::Prefill).phase(StepPhase::Attention).work;
    // Two rows see three tokens each, two of them together.
    assert_eq!((work.memory_bytes, work.flops), (4 * 64, 4 * (3 + 3) * 4 * 8));
}

#[test]
fn steps_are_told_apart_and_copies_belong_to_the_step_behind_them() {
    let (mut backend, profile) = profiled();
    backend.copy_blocks(&[(BlockId(0), BlockId(1))]);
    layer(&mut backend, &batch(&[(3, 1), (7, 1)]));
    layer(&mut backend, &batch(&[(3, 1), (0, 2)]));
    let [decode, prefill, mixed] = StepKind::ALL.map(|kind| profile.steps(kind));
    assert_eq!([decode.steps, prefill.steps, mixed.steps], [1, 0, 1]);
    assert_eq!([decode.rows, prefill.rows, mixed.rows], [2, 0, 3]);
    let copied = decode.phase(StepPhase::Copies).work.memory_bytes;
    assert_eq!(copied, 2 * LAYOUT.block_bytes() as u64, "read and written");
    assert_eq!(mixed.phase(StepPhase::Copies).calls, 0);
    profile.reset();
    assert_eq!(profile.steps(StepKind::Decode), StepTotals::default());
}

#[test]
fn row_by_row_operations_count_activations_alone() {
    let (mut backend, profile) = profiled();
    let ones: Vec<u8> = [1f32; 32].into_iter().flat_map(f32::to_le_bytes).collect();
    let weight = backend.vector(&[HostTensor { format: DType::F32.into(), rows: 1, cols: 32, bytes: &ones }]).unwrap();
    let norm = Norm { kind: NormKind::Rms { eps: 1e-5 }, weight, bias: None };
    let (mut x, delta, mut out) = (tensor(&backend, 32), tensor(&backend, 32), tensor(&backend, 32));
    backend.begin(&batch(&[(0, 5)]));
    backend.add_norm(&mut x, &delta, &norm, &mut out);
    backend.norm(&x, &norm, &mut out);
    backend.end_step();
    let norms = *profile.steps(StepKind::Prefill).phase(StepPhase::Norms);
    let work = OperationWork { activation_bytes: (4 + 2) * 5 * 32 * 4, ..OperationWork::default() };
    assert_eq!((norms.calls, norms.work), (2, work));
}

#[test]
fn experts_count_those_that_were_chosen() {
    let (mut backend, profile) = profiled();
    let shape = ExpertsShape {
        num_experts: 4,
        num_chosen: 2,
        hidden_size: 32,
        intermediate_size: 16,
        activation: Activation::Silu,
        renormalize: true,
    };
    let experts = Experts {
        router: backend.random_matrix(4, 32, DType::BF16, 1).unwrap(),
        up: backend.random_matrices(4, 32, 32, DType::BF16, 2).unwrap(),
        down: backend.random_matrices(4, 32, 16, DType::BF16, 3).unwrap(),
    };
    let mut work = backend.experts_workspace(16, &shape).unwrap();
    let (x, mut out) = (tensor(&backend, 32), tensor(&backend, 32));
    backend.begin(&batch(&[(0, 1)]));
    backend.mix_experts(&x, &experts, &shape, &mut work, &mut out);
    backend.end_step();
    let counted = profile.steps(StepKind::Decode).phase(StepPhase::Experts).work;
    let (router, of_expert) = (4 * 32, 32 * 32 + 32 * 16);
    assert_eq!(counted.memory_bytes, 2 * (router + 2 * of_expert), "one row reads two of the four");
    assert_eq!(counted.flops, 2 * (router + 2 * of_expert));
}

#[test]
fn a_fused_operation_counts_as_its_parts_without_what_lies_between() {
    let (mut backend, profile) = profiled();
    let qkv_weights = backend.random_matrix(QKV, 32, DType::BF16, 1).unwrap();
    let up = backend.random_gate_up_matrix(2 * 48, 32, DType::BF16, 2).unwrap();
    let down = backend.random_matrix(32, 48, DType::BF16, 3).unwrap();
    let (x, mut qkv, mut stream) = (tensor(&backend, 32), tensor(&backend, QKV), tensor(&backend, 32));
    let unfused = |cols| backend.tensor(16, cols, TensorRole::Unfused).unwrap();
    let (mut gate_up, mut delta) = (unfused(2 * 48), unfused(32));
    let mut activated = backend.tensor(16, 48, TensorRole::Operand(DType::BF16)).unwrap();
    backend.begin(&batch(&[(0, 5)]));
    backend.mark(StepPhase::Qkv);
    let heads = Heads { shape: &HEADS, norms: None, rope: None, layer: 0 };
    backend.qkv_linear(&x, &qkv_weights, None, &heads, &mut qkv);
    backend.mark(StepPhase::Up);
    backend.gated_linear(&x, &up, None, Activation::Silu, &mut gate_up, &mut activated);
    backend.mark(StepPhase::Down);
    backend.residual_linear(&activated, &down, None, &mut stream, &mut delta);
    backend.end_step();
    let totals = profile.steps(StepKind::Prefill);
    let work = |phase| totals.phase(phase).work;
    let flops = |n: u64, k: u64| 2 * 5 * n * k;
    let qkv =
        OperationWork { memory_bytes: 64 * 32 * 2 + 5 * 64, activation_bytes: 5 * (32 + 64) * 4, flops: flops(64, 32) };
    assert_eq!(work(StepPhase::Qkv), qkv, "the product, and K and V as they are written");
    // What only a product reads is in bfloat16.
    let up = OperationWork { memory_bytes: 96 * 32 * 2, activation_bytes: 5 * (32 * 4 + 48 * 2), flops: flops(96, 32) };
    assert_eq!(work(StepPhase::Up), up);
    let down =
        OperationWork { memory_bytes: 32 * 48 * 2, activation_bytes: 5 * (48 * 2 + 2 * 32 * 4), flops: flops(32, 48) };
    assert_eq!(work(StepPhase::Down), down, "the stream is read and written");
}
