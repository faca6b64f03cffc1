use super::*;
use crate::sampling::params::TokenMask;
use proptest::prelude::*;
use std::sync::Arc;

fn draw(seed: u64, position: u32) -> Draw {
    Draw { seed, sample_index: 0, position }
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

fn sample(logits: &[f32], params: &SamplingParams, history: History<'_>, draw: Draw) -> Sampled {
    Sampler::new().sample(&mut logits.to_vec(), params, None, history, draw)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    logits.iter().map(|logit| f64::from(logit - max) - sum.ln()).collect()
}

/// The filtered distribution in a straightforward way. `None` if the sum is so near to `top_p` that rounding decides.
fn reference(logits: &[f32], params: &SamplingParams) -> Option<Vec<f64>> {
    let scaled: Vec<f32> = logits.iter().map(|logit| logit / params.temperature).collect();
    let mut p: Vec<f64> = log_softmax(&scaled).into_iter().map(f64::exp).collect();
    let best = p.iter().copied().fold(0.0, f64::max);
    if p.iter().any(|p| (p / best - f64::from(params.min_p)).abs() < 1e-6 && params.min_p < 1.0) {
        return None;
    }
    let mut sorted = p.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = match params.top_k as usize {
        0 => 0.0,
        k => sorted.get(k - 1).copied().unwrap_or(0.0),
    };
    p.iter_mut().filter(|p| **p < least || **p < f64::from(params.min_p) * best).for_each(|p| *p = 0.0);
    let total: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= total);
    if params.top_p < 1.0 {
        sorted = p.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let mut sum = 0.0;
        let mut last = 0.0;
        for p in sorted {
            if (sum - f64::from(params.top_p)).abs() < 1e-6 {
                return None;
            }
            if sum >= f64::from(params.top_p) {
                break;
            }
            sum += p;
            last = p;
        }
        p.iter_mut().filter(|p| **p < last).for_each(|p| *p = 0.0);
        let total: f64 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= total);
    }
    Some(p)
}

fn distribution(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let mut sampler = Sampler::new();
    let (least, total) = sampler.distribution(logits, params);
    let mut shares = vec![0.0; logits.len()];
    for (place, weight) in sampler.weights.iter().enumerate().filter(|(_, weight)| **weight >= least) {
        let token = sampler.kept.get(place).map_or(place, |token| *token as usize);
        shares[token] = *weight as f64 / total as f64;
    }
    shares
}

#[test]
fn greedy_takes_the_lowest_of_the_largest() {
    let token = |logits: &[f32]| sample(logits, &greedy(), History::default(), draw(0, 0)).token;
    assert_eq!(token(&[1.0, 3.0, 3.0, 2.0]), 1);
    let mut long = vec![-1.0; 1000];
    long[777] = 0.5;
    long[999] = 0.5;
    assert_eq!(token(&long), 777);
    assert_eq!(token(&[f32::NAN, -1.0, f32::INFINITY, f32::INFINITY]), 2);
    assert_eq!(token(&[f32::NEG_INFINITY, f32::NAN]), 0);
}

#[test]
fn a_tiny_temperature_is_greedy_and_a_huge_one_uniform() {
    for temperature in [1e-38, 1e-6] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        assert_eq!(distribution(&[1.0, 1.5, -2.0], &params), [0.0, 1.0, 0.0]);
    }
    let params = SamplingParams { temperature: 1e30, ..SamplingParams::default() };
    assert_eq!(distribution(&[1.0, 1.5, -2.0, 0.0], &params), [0.25; 4]);
}

#[test]
fn only_allowed_tokens_are_sampled() {
    let logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
    let allowed = Some(Arc::new(TokenMask::new([3, 64, 33])));
    let greedy = SamplingParams { allowed_tokens: allowed.clone(), logprobs: Some(1), ..greedy() };
    let sampled = sample(&logits, &greedy, History::default(), draw(0, 0));
    assert_eq!(sampled.token, 64);
    // The log-probabilities of the raw distribution.
    assert_eq!(sampled.logprobs.expect("asked for").top[0].token, 69);
    let random = SamplingParams { allowed_tokens: allowed, temperature: 50.0, ..SamplingParams::default() };
    let tokens: std::collections::BTreeSet<_> =
        (0..200).map(|seed| sample(&logits, &random, History::default(), draw(seed, 0)).token).collect();
    assert_eq!(tokens.into_iter().collect::<Vec<_>>(), [3, 33, 64]);
}

#[test]
fn zeros_of_either_sign_are_equal_in_rank() {
    let found = Sampler::new().prompt_logprobs(&mut [-0.0, 0.0, 0.0, -0.0], 3, 4);
    assert_eq!(found.top.iter().map(|entry| entry.token).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(found.chosen.rank, 4);
}

#[test]
fn ties_at_a_threshold_are_all_kept() {
    let logits = [2.0, 1.0, 1.0, 1.0, 0.0];
    let kept =
        |params: SamplingParams| -> Vec<bool> { distribution(&logits, &params).into_iter().map(|p| p > 0.0).collect() };
    assert_eq!(kept(SamplingParams { top_k: 1, ..Default::default() }), [true, false, false, false, false]);
    assert_eq!(kept(SamplingParams { top_k: 2, ..Default::default() }), [true, true, true, true, false]);
    assert_eq!(kept(SamplingParams { top_p: 0.01, ..Default::default() }), [true, false, false, false, false]);
    assert_eq!(kept(SamplingParams { top_p: 0.5, ..Default::default() }), [true, true, true, true, false]);
    assert_eq!(kept(SamplingParams { min_p: 1.0, ..Default::default() }), [true, false, false, false, false]);
    assert_eq!(kept(SamplingParams { min_p: 0.3, ..Default::default() }), [true, true, true, true, false]);
    assert_eq!(kept(SamplingParams { top_k: 99, ..Default::default() }), [true; 5]);
}

#[test]
fn min_tokens_excludes_end_and_stop_tokens() {
    let params = SamplingParams {
        min_tokens: 2,
        eos_token_ids: vec![0, 99],
        stop_token_ids: vec![1],
        logprobs: Some(1),
        ..greedy()
    };
    let logits = [5.0, 4.0, 3.0];
    let after = |output: &[TokenId]| {
        sample(&logits, &params, History { prompt: &[0], output, ..History::default() }, draw(0, output.len() as u32))
    };
    assert_eq!(after(&[]).token, 2);
    assert_eq!(after(&[2]).token, 2);
    assert_eq!(after(&[2, 2]).token, 0);
    // Log-probabilities are still those of the raw distribution.
    let logprobs = after(&[]).logprobs.expect("asked for");
    assert_eq!(logprobs.top[0].token, 0);
    assert_eq!(logprobs.chosen.rank, 3);
}

#[test]
fn a_bias_of_100_bans_or_forces() {
    let mut logits = vec![0.0; 50];
    logits[7] = 30.0;
    let biased = |token, bias| {
        let params = SamplingParams { logit_bias: vec![(token, bias), (1000, 5.0)], ..SamplingParams::default() };
        distribution_after_edits(&logits, &params)
    };
    assert_eq!(biased(7, -100.0)[7], 0.0);
    assert_eq!(biased(3, 100.0)[3], 1.0);
}

fn distribution_after_edits(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let mut logits = logits.to_vec();
    Sampler::new().sample(&mut logits, params, None, History::default(), draw(0, 0));
    distribution(&logits, params)
}

/// The expected tokens were computed independently of this code, in exact integers and float64.
#[test]
fn the_draws_do_not_change() {
    let logits: Vec<f32> = (0..1000_u32).map(|i| ((i * 7919) % 1000) as f32 / 150.0).collect();
    let tokens = |params: &SamplingParams, seed| -> Vec<TokenId> {
        (0..6).map(|position| sample(&logits, params, History::default(), draw(seed, position)).token).collect()
    };
    let plain = SamplingParams::default();
    let filtered = SamplingParams { temperature: 0.7, top_k: 40, top_p: 0.8, ..SamplingParams::default() };
    assert_eq!(tokens(&plain, 1), [892, 877, 557, 38, 657, 297]);
    assert_eq!(tokens(&plain, u64::MAX), [87, 297, 434, 680, 780, 842]);
    assert_eq!(tokens(&filtered, 1), [926, 926, 605, 62, 667, 321]);
}

#[test]
fn samples_positions_and_seeds_draw_differently() {
    let logits = vec![0.0; 100_000];
    let token = |draw| sample(&logits, &SamplingParams::default(), History::default(), draw).token;
    let first = Draw { seed: 5, sample_index: 0, position: 0 };
    let others = [
        Draw { sample_index: 1, ..first },
        Draw { position: 1, ..first },
        Draw { seed: 6, ..first },
        Draw { seed: 5 + (1 << 40), ..first },
    ];
    assert_eq!(token(first), token(first));
    for other in others {
        assert_ne!(token(first), token(other), "{other:?}");
    }
}

/// Pearson's test with fixed seeds over positions, samples and seeds: 9 degrees of freedom, 99.9 % quantile 27.88.
#[test]
fn draws_follow_the_distribution() {
    let logits = [0.3, -1.0, 2.0, 1.1, 0.0, -0.4, 1.9, 0.8, -2.0, 0.5];
    let expected: Vec<f64> = log_softmax(&logits).into_iter().map(f64::exp).collect();
    let draws: [fn(u32) -> Draw; 3] = [
        |i| Draw { seed: 42, sample_index: 0, position: i },
        |i| Draw { seed: 42, sample_index: i, position: 3 },
        |i| Draw { seed: u64::from(i) * 1_000_003, sample_index: 0, position: 0 },
    ];
    const COUNT: u32 = 50_000;
    let mut sampler = Sampler::new();
    for draw in draws {
        let mut seen = [0.0; 10];
        for i in 0..COUNT {
            let sampled =
                sampler.sample(&mut logits.clone(), &SamplingParams::default(), None, History::default(), draw(i));
            seen[sampled.token as usize] += 1.0;
        }
        let chi_square: f64 = seen
            .iter()
            .zip(&expected)
            .map(|(seen, p)| {
                let expected = p * f64::from(COUNT);
                (seen - expected) * (seen - expected) / expected
            })
            .sum();
        assert!(chi_square < 27.88, "{chi_square}: {seen:?}");
    }
}

#[test]
fn a_token_outside_the_row_has_no_probability() {
    let logprobs = Sampler::new().prompt_logprobs(&mut [1.0, 2.0], 7, 5);
    assert_eq!(logprobs.chosen, TokenLogprob { token: 7, logprob: f32::NEG_INFINITY, rank: 3 });
    assert_eq!(logprobs.top.len(), 2);
}

fn small_params() -> impl Strategy<Value = SamplingParams> {
    let top_p = prop_oneof![Just(1.0_f32), 0.01_f32..1.0];
    let min_p = prop_oneof![Just(0.0_f32), 0.001_f32..1.0];
    (0.2_f32..3.0, top_p, 0_u32..12, min_p).prop_map(|(temperature, top_p, top_k, min_p)| SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        ..SamplingParams::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn filters_are_those_of_the_reference(
        grid in prop::collection::vec(-12_i8..12, 1..120),
        params in small_params(),
    ) {
        // Few different values: ties are frequent.
        let logits: Vec<f32> = grid.into_iter().map(|value| f32::from(value) / 2.0).collect();
        if let Some(expected) = reference(&logits, &params) {
            let found = distribution(&logits, &params);
            for (token, (expected, found)) in expected.iter().zip(&found).enumerate() {
                prop_assert!((expected - found).abs() < 1e-6, "token {}: {} and {}", token, expected, found);
                prop_assert_eq!(*expected > 0.0, *found > 0.0, "token {}", token);
            }
        }
    }

    #[test]
    fn penalties_are_those_of_the_reference(
        logits in prop::collection::vec(-5.0_f32..5.0, 8),
        prompt in prop::collection::vec(0_u32..10, 0..8),
        output in prop::collection::vec(0_u32..10, 0..8),
        presence in -2.0_f32..2.0,
        frequency in -2.0_f32..2.0,
        repetition in 0.5_f32..2.0,
        bias in -3.0_f32..3.0,
    ) {
        let params = SamplingParams {
            presence_penalty: presence,
            frequency_penalty: frequency,
            repetition_penalty: repetition,
            logit_bias: vec![(3, bias)],
            ..greedy()
        };
        let mut sampler = Sampler::new();
        // A second call must find the working memory clean.
        for _ in 0..2 {
            let mut changed = logits.clone();
            let sampled = sampler.sample(&mut changed, &params, None, History { prompt: &prompt, output: &output, ..History::default() }, draw(0, 0));
            let mut expected = logits.clone();
            expected[3] += bias;
            for (token, logit) in expected.iter_mut().enumerate() {
                let count = |tokens: &[TokenId]| tokens.iter().filter(|t| **t as usize == token).count();
                if count(&prompt) + count(&output) > 0 {
                    *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                }
                if count(&output) > 0 {
                    *logit -= frequency * count(&output) as f32;
                    *logit -= presence;
                }
            }
            prop_assert_eq!(&changed, &expected);
            let best = expected.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(sampled.token as usize, expected.iter().position(|logit| *logit == best).expect("is there"));
        }
    }

    #[test]
    fn logprobs_are_those_of_the_reference(
        grid in prop::collection::vec(-40_i8..40, 1..300),
        num_top in 0_u32..25,
        token in any::<prop::sample::Index>(),
    ) {
        let logits: Vec<f32> = grid.into_iter().map(|value| f32::from(value) / 4.0).collect();
        let token = token.index(logits.len());
        let expected = log_softmax(&logits);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let rank = |token: usize| order.iter().position(|other| *other == token).expect("is there") as u32 + 1;

        let found = Sampler::new().prompt_logprobs(&mut logits.clone(), token as TokenId, num_top);
        prop_assert_eq!((found.chosen.token as usize, found.chosen.rank), (token, rank(token)));
        let top: Vec<usize> = found.top.iter().map(|entry| entry.token as usize).collect();
        prop_assert_eq!(&top, &order[..logits.len().min(num_top as usize)]);
        for entry in found.top.iter().chain([&found.chosen]) {
            prop_assert!((f64::from(entry.logprob) - expected[entry.token as usize]).abs() < 1e-5);
            prop_assert_eq!(entry.rank, rank(entry.token as usize));
        }

        // The same together with a sampled token, with changed logits.
        let params = SamplingParams { logit_bias: vec![(token as TokenId, 100.0)], logprobs: Some(num_top), ..greedy() };
        let sampled = sample(&logits, &params, History::default(), draw(0, 0));
        prop_assert_eq!(sampled, Sampled { logprobs: Some(Box::new(found)), ..Sampled::of(token as TokenId) });
    }

    #[test]
    fn any_logits_and_parameters_give_a_token_of_the_row(
        bits in prop::collection::vec(any::<u32>(), 1..80),
        params in small_params(),
        temperature in prop_oneof![Just(0.0_f32), Just(f32::MIN_POSITIVE), 0.0_f32..100.0],
        penalty in 0.01_f32..10.0,
        seed in any::<u64>(),
    ) {
        let logits: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let params = SamplingParams {
            temperature,
            repetition_penalty: penalty,
            presence_penalty: -2.0,
            logit_bias: vec![(0, 100.0)],
            logprobs: Some(3),
            ..params
        };
        let sampled = sample(&logits, &params, History { prompt: &[0, 1, 500], output: &[1, 2, 500], ..History::default() }, draw(seed, 1));
        prop_assert!((sampled.token as usize) < logits.len());
        let logprobs = sampled.logprobs.expect("asked for");
        prop_assert!(logprobs.top.iter().chain([&logprobs.chosen]).all(|entry| entry.logprob <= 0.0));
    }
}

#[test]
fn penalties_look_at_the_last_tokens() {
    let penalized = |repeat_last_n| {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            frequency_penalty: 0.25,
            repeat_last_n,
            ..SamplingParams::default()
        };
        let mut logits = [1.0; 4];
        let history = History { prompt: &[0, 1], output: &[2, 1], ..History::default() };
        Sampler::new().sample(&mut logits, &params, None, history, draw(0, 2));
        logits
    };
    // The frequency penalty counts the output alone.
    assert_eq!(penalized(None), [0.5, 0.25, 0.25, 1.0]);
    assert_eq!(penalized(Some(9)), [0.5, 0.25, 0.25, 1.0]);
    assert_eq!(penalized(Some(3)), [1.0, 0.25, 0.25, 1.0]);
    assert_eq!(penalized(Some(2)), [1.0, 0.25, 0.25, 1.0]);
    assert_eq!(penalized(Some(1)), [1.0, 0.25, 1.0, 1.0]);
}

#[test]
fn tokens_that_are_named_are_reported_instead_of_the_likeliest() {
    let logits = [0.3, 4.0, -1.0, 2.0, f32::NEG_INFINITY];
    let reported = |asked: &[TokenId]| {
        let params = SamplingParams { logprobs: Some(9), logprob_token_ids: asked.to_vec(), ..greedy() };
        let logprobs = sample(&logits, &params, History::default(), draw(0, 0)).logprobs.unwrap();
        assert_eq!((logprobs.chosen.token, logprobs.chosen.rank), (1, 1));
        logprobs.top
    };
    let expected = log_softmax(&logits);
    let top = reported(&[2, 3]);
    let ranks: Vec<_> = top.iter().map(|of| (of.token, of.rank)).collect();
    assert_eq!(ranks, [(1, 1), (2, 4), (3, 2)], "the chosen token comes first");
    assert!(top.iter().all(|of| (f64::from(of.logprob) - expected[of.token as usize]).abs() < 1e-6), "{top:?}");
    let ids = |top: Vec<TokenLogprob>| top.iter().map(|of| of.token).collect::<Vec<_>>();
    assert_eq!(ids(reported(&[3, 1])), [3, 1], "it is there once");
    // Impossible, and outside of the vocabulary.
    assert!(reported(&[4, 99])[1..].iter().all(|of| of.logprob == f32::NEG_INFINITY));
    // They are those of the model, whatever may be sampled.
    let only = Some(Arc::new(TokenMask::new([2])));
    let params = SamplingParams { logprobs: Some(0), logprob_token_ids: vec![1], allowed_tokens: only, ..greedy() };
    let logprobs = sample(&logits, &params, History::default(), draw(0, 0)).logprobs.unwrap();
    assert_eq!((logprobs.chosen.token, logprobs.chosen.rank, ids(logprobs.top)), (2, 4, vec![2, 1]));
}
