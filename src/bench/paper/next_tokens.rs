//! The most likely next tokens of a model that does not exist, for beam searches without a model.

use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{PositionLogprobs, Sampled, TokenLogprob};
use pagetide_engine::plan::{SampledTokens, SeqOutput, StepOutput, StepPlan};

/// Mean difference between the log-probabilities of one candidate and the next. It decides how often beams fork, and
/// with it how much they share. With this value, searches with Alpaca-like lengths share about as much as the paper
/// measures with OPT-13B (figure 15b).
const MEAN_GAP: f32 = 1.0;

/// Fills in the candidates of all beams. They depend on the sequence and its length alone.
pub fn beam_candidates(plan: &StepPlan, output: &mut StepOutput) {
    for result in &mut output.seqs {
        let Some(planned) = plan.batch.iter().find(|planned| planned.seq == result.seq) else { continue };
        let Some(sample) = &planned.sample else { continue };
        let num = sample.params.logprobs.unwrap_or(1).max(1);
        let seed = (planned.seq.0 << 20) ^ u64::from(sample.position);
        fill(result, num, seed);
    }
}

fn fill(result: &mut SeqOutput, num: u32, seed: u64) {
    let (mut state, mut logprob) = (seed, 0.0f32);
    let mut next = |rank: u32| {
        state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        // In (0, 1].
        let unit = ((state >> 40) + 1) as f32 / (1u32 << 24) as f32;
        logprob += MEAN_GAP * unit.ln();
        TokenLogprob { token: (state % 30_000) as TokenId * 16 + rank, logprob, rank }
    };
    let top: Vec<TokenLogprob> = (1..=num).map(&mut next).collect();
    let chosen = top[0];
    let logprobs = PositionLogprobs { chosen, top };
    let sampled = Sampled { logprobs: Some(Box::new(logprobs)), ..Sampled::of(chosen.token) };
    result.sampled = SampledTokens::from_elem(sampled, result.sampled.len());
}

/// Spreads the bits of a number (the finaliser of SplitMix64).
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
