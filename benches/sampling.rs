//! Sampling from one row of logits: `cargo bench --bench sampling`.
//!
//! The logits are normally distributed with a deviation of 3. Those of random weights are flatter, and those of trained
//! weights mostly steeper. `copy` is the part of each measurement that copies the row, because sampling changes it.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pagetide_base::sampling::extra::{Dry, ExtraSamplers, Mirostat, MirostatVersion, Xtc};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_base::sampling::sampler::{Draw, History, Sampler};
use std::hint::black_box;
use std::sync::Arc;

const PROMPT_TOKENS: u32 = 512;
const OUTPUT_TOKENS: u32 = 256;

/// The same numbers in every run.
fn logits(vocab_size: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    // The sum of twelve uniform numbers has mean 6 and deviation 1.
    (0..vocab_size).map(|_| 3.0 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0)).collect()
}

fn cases() -> Vec<(&'static str, SamplingParams)> {
    let drawn = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let penalties = SamplingParams {
        presence_penalty: 0.5,
        frequency_penalty: 0.5,
        repetition_penalty: 1.1,
        top_k: 50,
        top_p: 0.9,
        ..drawn.clone()
    };
    let extra = |extra: ExtraSamplers| SamplingParams { top_k: 50, extra: Some(Box::new(extra)), ..drawn.clone() };
    let dry = Dry { multiplier: 0.8, base: 1.75, allowed_length: 2, last_n: None, breakers: Arc::default() };
    let mirostat = Mirostat { version: MirostatVersion::Two, tau: 5.0, eta: 0.1 };
    let typical = ExtraSamplers { typical_p: 0.9, ..ExtraSamplers::default() };
    let xtc = Some(Xtc { probability: 0.5, threshold: 0.1 });
    vec![
        ("top_k 50, DRY", extra(ExtraSamplers { dry: Some(dry), ..ExtraSamplers::default() })),
        ("top_k 50, XTC", extra(ExtraSamplers { xtc, ..ExtraSamplers::default() })),
        ("top_k 50, typical_p 0.9", extra(typical.clone())),
        ("typical_p 0.9", SamplingParams { extra: Some(Box::new(typical)), ..drawn.clone() }),
        ("mirostat 2", extra(ExtraSamplers { mirostat: Some(mirostat), ..ExtraSamplers::default() })),
        ("greedy", SamplingParams { temperature: 0.0, ..drawn.clone() }),
        ("greedy, 5 logprobs", SamplingParams { temperature: 0.0, logprobs: Some(5), ..drawn.clone() }),
        ("temperature", drawn.clone()),
        ("min_p 0.05", SamplingParams { min_p: 0.05, ..drawn.clone() }),
        ("top_k 50", SamplingParams { top_k: 50, ..drawn.clone() }),
        ("top_k 1000", SamplingParams { top_k: 1000, ..drawn.clone() }),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..drawn.clone() }),
        ("top_k 50, top_p 0.9", SamplingParams { top_k: 50, top_p: 0.9, ..drawn }),
        ("top_k 50, top_p 0.9, penalties", penalties),
    ]
}

fn rows(criterion: &mut Criterion) {
    for vocab_size in [32_768, 131_072] {
        let mut group = criterion.benchmark_group(format!("vocabulary {vocab_size}"));
        group.throughput(Throughput::Elements(vocab_size as u64));
        let row = logits(vocab_size);
        let mut copy = row.clone();
        group.bench_function("copy", |bencher| bencher.iter(|| black_box(&mut copy).copy_from_slice(&row)));
        // Tokens from all of the vocabulary, some of them more than once.
        let spread = |count: u32, step: u32| (0..count).map(|i| i % 200 * step % vocab_size as u32).collect();
        let (prompt, output): (Vec<u32>, Vec<u32>) = (spread(PROMPT_TOKENS, 8_191), spread(OUTPUT_TOKENS, 12_289));
        let history = History { prompt: &prompt, output: &output, ..History::default() };
        let mut sampler = Sampler::new();
        for (name, params) in cases() {
            let mut draw = Draw { seed: 1, sample_index: 0, position: 0 };
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    copy.copy_from_slice(&row);
                    draw.position = draw.position.wrapping_add(1);
                    sampler.sample(black_box(&mut copy), &params, None, history, draw)
                });
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = rows
}
criterion_main!(benches);
