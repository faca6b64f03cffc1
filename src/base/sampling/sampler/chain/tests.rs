use super::*;
use crate::sampling::sampler::{History, Sampler};
use proptest::prelude::*;

fn draw_at(seed: u64, position: u32) -> Draw {
    Draw { seed, sample_index: 0, position }
}

/// Shares of the draw, by token.
fn distribution(logits: &[f32], params: &SamplingParams, extra: &ExtraSamplers, draw: Draw) -> Vec<f64> {
    let mut chain = SamplerChain { tokens: (0..logits.len() as TokenId).collect(), ..SamplerChain::default() };
    chain.logits = logits.to_vec();
    chain.filter(params, extra, draw);
    chain.shares(logits.len())
}

impl SamplerChain {
    fn shares(&self, vocab_size: usize) -> Vec<f64> {
        let mut shares = vec![0.0; vocab_size];
        for (token, weight) in self.tokens.iter().zip(&self.weights) {
            shares[*token as usize] = *weight as f64 / self.total() as f64;
        }
        shares
    }
}

/// A token with its logit and probability, most likely first.
#[derive(Clone, Copy, Debug)]
struct Entry {
    token: usize,
    logit: f64,
    p: f64,
}

/// The chain over a sorted list in float64. `close` is set where rounding could decide.
struct Reference {
    entries: Vec<Entry>,
    close: bool,
}

impl Reference {
    fn new(logits: &[f32]) -> Self {
        let entry = |(token, logit): (usize, &f32)| Entry { token, logit: f64::from(*logit), p: 0.0 };
        let mut entries: Vec<_> = logits.iter().enumerate().map(entry).collect();
        entries.sort_by(|a, b| b.logit.total_cmp(&a.logit));
        let close = entries.windows(2).any(|pair| pair[0].logit - pair[1].logit < 1e-4);
        Self { entries, close }
    }

    fn is_near(&mut self, a: f64, b: f64) {
        self.close |= (a - b).abs() < 1e-5 * (1.0 + a.abs());
    }

    fn softmax(&mut self) {
        let max = self.entries[0].logit;
        let sum: f64 = self.entries.iter().map(|entry| (entry.logit - max).exp()).sum();
        self.entries.iter_mut().for_each(|entry| entry.p = (entry.logit - max).exp() / sum);
    }

    fn entropy(&self) -> f64 {
        self.entries.iter().map(|entry| -entry.p * entry.p.ln()).sum()
    }

    fn top_n_sigma(&mut self, n: f64) {
        let num = self.entries.len() as f64;
        let mean = self.entries.iter().map(|entry| entry.logit).sum::<f64>() / num;
        let variance = self.entries.iter().map(|entry| (entry.logit - mean).powi(2)).sum::<f64>() / num;
        let least = self.entries[0].logit - n * variance.sqrt();
        if n > 0.0 {
            (0..self.entries.len()).for_each(|i| self.is_near(self.entries[i].logit, least));
            self.entries.retain(|entry| entry.logit >= least);
        }
    }

    fn scale(&mut self, temperature: f64) {
        self.entries.iter_mut().for_each(|entry| entry.logit /= temperature);
    }

    fn min_p(&mut self, min_p: f64, min_keep: usize) {
        self.softmax();
        let least = self.entries[0].p * min_p;
        (0..self.entries.len()).for_each(|i| self.is_near(self.entries[i].p / least.max(1e-9), 1.0));
        let reached = self.entries.iter().filter(|entry| entry.p >= least).count();
        self.entries.truncate(reached.max(min_keep));
    }

    fn typical_p(&mut self, typical_p: f64, min_keep: usize) {
        if typical_p >= 1.0 {
            return;
        }
        self.softmax();
        let entropy = self.entropy();
        let distance = |entry: &Entry| (-entry.p.ln() - entropy).abs();
        self.entries.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
        let near = |pair: &[Entry]| distance(&pair[1]) - distance(&pair[0]) < 1e-5;
        self.close |= self.entries.windows(2).any(near);
        self.keep_until(|sum| sum > typical_p, typical_p, min_keep);
        self.entries.sort_by(|a, b| b.logit.total_cmp(&a.logit));
    }

    fn keep_until(&mut self, is_enough: impl Fn(f64) -> bool, limit: f64, min_keep: usize) {
        let mut sum = 0.0;
        for num in 0..self.entries.len() {
            sum += self.entries[num].p;
            self.is_near(sum, limit);
            if is_enough(sum) && num + 1 >= min_keep {
                return self.entries.truncate(num + 1);
            }
        }
    }

    fn top_p(&mut self, top_p: f64, min_keep: usize) {
        if top_p < 1.0 {
            self.softmax();
            self.keep_until(|sum| sum >= top_p, top_p, min_keep);
        }
    }

    fn xtc(&mut self, threshold: f64, min_keep: usize) {
        self.softmax();
        (0..self.entries.len()).for_each(|i| self.is_near(self.entries[i].p, threshold));
        let above = self.entries.iter().filter(|entry| entry.p >= threshold).count();
        if above >= 2 && self.entries.len() - (above - 1) >= min_keep {
            self.entries.drain(..above - 1);
        }
    }

    fn dynamic_temperature(&mut self, temperature: f64, range: f64, exponent: f64) {
        if self.entries.len() < 2 {
            return;
        }
        self.softmax();
        let part = self.entropy() / (self.entries.len() as f64).ln();
        let (low, high) = ((temperature - range).max(0.0), temperature + range);
        self.scale(low + (high - low) * part.powf(exponent));
    }

    fn shares(mut self, vocab_size: usize) -> Vec<f64> {
        self.softmax();
        let mut shares = vec![0.0; vocab_size];
        self.entries.iter().for_each(|entry| shares[entry.token] = entry.p);
        shares
    }
}

/// The whole chain. `None` if rounding could decide.
fn reference(logits: &[f32], params: &SamplingParams, extra: &ExtraSamplers) -> Option<Vec<f64>> {
    let mut left = Reference::new(logits);
    let min_keep = extra.min_keep as usize;
    left.top_n_sigma(extra.top_n_sigma.into());
    if extra.dynamic_temperature.is_none() {
        left.scale(params.temperature.into());
    }
    if params.min_p > 0.0 {
        left.min_p(params.min_p.into(), min_keep);
    }
    if params.top_k > 0 {
        left.entries.truncate(params.top_k as usize);
    }
    left.typical_p(extra.typical_p.into(), min_keep);
    left.top_p(params.top_p.into(), min_keep);
    if let Some(xtc) = extra.xtc {
        left.xtc(xtc.threshold.into(), min_keep);
    }
    if let Some(DynamicTemperature { range, exponent }) = extra.dynamic_temperature {
        left.dynamic_temperature(params.temperature.into(), range.into(), exponent.into());
    }
    (!left.close).then(|| left.shares(logits.len()))
}

fn some_params() -> impl Strategy<Value = SamplingParams> {
    let top_p = prop_oneof![Just(1.0_f32), 0.01_f32..1.0];
    let min_p = prop_oneof![Just(0.0_f32), 0.001_f32..1.0];
    let top_k = prop_oneof![Just(0), 1_u32..12];
    (0.2_f32..3.0, top_p, top_k, min_p).prop_map(|(temperature, top_p, top_k, min_p)| SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        ..SamplingParams::default()
    })
}

/// XTC always takes effect.
fn some_extra() -> impl Strategy<Value = ExtraSamplers> {
    let off = |value: BoxedStrategy<f32>, off: f32| prop_oneof![Just(off), value];
    let xtc = (0.0_f32..0.5).prop_map(|threshold| Xtc { probability: 1.0, threshold });
    let dynamic = (0.1_f32..2.0, 0.0_f32..3.0).prop_map(|(range, exponent)| DynamicTemperature { range, exponent });
    let min_keep = prop_oneof![Just(0), 2_u32..9];
    let parts = (
        off((0.1_f32..3.0).boxed(), 0.0),
        off((0.0_f32..1.0).boxed(), 1.0),
        prop::option::of(xtc),
        prop::option::of(dynamic),
        min_keep,
    );
    parts.prop_map(|(top_n_sigma, typical_p, xtc, dynamic_temperature, min_keep)| ExtraSamplers {
        top_n_sigma,
        typical_p,
        xtc,
        dynamic_temperature,
        min_keep,
        ..ExtraSamplers::default()
    })
}

fn assert_shares(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let near = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-4);
    assert!(near, "{found:?} instead of {expected:?}");
}

fn of_probabilities(p: &[f64]) -> Vec<f32> {
    p.iter().map(|p| p.ln() as f32).collect()
}

fn alone(p: &[f64], extra: &ExtraSamplers) -> Vec<f64> {
    distribution(&of_probabilities(p), &SamplingParams::default(), extra, draw_at(1, 0))
}

#[test]
fn each_sampler_alone() {
    let typical = |typical_p| ExtraSamplers { typical_p, ..ExtraSamplers::default() };
    assert_shares(&alone(&[0.97, 0.01, 0.01, 0.01], &typical(0.5)), &[1.0, 0.0, 0.0, 0.0]);
    // The most likely token can be the least typical one. Tokens alike are all kept.
    assert_shares(&alone(&[0.4, 0.2, 0.2, 0.2], &typical(0.5)), &[0.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0]);
    assert_shares(&alone(&[0.5, 0.3, 0.2], &typical(0.0)), &[0.0, 1.0, 0.0]);

    let xtc = |threshold| ExtraSamplers { xtc: Some(Xtc { probability: 1.0, threshold }), ..ExtraSamplers::default() };
    let p = [0.1, 0.4, 0.2, 0.3];
    assert_shares(&alone(&p, &xtc(0.09)), &[1.0, 0.0, 0.0, 0.0]);
    assert_shares(&alone(&p, &xtc(0.19)), &[1.0 / 3.0, 0.0, 2.0 / 3.0, 0.0]);
    assert_shares(&alone(&p, &xtc(0.29)), &[1.0 / 6.0, 0.0, 2.0 / 6.0, 3.0 / 6.0]);
    assert_shares(&alone(&p, &xtc(0.39)), &p);
    assert_shares(&alone(&[0.25; 4], &xtc(0.2)), &[0.0, 0.0, 0.0, 1.0]);
    assert_shares(&alone(&p, &ExtraSamplers { min_keep: 3, ..xtc(0.19) }), &p);
    // Three tokens are left of four, although the last two have no weight.
    let unlikely = [0.9, 0.1, 1e-30, 1e-31];
    let params = SamplingParams { min_p: 0.5, ..SamplingParams::default() };
    let extra = ExtraSamplers { min_keep: 3, ..xtc(0.05) };
    assert_shares(&distribution(&of_probabilities(&unlikely), &params, &extra, draw_at(1, 0)), &unlikely);

    // So many are left behind `typical_p` too, and then XTC cannot remove one.
    let extra = ExtraSamplers { min_keep: 3, typical_p: 0.0, ..xtc(0.05) };
    assert_shares(&alone(&unlikely, &extra), &unlikely);

    // Mean 1.5, deviation √1.25.
    let logits = [0.0, 1.0, 2.0, 3.0];
    let sigma = |top_n_sigma| {
        let extra = ExtraSamplers { top_n_sigma, ..ExtraSamplers::default() };
        distribution(&logits, &SamplingParams::default(), &extra, draw_at(1, 0)).map_kept()
    };
    assert_eq!(sigma(0.5), [false, false, false, true]);
    assert_eq!(sigma(1.0), [false, false, true, true]);
    assert_eq!(sigma(2.0), [false, true, true, true]);
    assert_eq!(sigma(1e30), [true; 4]);
}

trait Kept {
    fn map_kept(&self) -> Vec<bool>;
}

impl Kept for Vec<f64> {
    fn map_kept(&self) -> Vec<bool> {
        self.iter().map(|share| *share > 0.0).collect()
    }
}

#[test]
fn logprobs_of_the_draw_are_those_behind_the_samplers() {
    let extra = ExtraSamplers { logprobs_of_draw: true, ..ExtraSamplers::default() };
    let params = SamplingParams {
        top_k: 2,
        logprobs: Some(3),
        extra: Some(Box::new(extra)),
        seed: 7,
        ..SamplingParams::default()
    };
    let sample = |params: &SamplingParams| {
        let mut logits = of_probabilities(&[0.1, 0.6, 0.3]);
        Sampler::new().sample(&mut logits, params, None, History::default(), draw_at(params.seed, 0))
    };
    let sampled = sample(&params);
    let logprobs = sampled.logprobs.unwrap();
    let top: Vec<(TokenId, u32)> = logprobs.top.iter().map(|top| (top.token, top.rank)).collect();
    assert_eq!(top, [(1, 1), (2, 2)], "the token that top_k removes is not among them");
    for (logprob, expected) in logprobs.top.iter().zip([2.0 / 3.0, 1.0 / 3.0]) {
        assert!((f64::from(logprob.logprob).exp() - expected).abs() < 1e-6, "{logprobs:?}");
    }
    assert_eq!(logprobs.chosen, logprobs.top[usize::from(sampled.token == 2)]);
    // Asking for them changes no token, and greedy sampling is certain.
    assert_eq!(sample(&SamplingParams { extra: None, ..params.clone() }).token, sampled.token);
    let greedy = sample(&SamplingParams { temperature: 0.0, ..params.clone() }).logprobs.unwrap();
    assert_eq!((greedy.chosen.token, greedy.chosen.logprob, greedy.top.len()), (1, 0.0, 1));
    let none = sample(&SamplingParams { logprobs: Some(0), ..params }).logprobs.unwrap();
    assert!(none.top.is_empty() && none.chosen.logprob < 0.0);
}

#[test]
fn an_open_choice_has_a_high_temperature() {
    let dynamic = Some(DynamicTemperature { range: 0.5, exponent: 1.0 });
    let extra = ExtraSamplers { dynamic_temperature: dynamic, ..ExtraSamplers::default() };
    // Entropies of 1 and about 0 of the largest: temperatures of 1.5 and 0.5.
    assert_shares(&alone(&[0.25; 4], &extra), &[0.25; 4]);
    let steep = alone(&[0.999_999, 0.000_001], &extra);
    assert!((steep[1] - 1e-12).abs() < 2e-12, "{steep:?}");
    // Exponent 0: always the highest temperature.
    let exponent = Some(DynamicTemperature { range: 1.0, exponent: 0.0 });
    let extra = ExtraSamplers { dynamic_temperature: exponent, ..ExtraSamplers::default() };
    assert_shares(&alone(&[0.8, 0.2], &extra), &[2.0 / 3.0, 1.0 / 3.0]);
}

/// Standard deviations of a binomial count: with fixed seeds, less than 4.
#[test]
fn xtc_has_its_probability_and_does_not_depend_on_the_draw() {
    let extra = ExtraSamplers { xtc: Some(Xtc { probability: 0.3, threshold: 0.2 }), ..ExtraSamplers::default() };
    let logits = of_probabilities(&[0.5, 0.25, 0.25]);
    let (mut taken, mut low) = ([0.0; 2], [0.0; 2]);
    const COUNT: u32 = 20_000;
    for position in 0..COUNT {
        let draw = draw_at(7, position);
        let acts = distribution(&logits, &SamplingParams::default(), &extra, draw)[0] == 0.0;
        // Halves by the first bit of the other draw.
        let half = usize::from(draw.bits() >> 63 == 1);
        low[half] += 1.0;
        taken[half] += f64::from(u8::from(acts));
    }
    for half in 0..2 {
        let deviations = (taken[half] - 0.3 * low[half]) / (low[half] * 0.3 * 0.7).sqrt();
        assert!(deviations.abs() < 4.0, "{taken:?} of {low:?}");
    }
}

fn mirostat(version: MirostatVersion, tau: f32, eta: f32) -> SamplingParams {
    let mirostat = Some(Mirostat { version, tau, eta });
    let extra = Some(Box::new(ExtraSamplers { mirostat, ..ExtraSamplers::default() }));
    SamplingParams { extra, ..SamplingParams::default() }
}

/// The tokens that mirostat leaves, and mu after a token, as in the paper's algorithms 1 and 2.
fn mirostat_reference(logits: &[f32], params: &SamplingParams, mu: f64, token: usize) -> Option<(Vec<f64>, f64)> {
    let Mirostat { version, tau, eta } = params.extra.as_ref()?.mirostat?;
    let mut left = Reference::new(logits);
    left.scale(params.temperature.into());
    left.softmax();
    let num = match version {
        MirostatVersion::Two => {
            (0..left.entries.len()).for_each(|i| left.is_near(-left.entries[i].p.log2(), mu));
            left.entries.iter().filter(|entry| -entry.p.log2() <= mu).count().max(1)
        }
        MirostatVersion::One => {
            let ranks = (1..left.entries.len().min(100)).map(|rank| ((rank + 1) as f64 / rank as f64).ln());
            let ratios: Vec<f64> = left.entries.windows(2).map(|pair| (pair[0].p / pair[1].p).ln()).collect();
            let products: f64 = ranks.clone().zip(&ratios).map(|(t, b)| t * b).sum();
            let s = products / ranks.map(|t| t * t).sum::<f64>();
            let epsilon = s - 1.0;
            let vocab = logits.len() as f64;
            let k = (epsilon * 2_f64.powf(mu) / (1.0 - vocab.powf(-epsilon))).powf(1.0 / s);
            left.is_near(k, k.round());
            (k as usize).max(1)
        }
    };
    left.entries.truncate(num);
    let close = left.close;
    let shares = left.shares(logits.len());
    let after = mu - f64::from(eta) * (-shares[token].log2() - f64::from(tau));
    (!close).then_some((shares, after))
}

/// A target near the surprise that the distribution can have is reached, whatever the learning begins with.
#[test]
fn mirostat_reaches_its_target() {
    let logits: Vec<f32> = (0..2000).map(|rank| -1.1 * (1.0 + rank as f32).ln()).collect();
    for version in [MirostatVersion::One, MirostatVersion::Two] {
        for tau in [2.0, 3.5] {
            let params = mirostat(version, tau, 0.1);
            let (mut sampler, mut mu, mut moved) = (Sampler::new(), params.first_mu(), 0.0);
            const COUNT: u32 = 3000;
            for position in 0..COUNT {
                let history = History { mu, ..History::default() };
                let sampled = sampler.sample(&mut logits.clone(), &params, None, history, draw_at(3, position));
                // mu moves by the error.
                moved += (mu - sampled.mu) / 0.1;
                mu = sampled.mu;
            }
            let surprise = moved / COUNT as f32 + tau;
            assert!((surprise - tau).abs() < 0.1, "{version:?}: {surprise} bits instead of {tau}");
        }
    }
}

#[test]
fn mu_stays_where_nothing_is_chosen() {
    let params = mirostat(MirostatVersion::Two, 5.0, 0.1);
    let history = History { mu: 4.25, ..History::default() };
    let mu = |logits: &[f32], params: &SamplingParams| {
        Sampler::new().sample(&mut logits.to_vec(), params, None, history, draw_at(1, 1)).mu
    };
    assert_ne!(mu(&[1.0, 1.5], &params), 4.25);
    assert_eq!(mu(&[f32::NEG_INFINITY, 1.5], &params), 4.25);
    assert_eq!(mu(&[f32::NAN, f32::NEG_INFINITY], &params), 4.25);
    assert_eq!(mu(&[1.0, 1.5], &SamplingParams { temperature: 0.0, ..params.clone() }), 4.25);
    assert_eq!(params.first_mu(), 10.0);
    assert_eq!(SamplingParams::default().first_mu(), 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_chain_is_that_of_the_reference(
        logits in prop::collection::vec(-6.0_f32..6.0, 1..40),
        params in some_params(),
        extra in some_extra(),
    ) {
        if let Some(expected) = reference(&logits, &params, &extra) {
            let found = distribution(&logits, &params, &extra, draw_at(1, 1));
            for (token, (expected, found)) in expected.iter().zip(&found).enumerate() {
                prop_assert!((expected - found).abs() < 1e-4, "token {}: {} and {}", token, expected, found);
                prop_assert!(*expected < 1e-9 || *found > 0.0, "token {}", token);
            }
        }
    }

    #[test]
    fn samplers_that_are_off_change_no_token(
        grid in prop::collection::vec(-12_i8..12, 1..120),
        params in some_params(),
        min_keep in 0_u32..2,
        seed in any::<u64>(),
    ) {
        let logits: Vec<f32> = grid.into_iter().map(|value| f32::from(value) / 2.0).collect();
        let extra = Some(Box::new(ExtraSamplers { min_keep, ..ExtraSamplers::default() }));
        let with_extra = SamplingParams { extra, ..params.clone() };
        for position in 0..20 {
            let token = |params| Sampler::new().sample(&mut logits.clone(), params, None, History::default(), draw_at(seed, position));
            prop_assert_eq!(token(&with_extra), token(&params));
        }
    }

    #[test]
    fn mirostat_is_that_of_the_reference(
        logits in prop::collection::vec(-6.0_f32..6.0, 2..200),
        temperature in 0.3_f32..2.0,
        tau in 0.0_f32..8.0,
        eta in 0.0_f32..1.0,
        mu in -2.0_f32..12.0,
        is_first in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let version = if is_first { MirostatVersion::One } else { MirostatVersion::Two };
        let params = SamplingParams { temperature, ..mirostat(version, tau, eta) };
        let mut chain = SamplerChain::default();
        let extra = params.extra.as_deref().expect("was set");
        let (token, after) = chain.draw(&logits, &params, extra, mu, draw_at(seed, 0));
        if let Some((shares, expected)) = mirostat_reference(&logits, &params, mu.into(), token as usize) {
            assert_shares(&chain.shares(logits.len()), &shares);
            prop_assert!((f64::from(after) - expected).abs() < 1e-3, "{} instead of {}", after, expected);
        }
    }

    #[test]
    fn any_row_gives_a_token_of_the_row(
        bits in prop::collection::vec(any::<u32>(), 1..60),
        params in some_params(),
        extra in some_extra(),
        version in prop::option::of(prop_oneof![Just(MirostatVersion::One), Just(MirostatVersion::Two)]),
        mu in prop_oneof![-1e30_f32..1e30, -5.0_f32..5.0],
        temperature in prop_oneof![Just(f32::MIN_POSITIVE), 0.0_f32..100.0],
        seed in any::<u64>(),
    ) {
        let logits: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let mirostat = version.map(|version| Mirostat { version, tau: 5.0, eta: 0.1 });
        let extra = Some(Box::new(ExtraSamplers { mirostat, ..extra }));
        let params = SamplingParams { extra, temperature, logprobs: Some(2), ..params };
        let history = History { mu, ..History::default() };
        let sampled = Sampler::new().sample(&mut logits.clone(), &params, None, history, draw_at(seed, 2));
        prop_assert!((sampled.token as usize) < logits.len());
        prop_assert!(sampled.mu.is_finite());
    }
}
