//! Sampling on the device against `sampling::sampler`: the same tokens exactly, and the same log-probabilities to a
//! unit in the last place.

use crate::support::*;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::sampling::{SamplingKernels, source};
use pagetide::backend::cuda::transfers::{self, TransferKernels};
use pagetide::backend::{DType, LogitsRequest, LogitsResult, LogitsWant};
use pagetide::sampling::extra::{Dry, DryBreakers, ExtraSamplers, Mirostat, MirostatVersion, Xtc};
use pagetide::sampling::params::{PositionLogprobs, SamplingParams, TokenLimits, TokenMask};
use pagetide::sampling::sampler::{Draw, History, Sampler};
use std::rc::Rc;
use std::sync::Arc;

/// A request about a row, together with the data that it borrows.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are few")]
enum Want {
    Sample {
        params: SamplingParams,
        limits: Option<TokenLimits>,
        prompt: Vec<u32>,
        output: Vec<u32>,
        mu: f32,
        pending: Option<u32>,
        draw: Draw,
    },
    Prompt {
        target: u32,
        num_top: u32,
    },
}

fn logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let kind = random.below(6);
    let spread = random.pick(&[0.5, 4.0, 30.0]);
    let mut row: Vec<f32> = (0..vocab)
        .map(|_| match kind {
            // Ties.
            0 => random.below(3) as f32,
            1 => (random.float() * 8.0).round() * 0.5,
            _ => random.float() * spread,
        })
        .collect();
    if kind == 2 {
        for _ in 0..random.below(vocab) {
            let place = random.below(vocab);
            row[place] = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, f32::MAX, f32::MIN]);
        }
    }
    if kind == 3 && random.one_in(3) {
        row.fill(f32::NEG_INFINITY);
    }
    row
}

fn tokens(random: &mut Random, vocab: usize, most: usize) -> Vec<u32> {
    // Some are outside the vocabulary and are ignored.
    (0..random.below(most + 1)).map(|_| random.below(vocab + 2) as u32).collect()
}

fn params(random: &mut Random, vocab: usize) -> SamplingParams {
    let maybe = |random: &mut Random, value: f32, off: f32| if random.one_in(2) { value } else { off };
    let float = |random: &mut Random| (random.float() + 1.0) / 2.0;
    let top_p = float(random).max(0.01);
    let (min_p, presence, frequency) = (float(random) * 0.3, random.float() * 2.0, random.float() * 2.0);
    let repetition = float(random) * 2.0 + 0.1;
    let bias: Vec<(u32, f32)> =
        (0..random.below(6)).map(|_| (random.below(vocab + 1) as u32, random.float() * 100.0)).collect();
    let allowed = (0..random.range(1, 40)).map(|_| random.below(vocab) as u32).collect::<Vec<_>>();
    SamplingParams {
        allowed_tokens: random.one_in(4).then(|| Arc::new(TokenMask::new(allowed))),
        temperature: random.pick(&[0.0, 0.01, 0.7, 1.0, 1.0, 2.5, 1e-38]),
        top_p: maybe(random, top_p, 1.0),
        top_k: if random.one_in(2) { random.range(1, vocab + 1) as u32 } else { 0 },
        min_p: maybe(random, min_p, 0.0),
        presence_penalty: maybe(random, presence, 0.0),
        frequency_penalty: maybe(random, frequency, 0.0),
        repetition_penalty: maybe(random, repetition, 1.0),
        repeat_last_n: random.one_in(3).then(|| random.range(1, 30) as u32),
        extra: random.one_in(6).then(|| Box::new(extra(random))),
        logit_bias: if random.one_in(2) { bias } else { Vec::new() },
        min_tokens: random.below(4) as u32,
        eos_token_ids: vec![random.below(vocab) as u32],
        stop_token_ids: tokens(random, vocab, 3),
        logprobs: random.one_in(3).then(|| random.below(vocab.min(30) + 2) as u32),
        logprob_token_ids: if random.one_in(6) { tokens(random, vocab, 5) } else { Vec::new() },
        ..SamplingParams::default()
    }
}

/// Samplers that only the host has.
fn extra(random: &mut Random) -> ExtraSamplers {
    let dry =
        Dry { multiplier: 2.0, base: 1.75, allowed_length: 1, last_n: None, breakers: Arc::<DryBreakers>::default() };
    let version = random.pick(&[MirostatVersion::One, MirostatVersion::Two]);
    ExtraSamplers {
        dry: random.one_in(2).then_some(dry),
        top_n_sigma: random.pick(&[0.0, 2.0]),
        typical_p: random.pick(&[1.0, 0.7]),
        xtc: random.one_in(2).then_some(Xtc { probability: 0.5, threshold: 0.05 }),
        mirostat: random.one_in(3).then_some(Mirostat { version, tau: 3.0, eta: 0.1 }),
        ..ExtraSamplers::default()
    }
}

fn want(random: &mut Random, vocab: usize, sampled_before: Option<&[u32]>) -> Want {
    if random.one_in(5) {
        // Also the whole vocabulary.
        let num_top = if vocab <= 300 && random.one_in(6) { vocab } else { random.below(12) };
        return Want::Prompt { target: random.below(vocab + 1) as u32, num_top: num_top as u32 };
    }
    let params = params(random, vocab);
    // The host draws only where it knows the last token.
    let sampled_before = sampled_before.filter(|_| random.one_in(2) && !params.draws_on_host());
    let pending = sampled_before.map(|before| random.below(before.len()) as u32);
    Want::Sample {
        params,
        limits: random.one_in(3).then(|| TokenLimits {
            allowed: random
                .one_in(2)
                .then(|| Arc::new(TokenMask::new(tokens(random, vocab, 9).into_iter().chain([0])))),
            banned: tokens(random, vocab, 20),
        }),
        prompt: tokens(random, vocab, 20),
        output: tokens(random, vocab, 20),
        mu: random.float() * 6.0,
        pending,
        draw: Draw { seed: random.bits(), sample_index: random.below(3) as u32, position: random.below(99) as u32 },
    }
}

fn expected(row: &[f32], want: &Want, before: &[u32]) -> LogitsResult {
    let (mut sampler, mut row) = (Sampler::new(), row.to_vec());
    match want {
        Want::Prompt { target, num_top } => {
            LogitsResult::PromptLogprobs(sampler.prompt_logprobs(&mut row, *target, *num_top))
        }
        Want::Sample { params, limits, prompt, output, mu, pending, draw } => {
            let output: Vec<u32> = output.iter().copied().chain(pending.map(|place| before[place as usize])).collect();
            LogitsResult::Sampled(sampler.sample(
                &mut row,
                params,
                limits.as_ref(),
                History { prompt, output: &output, mu: *mu },
                *draw,
            ))
        }
    }
}

fn assert_logprobs(found: &PositionLogprobs, expected: &PositionLogprobs, what: &str) {
    let all = |logprobs: &PositionLogprobs| [vec![logprobs.chosen], logprobs.top.clone()].concat();
    let (found, expected) = (all(found), all(expected));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!((found.token, found.rank), (expected.token, expected.rank), "{what}");
        let same = found.logprob == expected.logprob
            || (found.logprob - expected.logprob).abs() <= 1e-6 * (1.0 + expected.logprob.abs());
        assert!(same, "{what}: {} instead of {}", found.logprob, expected.logprob);
    }
}

/// The kernels, for steps of up to 200 requests.
fn load(device: &Rc<dyn Device>, vocab: usize) -> (Rc<TransferKernels>, SamplingKernels) {
    let modules = device.load_modules(&[source(), transfers::source()]).unwrap();
    let transfers = Rc::new(TransferKernels::new(device, modules[1]).unwrap());
    let sampling = SamplingKernels::new(device, &transfers, modules[0], vocab, 200).unwrap();
    (transfers, sampling)
}

/// Two steps. The second one refers to the tokens that the first one sampled.
fn check(seed: u64) {
    check_on(seed, &device);
}

fn check_on(seed: u64, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let vocab = Random(seed).pick(&[1, 2, 31, 64, 65, 300, 1000, 5000]);
    check_vocab(seed, vocab, device);
}

pub fn check_vocab(seed: u64, vocab: usize, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let random = &mut Random(seed);
    let device = device(random.below(thread_orders().len()) as u32);
    let (transfers, mut sampling) = load(&device, vocab);
    let mut before: Option<Vec<u32>> = None;
    for step in 0..2 {
        let num_rows = random.range(1, 4);
        let rows: Vec<Vec<f32>> = (0..num_rows).map(|_| logits(random, vocab)).collect();
        let num_requests = random.range(1, 6);
        let wants: Vec<(usize, Want)> =
            (0..num_requests).map(|_| (random.below(num_rows), want(random, vocab, before.as_deref()))).collect();
        let on_device = upload(&device, &rows.concat(), DType::F32);
        let requests = wants.iter().map(|(row, want)| LogitsRequest {
            row: *row,
            want: match want {
                Want::Prompt { target, num_top } => LogitsWant::PromptLogprobs { target: *target, num_top: *num_top },
                Want::Sample { params, limits, prompt, output, mu, pending, draw } => LogitsWant::Sample {
                    params,
                    limits: limits.as_ref(),
                    prompt,
                    output,
                    mu: *mu,
                    pending: *pending,
                    draw: *draw,
                },
            },
        });
        let requests: Vec<_> = requests.collect();
        // SAFETY: the memory is that of `sampling`.
        unsafe { transfers.copy(sampling.begin_step()) }.unwrap();
        // A step may make several calls, each about other rows.
        sampling.sample(on_device.ptr(), &requests).unwrap();
        sampling.end_step();
        device.synchronize().unwrap();
        let results = sampling.finish_step();
        assert_eq!(results.len(), wants.len());
        let mut sampled = Vec::new();
        for (result, (row, want)) in results.iter().zip(&wants) {
            let what = format!("seed {seed}, step {step}, {vocab} tokens, {want:?}");
            let expected = expected(&rows[*row], want, before.as_deref().unwrap_or_default());
            match (result, &expected) {
                (LogitsResult::Sampled(found), LogitsResult::Sampled(expected)) => {
                    assert_eq!(found.token, expected.token, "{what}");
                    if matches!(want, Want::Sample { params, .. } if params.draws_on_host()) {
                        assert_eq!(found, expected, "{what}");
                    }
                    assert_eq!(found.logprobs.is_some(), expected.logprobs.is_some());
                    if let (Some(found), Some(expected)) = (&found.logprobs, &expected.logprobs) {
                        assert_logprobs(found, expected, &what);
                    }
                    sampled.push(found.token);
                }
                (LogitsResult::PromptLogprobs(found), LogitsResult::PromptLogprobs(expected)) => {
                    assert_logprobs(found, expected, &what);
                    sampled.push(0);
                }
                _ => panic!("{what}: another kind of result"),
            }
        }
        // Only samples that the device draws can be referred to.
        let is_source = |want: &Want| matches!(want, Want::Sample { params, .. } if !params.draws_on_host());
        let all_sample = wants.iter().all(|(_, want)| is_source(want));
        before = all_sample.then_some(sampled);
    }
}

#[test]
fn same_tokens_as_on_the_cpu() {
    parallel(0..120, |seed| check(seed * 31 + 7));
}

/// Rows that are split over several thread blocks.
#[test]
fn rows_of_many_logits() {
    parallel(0..6, |seed| check_vocab(seed * 17 + 3, [20_000, 40_000][seed as usize % 2], &device));
    check_vocab(5, 128_256, &device);
}

/// Rows that are split, as prompts have them. A part may hold none of the most likely tokens, or fewer than are asked
/// for. With `more_than_a_part` a request asks for more tokens than a part has.
fn check_logprobs_of_parts(more_than_a_part: bool, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let random = &mut Random(11);
    // Three parts, of which the last one has two logits less.
    let vocab = 33_001;
    let float = |random: &mut Random| random.float() * 20.0 - 10.0;
    let mut rows = vec![vec![f32::NEG_INFINITY; vocab]];
    rows.push(vec![1.5; vocab]);
    // All are equal but the last one.
    rows.push(rows[1].clone());
    rows[2][vocab - 1] = 2.0;
    // Only the last part has logits.
    rows.push((0..vocab).map(|i| if i < 30_000 { f32::NEG_INFINITY } else { float(random) }).collect());
    // Each part is likelier than the one before it.
    rows.push((0..vocab).map(|i| float(random) + (i / 11_000) as f32 * 30.0).collect());
    // Ties.
    rows.push((0..vocab).map(|_| random.below(50) as f32).collect());
    let device = device(1);
    let (_, mut sampling) = load(&device, vocab);
    let on_device = upload(&device, &rows.concat(), DType::F32);
    let mut wants: Vec<_> =
        (0..rows.len()).flat_map(|row| [0, 1, 20].map(|num_top| (row, random.below(vocab) as u32, num_top))).collect();
    wants.extend(more_than_a_part.then_some((5, 7, 11_002)));
    let requests: Vec<_> = wants
        .iter()
        .map(|&(row, target, num_top)| LogitsRequest { row, want: LogitsWant::PromptLogprobs { target, num_top } })
        .collect();
    sampling.sample(on_device.ptr(), &requests).unwrap();
    sampling.end_step();
    device.synchronize().unwrap();
    for (result, (row, target, num_top)) in sampling.finish_step().iter().zip(wants) {
        let LogitsResult::PromptLogprobs(found) = result else { panic!("log-probabilities were asked for") };
        let expected = Sampler::new().prompt_logprobs(&mut rows[row].clone(), target, num_top);
        assert_logprobs(found, &expected, &format!("row {row}, {num_top} of token {target}"));
    }
}

#[test]
fn log_probabilities_of_rows_of_many_logits() {
    // With executed PTX, a request for more tokens than a part has takes minutes.
    check_logprobs_of_parts(!executes_ptx(), &device);
}

/// More requests than one launch has working memory for.
#[test]
fn many_requests_with_penalties() {
    let (vocab, num) = (100, 75);
    let device = device(0);
    let (_, mut sampling) = load(&device, vocab);
    let random = &mut Random(3);
    let row = logits(random, vocab);
    let wants: Vec<Want> = (0..num).map(|_| want(random, vocab, None)).collect();
    let wants: Vec<(SamplingParams, Draw)> = wants
        .into_iter()
        .filter_map(|want| match want {
            Want::Sample { params, draw, .. } => Some((SamplingParams { repetition_penalty: 1.3, ..params }, draw)),
            Want::Prompt { .. } => None,
        })
        .collect();
    let (prompt, output) = ([3, 4, 5], [7, 7, 8]);
    let on_device = upload(&device, &row, DType::F32);
    let requests: Vec<_> = wants
        .iter()
        .map(|(params, draw)| LogitsRequest {
            row: 0,
            want: LogitsWant::Sample {
                params,
                limits: None,
                prompt: &prompt,
                output: &output,
                mu: 0.0,
                pending: None,
                draw: *draw,
            },
        })
        .collect();
    sampling.sample(on_device.ptr(), &requests).unwrap();
    sampling.end_step();
    device.synchronize().unwrap();
    for ((params, draw), result) in wants.iter().zip(sampling.finish_step()) {
        let history = History { prompt: &prompt, output: &output, ..History::default() };
        let expected = Sampler::new().sample(&mut row.clone(), params, None, history, *draw);
        let LogitsResult::Sampled(found) = result else { panic!("a sample was asked for") };
        assert_eq!(found.token, expected.token, "{params:?}");
    }
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let breakages = [
        ("include/logits_row.cuh", "!(value >= least_logit)", "!(value > least_logit)"),
        ("include/logits_row.cuh", "return weight >= least ? weight : 0;", "return weight > least ? weight : 0;"),
        ("sampling.cu", "count & ~IN_PROMPT", "count"),
        ("sampling.cu", "is_first = biases[2 * j] != token;", "is_first = true;"),
        ("sampling.cu", "is_allowed ? sanitize(logits[i]) : -INFINITY", "sanitize(logits[i])"),
        ("include/logits_row.cuh", "point -= scratch.sums[chosen];", ""),
        ("sampling.cu", "value == least && i <= last_equal", "value == least && i < last_equal"),
        ("include/logits_row.cuh", "high = __umul64hi(total, share)", "high = 0"),
        ("sampling.cu", "value == logit && i < chosen", "value == logit && i > chosen"),
        ("include/sampling.cuh", "__fmul_rn(n, LN2_LOW)", "0.0f"),
        ("include/sampling.cuh", "digits >> DIGIT_BITS == prefix", "true"),
        ("include/sampling.cuh", "x != x ? -INFINITY : fminf(x, LARGEST)", "x"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| (0..120).for_each(|seed| check_on(seed * 31 + 7, device)));
    });
    // In the draw from a row that is split.
    let breakages = [
        ("sampling.cu", "        point -= sum;\n", ""),
        ("sampling.cu", "best.index += part.first;", ""),
        (
            "sampling.cu",
            "best = Better()(other, best) ? other : best;\n            bound",
            "best = other;\n            bound",
        ),
        ("sampling.cu", "        draw.bins[bin] = 0;\n    }\n    __syncthreads();", "    }\n    __syncthreads();"),
        ("sampling.cu", "            request.num_done = 0;\n", ""),
        ("include/sampling.cuh", "before + low < before;", "0;"),
        ("sampling.cu", "return token - first < len;", "return token < first + len;"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| (0..6).for_each(|seed| check_vocab(seed * 17 + 3, 20_000, device)));
    });
    // In the log-probabilities of a row that is split. Some are noticed where a request takes more than a part has, and
    // need room for as many results.
    let breakages = [
        (false, "found.sum += double(", "found.sum = double("),
        (false, "of_parts[i].sum) * double(scale)", "of_parts[i].sum)"),
        (false, "before += read_shared_by_blocks", "before = read_shared_by_blocks"),
        (false, "= {part.first + i, value};", "= {i, value};"),
        (false, "other < gridDim.x && rank < n", "other < 1 && rank < n"),
        (true, "i % most >= part_of(p.vocab, part).len", "false"),
        (true, "value == least && i <= last_equal", "value == least"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (more_than_a_part, from, to) = breakages[i as usize];
        breaks("sampling.cu", from, to, |device| check_logprobs_of_parts(more_than_a_part, device));
    });
}
