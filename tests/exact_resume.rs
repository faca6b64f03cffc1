//! The promise of exact resume: a request always returns the same tokens. They are the same alone, under load with a
//! tiny pool and hundreds of preemptions, and from a warm prefix cache. They do not depend on the other requests, on
//! the block size, or on whether steps are planned ahead.

use pagetide::backend::cpu::Isa;
use pagetide::config::{AdmissionPolicy, CacheDtype, Config, DtypeChoice, Overlap, PreemptionMode, Quantization};
use pagetide::metrics;
use pagetide::offline::{Engine, GenerateParams, RequestOutput};
use pagetide::sampling::extra::{Dry, DryBreakers, DynamicTemperature, ExtraSamplers, Mirostat, MirostatVersion, Xtc};
use pagetide::sampling::params::SamplingParams;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

const MODEL: &str = "tests/data/models/llama-gqa-tied";

fn engine(change: impl FnOnce(&mut Config)) -> Engine {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
    let builder = Engine::builder().model(model.to_str().expect("the checkout's path is UTF-8"));
    builder.configure(change).build().expect("the test model loads")
}

/// Prompts of different lengths, many of which begin alike.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let mut state = 1u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let shared: Vec<u32> = (0..24).map(|_| next() % 256).collect();
    let prompt = |i: usize| {
        let mut prompt = shared[..if i.is_multiple_of(3) { 0 } else { 8 * (i % 4) }].to_vec();
        prompt.extend((0..3 + next() % 40).map(|_| next() % 256));
        prompt
    };
    (0..count).map(prompt).collect()
}

fn params(i: usize) -> GenerateParams {
    let sampling = SamplingParams {
        max_tokens: 20 + (i as u32 * 7) % 36,
        temperature: if i.is_multiple_of(2) { 0.0 } else { 1.0 },
        top_p: 0.95,
        repetition_penalty: if i.is_multiple_of(5) { 1.2 } else { 1.0 },
        logprobs: i.is_multiple_of(4).then_some(2),
        ..SamplingParams::default()
    };
    let n = if i % 7 == 3 { 3 } else { 1 };
    GenerateParams { sampling, n, seed: Some(i as u64), ignore_eos: true, ..GenerateParams::default() }
}

/// Samplers whose draws depend on the tokens before, or on a state of their own.
fn params_with_samplers(i: usize) -> GenerateParams {
    let mut params = params(i);
    let mirostat = |version| Some(Mirostat { version, tau: 4.0, eta: 0.2 });
    let breakers =
        Arc::new(DryBreakers { single: (0..20).collect(), longer: vec![(30, vec![31])], ..DryBreakers::default() });
    let extra = match i % 4 {
        0 => ExtraSamplers { mirostat: mirostat(MirostatVersion::Two), ..ExtraSamplers::default() },
        1 => ExtraSamplers { mirostat: mirostat(MirostatVersion::One), ..ExtraSamplers::default() },
        2 => ExtraSamplers {
            dry: Some(Dry { multiplier: 1.5, base: 1.75, allowed_length: 1, last_n: Some(200), breakers }),
            ..ExtraSamplers::default()
        },
        _ => ExtraSamplers {
            top_n_sigma: 2.5,
            typical_p: 0.9,
            xtc: Some(Xtc { probability: 0.5, threshold: 0.02 }),
            dynamic_temperature: Some(DynamicTemperature { range: 0.5, exponent: 1.0 }),
            min_keep: 3,
            ..ExtraSamplers::default()
        },
    };
    // DRY also where the most likely token is taken.
    params.sampling.temperature = if i % 8 == 2 { 0.0 } else { 1.0 };
    params.sampling.repeat_last_n = Some(10);
    params.sampling.extra = (i % 5 != 4).then(|| Box::new(extra));
    params
}

/// Runs all requests at the same time, each from its own thread and with its own parameters.
fn run_all(engine: &Engine, count: usize, params: fn(usize) -> GenerateParams) -> Vec<RequestOutput> {
    std::thread::scope(|scope| {
        let run = |(i, prompt): (usize, Vec<u32>)| scope.spawn(move || engine.generate([prompt], &params(i)).remove(0));
        let running: Vec<_> = prompts(count).into_iter().enumerate().map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap().expect("every request is answered")).collect()
    })
}

fn run_one_by_one(engine: &Engine, count: usize, params: fn(usize) -> GenerateParams) -> Vec<RequestOutput> {
    let one = |(i, prompt)| engine.generate([prompt], &params(i)).remove(0).expect("every request is answered");
    prompts(count).into_iter().enumerate().map(one).collect()
}

/// Compares everything except the number of cached tokens.
fn assert_same(outputs: &[RequestOutput], expected: &[RequestOutput], what: &str) {
    for (i, (output, expected)) in outputs.iter().zip(expected).enumerate() {
        assert_eq!(output.samples, expected.samples, "{what}: request {i}");
    }
}

fn metric(series: &str) -> f64 {
    let page = metrics::render().expect("metrics are installed");
    let line = page.lines().find(|line| line.rsplit_once(' ').is_some_and(|(name, _)| name == series));
    line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or_else(|| panic!("no series {series}"))
}

/// The settings that make memory short.
#[derive(Clone, Copy)]
struct Pressure {
    mode: PreemptionMode,
    block_size: u32,
    blocks: u32,
    threads: usize,
    batched: u32,
    overlap: Overlap,
}

impl Pressure {
    fn apply(&self, config: &mut Config) {
        config.cache.block_size = self.block_size;
        config.cache.num_device_blocks = Some(self.blocks);
        config.scheduler.max_num_seqs = 64;
        config.scheduler.max_num_batched_tokens = Some(self.batched);
        config.scheduler.preemption_mode = self.mode;
        // Other policies look ahead at admission and so avoid the preemptions that this test needs.
        config.scheduler.admission = AdmissionPolicy::Prompt;
        config.scheduler.overlap = self.overlap;
        config.device.threads = self.threads;
        config.swap.space_gib = Some(0.05);
    }
}

const fn pressure(
    mode: PreemptionMode,
    block_size: u32,
    blocks: u32,
    threads: usize,
    batched: u32,
    overlap: Overlap,
) -> Pressure {
    Pressure { mode, block_size, blocks, threads, batched, overlap }
}

/// Lets one test run at a time, because all engines of a process share its metrics.
static ONE_TEST: Mutex<()> = Mutex::new(());

/// Runs `count` requests one by one, and then all at once under each pressure. `device` makes settings for all these
/// runs.
fn check(count: usize, params: fn(usize) -> GenerateParams, device: &dyn Fn(&mut Config), pressures: &[Pressure]) {
    let _one_test = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    metrics::install();
    let quiet = engine(|config| {
        device(config);
        config.cache.enable_prefix_caching = false;
        config.device.threads = 1;
    });
    let expected = run_one_by_one(&quiet, count, params);
    drop(quiet);

    for pressure in pressures {
        let Pressure { mode, block_size, blocks, overlap, .. } = *pressure;
        let preemptions = |mode| metric(&format!("pagetide_preemptions_total{{mode=\"{mode}\"}}"));
        let before = [preemptions("swap"), preemptions("recompute")];
        let of_choice = |choice| metric(&format!("pagetide_arbiter_decisions_total{{choice=\"{choice}\"}}"));
        let decisions = || ["swap", "swap_full", "recompute"].into_iter().map(of_choice).sum::<f64>();
        let decided_before = decisions();
        let mut isa = String::new();
        let tight = engine(|config| {
            device(config);
            pressure.apply(config);
            isa = config.device.isa.to_string();
        });
        let what = format!("{mode} with {blocks} blocks of {block_size}, overlap {overlap}, isa {isa}");
        assert_same(&run_all(&tight, count, params), &expected, &what);
        let [swaps, recomputes] = [preemptions("swap") - before[0], preemptions("recompute") - before[1]];
        eprintln!("{what}: {swaps} preemptions by swapping, {recomputes} by recomputation");
        match mode {
            PreemptionMode::Recompute => assert!(recomputes > 20.0 && swaps == 0.0, "{what}: no pressure"),
            PreemptionMode::Swap => assert!(swaps > 20.0, "{what}: no pressure"),
            // Which of the two is faster depends on the machine.
            PreemptionMode::Auto => {
                let decided = decisions() - decided_before;
                assert!(swaps + recomputes > 20.0 && decided > 20.0, "{what}: no pressure, {decided} decisions");
            }
        }
        // Once more, with a warm cache.
        let warm = run_all(&tight, count, params);
        assert_same(&warm, &expected, &format!("{what}, warm"));
        // Only full blocks are cached, and larger ones exceed most prompts.
        if block_size <= 16 {
            assert!(warm.iter().any(|output| output.cached_tokens > 0), "{what}: nothing was cached");
        }
        assert_all_free(blocks);
    }
}

#[test]
fn text_is_the_same_however_memory_is_short() {
    let pressures = [
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::Off),
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::On),
        pressure(PreemptionMode::Recompute, 16, 24, 3, 300, Overlap::Off),
        pressure(PreemptionMode::Recompute, 16, 24, 3, 300, Overlap::On),
        pressure(PreemptionMode::Auto, 5, 60, 1, 70, Overlap::Off),
        pressure(PreemptionMode::Auto, 5, 60, 1, 70, Overlap::On),
        pressure(PreemptionMode::Swap, 1, 240, 2, 64, Overlap::Off),
        pressure(PreemptionMode::Swap, 1, 240, 2, 64, Overlap::On),
        pressure(PreemptionMode::Auto, 64, 8, 4, 512, Overlap::Auto),
    ];
    check(160, params, &|_| {}, &pressures);
}

/// Mirostat's state comes back with the sequence, however it was preempted.
#[test]
fn samplers_of_the_host_give_the_same_text() {
    let pressures = [
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::Off),
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::On),
        pressure(PreemptionMode::Recompute, 16, 24, 3, 300, Overlap::Off),
        pressure(PreemptionMode::Recompute, 5, 60, 3, 90, Overlap::On),
    ];
    check(80, params_with_samplers, &|_| {}, &pressures);
}

/// Uses bfloat16, because some instruction sets multiply matrices of this type with instructions of their own.
#[test]
fn every_instruction_set_gives_the_same_text() {
    let pressures = [
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::Off),
        pressure(PreemptionMode::Recompute, 5, 60, 3, 90, Overlap::On),
    ];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let device = |config: &mut Config| {
            config.model.dtype = DtypeChoice::Bfloat16;
            config.device.isa = isa.name().parse().expect("the configuration has every instruction set");
        };
        check(70, params, &device, &pressures);
    }
}

/// Quantised weights have kernels of their own. Those of a GGUF file are the same to them.
#[test]
fn quantised_weights_give_the_same_text() {
    let pressures = [
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::Off),
        pressure(PreemptionMode::Recompute, 5, 60, 3, 90, Overlap::On),
    ];
    for quantization in [Quantization::Q4_0, Quantization::Q8_0] {
        let device = |config: &mut Config| {
            config.model.quantization = quantization;
            config.model.quantization_cache = Some("off".into());
        };
        check(70, params, &device, &pressures);
    }
}

/// A token's codes in the KV cache depend on that token alone, and attention reads a step's own tokens from the cache
/// too.
#[test]
fn a_quantised_cache_gives_the_same_text() {
    let pressures = [
        pressure(PreemptionMode::Swap, 16, 24, 2, 256, Overlap::Off),
        pressure(PreemptionMode::Recompute, 16, 24, 3, 70, Overlap::On),
        pressure(PreemptionMode::Auto, 5, 60, 1, 90, Overlap::On),
    ];
    for dtype in [CacheDtype::Int8, CacheDtype::Fp8, CacheDtype::Int4] {
        check(70, params, &|config| config.cache.dtype = dtype, &pressures);
    }
}

/// A prefix that was evicted from the device is found in the swap pool and copied back.
#[test]
fn evicted_prefixes_come_back_from_the_swap_pool() {
    const BLOCKS: u32 = 16;
    let _one_test = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    let prompt = |first: u32, len: u32| (0..len).map(|i| (first + i * 7) % 256).collect::<Vec<u32>>();
    for (swap_gib, overlap) in [(0.05, Overlap::Off), (0.05, Overlap::On), (0.0, Overlap::Off)] {
        let engine = engine(|config| {
            config.cache.block_size = 8;
            config.cache.num_device_blocks = Some(BLOCKS);
            config.scheduler.overlap = overlap;
            config.swap.space_gib = Some(swap_gib);
            config.device.threads = 1;
        });
        let ask = |prompt: Vec<u32>| engine.generate([prompt], &params(1)).remove(0).expect("an answer");
        let first = ask(prompt(0, 88));
        assert_eq!(first.cached_tokens, 0);
        assert_eq!(
            ask(prompt(0, 88)).cached_tokens,
            80,
            "the prompt's full blocks are on the device, except the one of its last token"
        );
        let came_back = || {
            // Other requests fill the whole device.
            (1..4).for_each(|i| drop(ask(prompt(50 * i, 95))));
            let again = ask(prompt(0, 88));
            assert_eq!(again.samples, first.samples);
            match again.cached_tokens {
                0 => false,
                cached => {
                    assert_eq!(cached, 80, "overlap {overlap}");
                    true
                }
            }
        };
        if swap_gib == 0.0 {
            assert!(!came_back(), "there is no swap pool");
        } else {
            // Blocks that are sooner computed than copied are computed. A busy machine may make the first copies slow;
            // then copies are tried again after a while.
            assert!((0..500).any(|_| came_back()), "{swap_gib} GiB, overlap {overlap}");
        }
    }
}

/// Waits until all blocks are given back, which happens in the step after the last one, and checks the counts.
fn assert_all_free(blocks: u32) {
    let device = |state| metric(&format!("pagetide_device_blocks{{state=\"{state}\"}}"));
    for _ in 0..500 {
        if device("used") == 0.0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(device("used"), 0.0);
    assert_eq!(device("cached") + device("free"), f64::from(blocks));
    assert_eq!(metric("pagetide_swap_blocks{state=\"used\"}"), 0.0);
}
