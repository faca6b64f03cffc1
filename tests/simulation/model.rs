//! The simulated model: the next token after a context, and the output of a request that runs alone.

use pagetide_base::ids::TokenId;
use pagetide_base::rules::{Constraint, ConstraintSource};
use pagetide_base::sampling::params::*;
use pagetide_engine::beam::{Beam, BeamSearch, OpenBeam};
use pagetide_engine::scheduler::EngineRequest;
use std::sync::Arc;

pub const EOS: TokenId = 0;
pub const VOCAB: u64 = 40;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    pub fn one_in(&mut self, chance: u64) -> bool {
        self.below(chance) == 0
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The fingerprint of a prefix that ends with `token`.
pub fn fingerprint(previous: u64, token: TokenId) -> u64 {
    mix(previous.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

/// The next token after a context. Samples get different tokens.
pub fn next_token(slots: impl Iterator<Item = u64>, sample: u32) -> TokenId {
    let all = slots.fold(u64::from(sample) + 1, |acc, slot| mix(acc ^ slot));
    (all % VOCAB) as TokenId
}

/// All tokens after a context, best first, for searches and rules.
pub fn ranking(slots: impl Iterator<Item = u64>) -> Vec<TokenLogprob> {
    let all = slots.fold(7, |acc, slot| mix(acc ^ slot));
    let logprob = |token: u64| -((mix(all ^ token) % 10_000) as f32) / 1000.0;
    let mut ranking: Vec<TokenLogprob> =
        (0..VOCAB).map(|token| TokenLogprob { token: token as TokenId, logprob: logprob(token), rank: 0 }).collect();
    ranking.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
    ranking
}

/// The next token of a sample, with the candidates that a search needs. It depends on `mu`, and where there is a choice
/// it changes it, if there is one at all.
pub fn sample(context: &[u64], sample: u32, limits: &TokenLimits, num_top: Option<u32>, mu: f32) -> Sampled {
    let is_left = |token: &TokenId| {
        limits.allowed.as_ref().is_none_or(|allowed| allowed.contains(*token)) && !limits.banned.contains(token)
    };
    let first = (next_token(context.iter().copied(), sample) + mu as TokenId) % VOCAB as TokenId;
    let token = (first..first + VOCAB as TokenId).map(|token| token % VOCAB as TokenId).find(is_left);
    let token = token.expect("something is left");
    let logprobs = num_top.map(|num_top| {
        let mut top = ranking(context.iter().copied());
        top.truncate(num_top as usize);
        Box::new(PositionLogprobs { chosen: top[0], top })
    });
    let has_choice = (0..VOCAB as TokenId).filter(is_left).nth(1).is_some();
    let next_mu = 1.0 + (mix(u64::from(mu.to_bits()) ^ u64::from(token)) % 1000) as f32;
    Sampled { token, mu: if mu > 0.0 && has_choice { next_mu } else { mu }, logprobs }
}

/// Rules that depend on the whole output so far. They allow any token, a choice, or often a single token, and sometimes
/// the end. Some fail.
#[derive(Debug)]
pub struct Rules {
    pub key: u64,
    pub fails_at: Option<usize>,
    pub seen: Vec<TokenId>,
}

#[derive(Debug)]
pub struct RulesSource {
    pub key: u64,
    pub fails_at: Option<usize>,
}

impl ConstraintSource for RulesSource {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Rules { key: self.key, fails_at: self.fails_at, seen: Vec::new() })
    }
}

impl Constraint for Rules {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        if self.fails_at == Some(self.seen.len()) {
            return Err("these rules lead nowhere".into());
        }
        let state = self.seen.iter().fold(self.key, |state, token| mix(state ^ u64::from(*token)));
        let any = |i| 1 + (mix(state ^ i) % (VOCAB - 1)) as TokenId;
        Ok(match state % 8 {
            0 => None,
            1 => Some(TokenMask::new([EOS])),
            2 | 3 => Some(TokenMask::new([EOS, any(1), any(2), any(3)])),
            _ => Some(TokenMask::new([any(1)])),
        })
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.seen.push(token);
        Ok(())
    }
}

/// A hidden state of one number.
pub fn state_of(fingerprint: u64) -> f32 {
    (fingerprint % 1_000_000) as f32
}

pub fn logprob_of(fingerprint: u64, target: TokenId) -> PositionLogprobs {
    let chosen = TokenLogprob { token: target, logprob: (fingerprint % 1000) as f32, rank: 1 };
    PositionLogprobs { chosen, top: Vec::new() }
}

/// The fingerprints of a sequence.
pub fn context(prompt: &[TokenId], output: &[TokenId]) -> Vec<u64> {
    let mut slots: Vec<u64> = Vec::new();
    for token in prompt.iter().chain(output) {
        slots.push(fingerprint(slots.last().copied().unwrap_or(0), *token));
    }
    slots
}

/// The error of rules that fail.
pub const FAILED: &str = "the rules failed";

/// Generates one sample alone, as the reference.
pub fn alone(
    arrival: &EngineRequest,
    sample_index: u32,
    max_model_len: usize,
) -> Result<(Vec<TokenId>, FinishReason), &'static str> {
    let mut slots = context(&arrival.prompt, &[]);
    let params = &arrival.params;
    let mut rules = arrival.constraint.as_ref().map(|source| source.start());
    let (mut output, mut mu) = (Vec::new(), params.first_mu());
    loop {
        let mut limits = params.limits(output.len());
        if let Some(rules) = &mut rules
            && let Some(allowed) = rules.allowed().map_err(|_| FAILED)?
        {
            if limits.banned.iter().any(|banned| allowed.iter().eq([*banned])) {
                limits.banned.clear();
            }
            limits.allowed = Some(Arc::new(allowed));
        }
        for word in &params.bad_words {
            let is_only = limits.allowed.as_ref().is_some_and(|allowed| {
                allowed.iter().all(|token| {
                    limits.banned.contains(&token)
                        || params.bad_words.iter().any(|word| word[1] == token && output.last() == Some(&word[0]))
                })
            });
            if output.last() == Some(&word[0]) && !is_only {
                limits.banned.push(word[1]);
            }
        }
        let sampled = sample(&slots, sample_index, &limits, None, mu);
        mu = sampled.mu;
        let token = sampled.token;
        output.push(token);
        if let Some(rules) = &mut rules {
            rules.advance(token).map_err(|_| FAILED)?;
        }
        if params.eos_token_ids.contains(&token) {
            return Ok((output, FinishReason::Eos));
        }
        if output.len() == params.max_tokens as usize || slots.len() + 1 == max_model_len {
            return Ok((output, FinishReason::Length));
        }
        slots.push(fingerprint(slots[slots.len() - 1], token));
    }
}

/// Runs a beam search alone, as the reference. Every beam's context is computed from its tokens.
pub fn beams_alone(arrival: &EngineRequest, max_model_len: usize) -> Vec<(Vec<TokenId>, FinishReason)> {
    let params = &arrival.params;
    let room = (params.max_tokens as usize).min(max_model_len - arrival.prompt.len());
    let mut search = BeamSearch::new(params.clone(), room);
    let mut open: Vec<(Beam, Vec<TokenId>)> = vec![Default::default()];
    while !open.is_empty() {
        let next: Vec<PositionLogprobs> = open
            .iter()
            .map(|(_, output)| {
                sample(&context(&arrival.prompt, output), 0, &TokenLimits::default(), params.logprobs, 0.0)
            })
            .map(|sampled| *sampled.logprobs.expect("a search asks for them"))
            .collect();
        let beams: Vec<OpenBeam<'_>> =
            open.iter().zip(&next).map(|((beam, output), next)| OpenBeam { beam, output, next }).collect();
        let children = search.step(&beams);
        open = children
            .into_iter()
            .map(|child| {
                let mut output = open[child.parent].1.clone();
                output.push(child.token);
                (child.beam, output)
            })
            .collect();
    }
    search.results().into_iter().map(|result| (result.output, result.reason)).collect()
}
