//! Loading onto a device: the size of the KV pool, the errors if memory is short, and recovery from a lost device.

use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::support::{device, options, root};
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::{DType, KvLayout};
use pagetide::config::{Config, DtypeChoice, LoadFormat, Quantization};
use pagetide::engine::plan::{PlannedSeq, PromptLogprobsPlan, SamplePlan, StepPlan};
use pagetide::error::StartError;
use pagetide::ids::{BlockId, SeqId};
use pagetide::model::files::ModelFiles;
use pagetide::model::loader::{GpuRunner, LoadedModel, load_on_gpu};
use pagetide::model::spec::ModelSpec;
use pagetide::model::step_runner::StepRunner;
use pagetide::sampling::params::SamplingParams;
use std::cell::RefCell;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

type Opened = Rc<RefCell<Vec<Rc<EmulatedDevice>>>>;

/// Loads onto devices with this much memory. Also returns the devices that were opened so far.
fn load(total_memory: usize, change: impl FnOnce(&mut Config)) -> Result<(GpuRunner, LoadedModel, Opened), StartError> {
    load_from(&root().join("tests/data/models/llama-gqa-tied"), total_memory, change)
}

fn load_from(
    directory: &Path,
    total_memory: usize,
    change: impl FnOnce(&mut Config),
) -> Result<(GpuRunner, LoadedModel, Opened), StartError> {
    let mut config = Config::default();
    config.scheduler.max_num_seqs = 4;
    config.scheduler.max_num_batched_tokens = Some(24);
    config.swap.space_gib = Some(0.001);
    change(&mut config);
    let files = ModelFiles::open(directory.to_str().unwrap())?;
    let spec = ModelSpec::load(&files)?;
    let opened = Opened::default();
    let open = {
        let opened = opened.clone();
        move || -> Result<Rc<dyn Device>, StartError> {
            // Only one at a time, as on a real GPU, where they would share its memory.
            assert!(opened.borrow().iter().all(|device| Rc::strong_count(device) == 1), "two devices are open");
            let device = Rc::new(EmulatedDevice::new(EmulatedOptions { total_memory, ..EmulatedOptions::default() }));
            opened.borrow_mut().push(device.clone());
            Ok(device)
        }
    };
    let (runner, loaded) = load_on_gpu(Box::new(open), &config.load_options(), &files, spec, &mut |_, _| Ok(()))?;
    Ok((runner, loaded, opened))
}

/// A prompt and one token after it.
fn token(runner: &mut impl StepRunner) -> u32 {
    let prompt: Vec<u32> = (3..15).collect();
    let plan = StepPlan {
        batch: vec![PlannedSeq {
            hidden_rows: 0..0,
            seq: SeqId(1),
            num_computed: 0,
            tokens: prompt.iter().copied().collect(),
            pending: false,
            table: Arc::new(vec![BlockId(2)]),
            sample: Some(greedy_sample()),
            prompt_logprobs: None,
        }],
        ..StepPlan::default()
    };
    runner.submit(&plan);
    runner.finish().seqs[0].sampled[0].token
}

fn greedy_sample() -> SamplePlan {
    SamplePlan {
        next: None,
        params: Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
        position: 0,
        history: None,
        mu: 0.0,
        first_sample: 0,
        num_samples: 1,
    }
}

/// A decode step of sequences of so many tokens each, which share all blocks but the last. A block has one token.
fn decode(runner: &mut impl StepRunner, num_seqs: u32, len: usize) {
    let shared = len as u32 - 1;
    let table = |seq: u32| (0..shared).chain([700 + seq]).map(BlockId).collect();
    compute(runner, (0..num_seqs).map(|seq| (seq, table(seq))), len - 1..len);
}

/// A step of four prompts that writes the first blocks, at least so many.
fn write_blocks(runner: &mut impl StepRunner, num_blocks: usize) {
    let len = num_blocks.div_ceil(4) as u32;
    let table = |seq: u32| (seq * len..(seq + 1) * len).map(BlockId).collect();
    compute(runner, (0..4).map(|seq| (seq, table(seq))), 0..len as usize);
}

/// A step that computes the tokens at these positions of sequences with these block tables.
fn compute(runner: &mut impl StepRunner, seqs: impl Iterator<Item = (u32, Vec<BlockId>)>, positions: Range<usize>) {
    let planned = |(seq, table): (u32, Vec<BlockId>)| PlannedSeq {
        hidden_rows: 0..0,
        seq: SeqId(u64::from(seq)),
        num_computed: positions.start,
        tokens: positions.clone().map(|_| 3).collect(),
        pending: false,
        table: Arc::new(table),
        sample: Some(greedy_sample()),
        prompt_logprobs: None,
    };
    runner.submit(&StepPlan { batch: seqs.map(planned).collect(), ..StepPlan::default() });
    runner.finish();
}

/// Every kind of decode step is recorded when the model is loaded, and none while requests run, whatever their number
/// and length. A new pool has new recordings.
#[test]
fn decode_steps_are_recorded_at_the_start() {
    // Long enough for several chunks of keys, and with heads for tensor cores.
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(root().join("tests/data/models/llama-gqa-tied/config.json")).unwrap();
    let text = text.replace("\"max_position_embeddings\": 128", "\"max_position_embeddings\": 600");
    let text = text.replace("\"head_dim\": 8", "\"head_dim\": 16");
    std::fs::write(folder.path().join("config.json"), text).unwrap();
    for (dtype, invariant) in
        [(DtypeChoice::Bfloat16, false), (DtypeChoice::Bfloat16, true), (DtypeChoice::Float32, false)]
    {
        let change = |config: &mut Config| {
            (config.model.dtype, config.device.batch_invariant) = (dtype, invariant);
            config.cache.block_size = 1;
            config.model.load_format = LoadFormat::Dummy;
            config.cache.num_device_blocks = Some(704);
            config.scheduler.max_num_batched_tokens = Some(600);
        };
        let (mut runner, loaded, opened) = load_from(folder.path(), 64 << 20, change).unwrap();
        let device = opened.borrow()[0].clone();
        let counts = || (device.num_recordings.get(), device.num_graph_launches.get());
        let (recorded, replayed) = counts();
        // 1, 2 and 4 sequences, of any length.
        assert_eq!((recorded, replayed), (3, 0), "{dtype}, {invariant}");
        let lengths = [1, 5, 255, 256, 257, 300, 511, 512, 513, loaded.max_model_len];
        let lengths: Vec<usize> = lengths.into_iter().filter(|len| *len <= loaded.max_model_len).collect();
        write_blocks(&mut runner, loaded.max_model_len);
        for len in &lengths {
            (1..=4).for_each(|num_seqs| decode(&mut runner, num_seqs, *len));
        }
        assert_eq!(counts(), (recorded, 4 * lengths.len() as u64), "{dtype}, {invariant}");
        runner.reset().unwrap();
        assert_eq!(device.num_recordings.get(), 2 * recorded);
        write_blocks(&mut runner, 6);
        decode(&mut runner, 3, 7);
        assert_eq!(counts(), (2 * recorded, 4 * lengths.len() as u64 + 1));
    }
}

/// A prompt of which the tokens from the fourth on are judged.
fn judged() -> StepPlan {
    let prompt: Vec<u32> = (3..15).collect();
    let targets = prompt[3..].to_vec();
    StepPlan {
        batch: vec![PlannedSeq {
            hidden_rows: 0..0,
            seq: SeqId(1),
            num_computed: 0,
            tokens: prompt.iter().copied().collect(),
            pending: false,
            table: Arc::new(vec![BlockId(2)]),
            sample: None,
            prompt_logprobs: Some(Box::new(PromptLogprobsPlan { first_row: 2, targets, num_top: 0 })),
        }],
        ..StepPlan::default()
    }
}

/// There are no kernels for quantised weights with float32, so they take the memory of the others.
#[test]
fn weights_that_the_load_quantises_are_converted_again() {
    let logits = |quantization: Quantization| {
        let change = |config: &mut Config| {
            config.model.quantization = quantization;
            config.model.quantization_cache = Some("off".into());
        };
        let (mut runner, loaded, _) = load(64 << 20, change).unwrap();
        let mut logits: Vec<f32> = Vec::new();
        runner.logits(&judged(), &mut |rows| logits.extend_from_slice(rows));
        (loaded.weights.to_string(), loaded.weights_bytes, logits)
    };
    let plain = logits(Quantization::None);
    let mut differences = Vec::new();
    for quantization in [Quantization::Q8_0, Quantization::Q4_0] {
        let quantised = logits(quantization);
        assert_eq!((&quantised.0, quantised.1), (&plain.0, plain.1));
        let pairs = quantised.2.iter().zip(&plain.2);
        differences.push(pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / plain.2.len() as f32);
    }
    let [eight_bits, four_bits] = differences[..] else { panic!("two formats") };
    assert!(eight_bits > 1e-5 && eight_bits < 0.05, "{eight_bits}");
    assert!(four_bits > 3.0 * eight_bits && four_bits < 1.0, "{four_bits}");
}

/// With a type of 16 bits they stay quantised, and the load says so.
#[test]
fn weights_that_the_load_quantises_stay_quantised() {
    let load = |quantization: Quantization| {
        let change = |config: &mut Config| {
            config.model.dtype = DtypeChoice::Float16;
            config.model.quantization = quantization;
            config.model.quantization_cache = Some("off".into());
        };
        let (mut runner, loaded, _) = load(64 << 20, change).unwrap();
        let mut logits: Vec<f32> = Vec::new();
        runner.logits(&judged(), &mut |rows| logits.extend_from_slice(rows));
        (loaded.weights.to_string(), loaded.weights_bytes, logits)
    };
    let (plain, quantised) = (load(Quantization::None), load(Quantization::Q8_0));
    assert!(plain.0.starts_with("float16") && quantised.0.starts_with("Q8_0"), "{} {}", plain.0, quantised.0);
    assert!((quantised.1 as f64) < 0.8 * plain.1 as f64, "{} of {} bytes", quantised.1, plain.1);
    let pairs = quantised.2.iter().zip(&plain.2);
    let difference = pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / plain.2.len() as f32;
    assert!(difference > 1e-5 && difference < 0.05, "{difference}");
}

#[test]
fn logits_are_what_log_probabilities_are_made_of() {
    let (mut runner, _, _) = load(64 << 20, |_| {}).unwrap();
    let plan = judged();
    runner.submit(&plan);
    let expected = runner.finish().seqs.remove(0).prompt_logprobs;
    let (mut logits, mut num_calls) = (Vec::new(), 0);
    runner.logits(&plan, &mut |rows| {
        logits.extend_from_slice(rows);
        num_calls += 1;
    });
    assert_eq!((expected.len(), num_calls), (9, 3), "a step of four sequences has four rows of logits at a time");
    for (row, expected) in logits.chunks_exact(logits.len() / 9).zip(&expected) {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        let logprob = f64::from(row[expected.chosen.token as usize]) - sum.ln();
        assert!((logprob - f64::from(expected.chosen.logprob)).abs() < 1e-4, "{logprob} {expected:?}");
    }
    // The device goes on as before.
    runner.submit(&plan);
    assert_eq!(runner.finish().seqs[0].prompt_logprobs, expected);
}

#[test]
fn the_pool_takes_its_share_of_what_is_left() {
    let total = 12 << 20;
    let (_runner, loaded, opened) = load(total, |config| {
        config.device.memory_utilization = Some(0.8);
        // More sequences than fit, so that memory is the limit.
        (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) = (200, Some(200));
    })
    .unwrap();
    let device = opened.borrow()[0].clone();
    let (free, _) = device.memory().unwrap();
    let block_bytes = loaded.pools.layout.block_bytes();
    let used = total - free;
    assert!(used <= total * 4 / 5, "{used} of {total} bytes are used");
    assert!(used > total * 4 / 5 - block_bytes, "another block would have fitted");
    assert_eq!(loaded.device, "cuda (emulation)");
    assert_eq!(loaded.pools.num_swap_blocks, (0.001 * (1u64 << 30) as f64) as usize / block_bytes);
}

#[test]
fn what_does_not_fit_says_what_to_change() {
    let error = |result: Result<_, StartError>| match result {
        Ok((_, _, _)) => panic!("it fits"),
        Err(error) => error.to_string(),
    };
    let weights = error(load(1 << 18, |_| {}));
    assert!(weights.contains("out of GPU memory") && weights.contains("--dtype"), "{weights}");
    let blocks = error(load(64 << 20, |config| config.cache.num_device_blocks = Some(1_000_000)));
    assert!(blocks.contains("1000000 blocks") && blocks.contains("--num-device-blocks"), "{blocks}");
    let share = error(load(64 << 20, |config| config.device.memory_utilization = Some(0.001)));
    assert!(share.contains("--device-memory-utilization"), "{share}");
}

#[test]
fn head_sizes_that_the_kernels_cannot_take_are_refused() {
    for head_dim in [12, 264] {
        let kv = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim, block_size: 1, dtype: DType::BF16.into() };
        match CudaBackend::new(device(0), options(DType::BF16, 1, kv)) {
            Err(error) => assert!(error.to_string().contains(&format!("{head_dim} dimensions")), "{error}"),
            Ok(_) => panic!("{head_dim} is taken"),
        }
    }
}

#[test]
fn a_lost_device_is_opened_again() {
    let (mut runner, _, opened) = load(64 << 20, |_| {}).unwrap();
    let expected = token(&mut runner);
    opened.borrow()[0].fail_after(5);
    assert!(std::panic::catch_unwind(AssertUnwindSafe(|| token(&mut runner))).is_err(), "the device is lost");
    runner.reset().unwrap();
    assert_eq!(opened.borrow().len(), 2);
    assert_eq!(token(&mut runner), expected);
    // After a failed step only the pools are lost.
    runner.reset().unwrap();
    assert_eq!(opened.borrow().len(), 2);
    assert_eq!(token(&mut runner), expected);
}
