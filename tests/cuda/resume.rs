//! A request has the same tokens, to the byte, alone and under memory pressure, at any speed of the streams, with one
//! step or two in flight. So swap copies run beside the steps, and no block is read or reused before its copy is done.

use crate::emulation::{Eagerness, EmulatedDevice, EmulatedOptions};
use crate::model::cuda_model;
use crate::support::*;
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::cuda::device::{Device, Stream};
use pagetide::backend::{CodeType, DType, KvDType, KvLayout};
use pagetide::engine::plan::Delivery;
use pagetide::engine::prefix_cache::EvictionPolicy;
use pagetide::engine::scheduler::{EngineRequest, PlanStats, PlannedStep, PreemptionMode, SchedulerConfig};
use pagetide::engine::state::EngineState;
use pagetide::ids::RequestId;
use pagetide::model::runner::{ModelRunner, PoolSizes};
use pagetide::model::step_runner::StepRunner;
use pagetide::sampling::extra::{Dry, ExtraSamplers, Mirostat, MirostatVersion};
use pagetide::sampling::params::{Sampled, SamplingParams};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::sync::Arc;

const MAX_MODEL_LEN: usize = 96;

#[derive(Clone, Copy)]
struct Setting {
    model: &'static str,
    dtype: DType,
    /// The codes of the KV cache.
    codes: Option<CodeType>,
    block_size: usize,
    num_device_blocks: usize,
    num_swap_blocks: usize,
    mode: PreemptionMode,
    overlap: bool,
    /// Some requests have samplers that only the host has.
    extra: bool,
}

/// An engine without actors: scheduler, pools and runner in one loop.
struct EmulatedEngine {
    state: EngineState,
    runner: ModelRunner<CudaBackend>,
    outputs: BTreeMap<(RequestId, u32), Vec<Sampled>>,
    stats: PlanStats,
    /// Number of rows whose token was still pending when they were submitted.
    num_pending: usize,
}

impl EmulatedEngine {
    fn new(device: &Rc<dyn Device>, setting: &Setting) -> Self {
        Self::with(device, setting, true)
    }

    fn with(device: &Rc<dyn Device>, setting: &Setting, graphs: bool) -> Self {
        let Setting { model, dtype, block_size, num_device_blocks, num_swap_blocks, mode, overlap, .. } = *setting;
        let directory = root().join("tests/data/models").join(model);
        let mut layout = KvLayout { num_layers: 0, num_kv_heads: 0, head_dim: 0, block_size, dtype: dtype.into() };
        let (backend, decoder) =
            cuda_model(device, directory.to_str().unwrap(), dtype, block_size, MAX_MODEL_LEN, |options| {
                (options.batch_invariant, options.graphs, options.max_logit_rows) = (true, graphs, 16);
                options.kv.dtype = setting.codes.map_or(dtype.into(), KvDType::Codes);
                layout = options.kv;
            });
        let max_swap_blocks = num_swap_blocks;
        let pools = PoolSizes { layout, num_device_blocks, num_swap_blocks, max_swap_blocks };
        let runner = ModelRunner::new(backend, decoder, pools);
        let config = SchedulerConfig {
            max_num_seqs: 12,
            max_num_batched_tokens: 40,
            max_model_len: MAX_MODEL_LEN,
            preemption_mode: mode,
            write_behind_blocks: num_device_blocks / 4,
            max_tail_blocks: 1,
            prefix_caching: true,
            overlap,
            hash_key: [7; 32],
            ..SchedulerConfig::new(block_size, num_device_blocks, num_swap_blocks)
        };
        Self {
            state: EngineState::new(config, EvictionPolicy::default()),
            runner: runner.unwrap(),
            outputs: BTreeMap::new(),
            stats: PlanStats::default(),
            num_pending: 0,
        }
    }

    /// Submits a plan if one may be made now. Otherwise takes the results of the oldest step.
    fn step(&mut self) {
        let is_ahead = self.state.scheduler.num_in_flight() > 0;
        let Some(PlannedStep { plan, report }) = self.state.plan(0.0) else { return self.finish() };
        self.stats += report.stats;
        if !plan.is_empty() {
            self.num_pending += plan.batch.iter().filter(|seq| seq.pending).count();
            self.runner.submit(&plan);
        } else if is_ahead {
            self.finish();
        } else if self.state.scheduler.waits_for_copies() {
            let report = self.runner.take_copies();
            self.state.scheduler.copied(&report);
        }
    }

    fn finish(&mut self) {
        let output = self.runner.finish();
        for (request, delivery) in self.state.scheduler.commit(output).deliveries {
            if let Delivery::Token { sample, sampled } = delivery {
                self.outputs.entry((request, sample)).or_default().push(sampled);
            }
        }
    }

    fn run(&mut self, requests: Vec<EngineRequest>) {
        // Some at once, the others step by step.
        let mut late = requests.into_iter();
        late.by_ref().take(5).for_each(|request| self.state.scheduler.arrive(request));
        loop {
            late.next().into_iter().for_each(|request| self.state.scheduler.arrive(request));
            if !self.state.scheduler.has_work() && self.state.scheduler.num_in_flight() == 0 {
                return;
            }
            self.step();
        }
    }
}

fn requests(setting: &Setting) -> Vec<EngineRequest> {
    let random = &mut Random(5);
    let shared: Vec<u32> = (0..20).map(|_| random.below(256) as u32).collect();
    let request = |i: usize| {
        let mut prompt = shared[..if i.is_multiple_of(3) { 0 } else { 4 * (i % 5) }].to_vec();
        prompt.extend((0..2 + random.below(14)).map(|_| random.below(256) as u32));
        let params = SamplingParams {
            max_tokens: 8 + (i as u32 * 7) % 16,
            temperature: if i.is_multiple_of(2) && !setting.extra { 0.0 } else { 1.0 },
            top_p: 0.9,
            repetition_penalty: if i.is_multiple_of(4) { 1.2 } else { 1.0 },
            logprobs: i.is_multiple_of(5).then_some(2),
            seed: i as u64,
            extra: (setting.extra && i.is_multiple_of(2)).then(|| Box::new(extra(i))),
            ..SamplingParams::default()
        };
        let n = if i % 5 == 3 { 2 } else { 1 };
        EngineRequest { id: RequestId(i as u64), n, ..EngineRequest::new(prompt, params) }
    };
    (0..NUM_REQUESTS).map(request).collect()
}

fn extra(i: usize) -> ExtraSamplers {
    let mirostat = Some(Mirostat { version: MirostatVersion::Two, tau: 4.0, eta: 0.2 });
    let dry = Dry { multiplier: 1.5, base: 1.75, allowed_length: 1, last_n: None, breakers: Arc::default() };
    match i % 3 {
        0 => ExtraSamplers { dry: Some(dry), ..ExtraSamplers::default() },
        _ => ExtraSamplers { mirostat, ..ExtraSamplers::default() },
    }
}

/// The outputs of each request alone, with enough blocks, on an eager device.
fn expected(setting: &Setting) -> BTreeMap<(RequestId, u32), Vec<Sampled>> {
    let device = if on_gpu() { batch_invariant_device(0) } else { emulated(EmulatedOptions::default(), setting) };
    let roomy = Setting { num_device_blocks: 400, num_swap_blocks: 0, overlap: false, ..*setting };
    let mut engine = EmulatedEngine::new(&device, &roomy);
    for request in requests(setting) {
        engine.run(vec![request]);
    }
    assert_eq!(engine.stats, PlanStats::default(), "nothing is preempted");
    engine.outputs
}

/// With quantised weights the products are kernels, and compute the rows too that a graph has beyond those of a step.
fn emulated(options: EmulatedOptions, setting: &Setting) -> Rc<dyn Device> {
    let takes_unwritten = setting.model.contains("quantized");
    Rc::new(EmulatedDevice::new(EmulatedOptions { takes_unwritten, ..options }))
}

/// An emulated device with lazy streams. A GPU's streams have their own speed.
fn lazy(seed: u64, ignores_waits: bool, setting: &Setting) -> Rc<dyn Device> {
    if on_gpu() && !ignores_waits {
        return batch_invariant_device(0);
    }
    let eagerness = match seed % 5 {
        0 => Eagerness { compute: 100, copy_out: 0, copy_in: 0 },
        1 => Eagerness { compute: 0, copy_out: 100, copy_in: 0 },
        2 => Eagerness { compute: 0, copy_out: 0, copy_in: 100 },
        3 => Eagerness { compute: 0, copy_out: 0, copy_in: 0 },
        _ => Eagerness { compute: 50, copy_out: 30, copy_in: 30 },
    };
    emulated(EmulatedOptions { eagerness, seed, ignores_waits, ..EmulatedOptions::default() }, setting)
}

const NUM_REQUESTS: usize = 14;

fn setting(mode: PreemptionMode) -> Setting {
    Setting {
        model: "llama-gqa-tied",
        dtype: DType::F32,
        codes: None,
        block_size: 4,
        num_device_blocks: 24,
        num_swap_blocks: 40,
        mode,
        overlap: false,
        extra: false,
    }
}

#[test]
fn same_tokens_under_pressure() {
    let in_codes = Setting {
        model: "llama-rope-llama3",
        dtype: DType::BF16,
        block_size: 8,
        num_device_blocks: 12,
        num_swap_blocks: 24,
        ..setting(PreemptionMode::Swap)
    };
    let settings = [
        setting(PreemptionMode::Swap),
        setting(PreemptionMode::Recompute),
        Setting { block_size: 7, num_device_blocks: 14, ..setting(PreemptionMode::Swap) },
        Setting { model: "llama-rope-llama3", dtype: DType::BF16, ..setting(PreemptionMode::Swap) },
        Setting { model: "mixtral", dtype: DType::BF16, ..setting(PreemptionMode::Swap) },
        Setting { codes: Some(CodeType::Int8), ..in_codes },
        Setting { codes: Some(CodeType::Int8), mode: PreemptionMode::Recompute, ..in_codes },
        Setting { codes: Some(CodeType::Int8), model: "../quantized/awq", ..in_codes },
        Setting { extra: true, ..setting(PreemptionMode::Swap) },
        Setting { extra: true, ..setting(PreemptionMode::Recompute) },
    ];
    parallel(0..settings.len() as u64, |i| {
        let setting = &settings[i as usize];
        let expected = expected(setting);
        // The first two settings meet all kinds of streams, the others two kinds, each other ones.
        let num_seeds = if i < 2 { 5 } else { 2 };
        for seed in i..i + if executes_ptx() { 1 } else { num_seeds } {
            for overlap in [false, true] {
                check_under_pressure(&Setting { overlap, ..*setting }, seed, &expected);
            }
        }
    });
}

fn check_under_pressure(setting: &Setting, seed: u64, expected: &BTreeMap<(RequestId, u32), Vec<Sampled>>) {
    let mut engine = EmulatedEngine::new(&lazy(seed, false, setting), setting);
    engine.run(requests(setting));
    let PlanStats { preempted_swap, preempted_recompute, .. } = engine.stats;
    let Setting { mode, block_size, overlap, extra, .. } = setting;
    let what = format!("{mode:?}, block size {block_size}, overlap {overlap}, extra {extra}, streams {seed}");
    match mode {
        PreemptionMode::Swap => assert!(preempted_swap > 3, "{what}: {preempted_swap} swaps"),
        _ => assert!(preempted_recompute > 3, "{what}: {preempted_recompute} recomputations"),
    }
    // No step is planned ahead of one for which the host draws.
    assert_eq!(
        engine.num_pending > if *extra { 0 } else { 20 },
        *overlap,
        "{what}: {} pending tokens",
        engine.num_pending
    );
    for (name, tokens) in &engine.outputs {
        assert_eq!(tokens, &expected[name], "{what}: {name:?}");
    }
    assert_eq!(engine.outputs.len(), expected.len());
}

/// The test above would notice a missing wait: on a device whose streams do not wait for each other, tokens change.
#[test]
fn a_missing_wait_shows() {
    if executes_ptx() {
        return; // It is found before it shows: blocks are used that nothing has written yet.
    }
    for overlap in [false, true] {
        let setting = Setting { overlap, ..setting(PreemptionMode::Swap) };
        let expected = expected(&setting);
        let caught = (0..3).filter(|seed| {
            let mut engine = EmulatedEngine::new(&lazy(*seed, true, &setting), &setting);
            engine.run(requests(&setting));
            engine.outputs != expected
        });
        assert!(caught.count() > 0);
    }
}

/// A copy engine makes its copies in the order in which they arrive. If a step needed one, it would wait for the swap
/// copies of other steps. So only swapping uses them: no input, request, copy-on-write pair, sample, log-probability or
/// row for the host's samplers is copied by one.
#[test]
fn only_swapping_uses_copy_engines() {
    for (mode, extra) in [(PreemptionMode::Swap, false), (PreemptionMode::Recompute, true)] {
        let setting = Setting { overlap: true, extra, num_swap_blocks: if extra { 0 } else { 40 }, ..setting(mode) };
        let device = Rc::new(EmulatedDevice::new(EmulatedOptions::default()));
        let mut engine = EmulatedEngine::new(&(device.clone() as Rc<dyn Device>), &setting);
        let copies = |stream: Stream| device.num_copies[stream as usize].get();
        let weights = copies(Stream::CopyIn);
        engine.run(requests(&setting));
        assert!(engine.outputs.values().flatten().any(|sampled| sampled.logprobs.is_some()));
        assert_eq!(copies(Stream::Compute), 0, "{mode:?}");
        let swaps = [copies(Stream::CopyOut), copies(Stream::CopyIn) - weights];
        assert_eq!(swaps.map(|copies| copies > 0), [!extra; 2], "{mode:?}: {swaps:?}");
    }
}

/// Replayed decode steps give the same results as steps that are launched kernel by kernel.
#[test]
fn graphs_change_nothing() {
    let models = ["qwen3-moe-norm", "llama-gqa-tied", "gemma2"];
    for model in &models[..if executes_ptx() { 1 } else { 3 }] {
        let (setting, mut outputs) = (Setting { model, ..setting(PreemptionMode::Swap) }, Vec::new());
        for graphs in [false, true] {
            let device = Rc::new(EmulatedDevice::new(EmulatedOptions::default()));
            let mut engine = EmulatedEngine::with(&(device.clone() as Rc<dyn Device>), &setting, graphs);
            engine.run(requests(&setting));
            outputs.push(engine.outputs);
            let replays = device.num_graph_launches.get();
            assert_eq!(replays > 20, graphs, "{model}: {replays} replays");
        }
        assert_eq!(outputs[0], outputs[1], "{model}");
    }
}

/// A device that fails at any time ends the step with its own message, and nothing hangs.
#[test]
fn a_lost_device_is_named() {
    let setting = setting(PreemptionMode::Swap);
    for operations in [1, 40, 200, 600] {
        let device = Rc::new(EmulatedDevice::new(EmulatedOptions::default()));
        let mut engine = EmulatedEngine::new(&(device.clone() as Rc<dyn Device>), &setting);
        device.fail_after(operations);
        let run = AssertUnwindSafe(|| engine.run(requests(&setting)));
        let panic = std::panic::catch_unwind(run).expect_err("the device is lost");
        let message = panic.downcast_ref::<String>().expect("a message");
        assert_eq!(message, "the GPU failed: an injected failure");
        let error = engine.runner.reset().expect_err("its memory is gone");
        assert_eq!(error.to_string(), "the GPU failed: an injected failure");
    }
}
